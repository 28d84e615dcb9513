"""Simulation of what FSDP2 allocates and frees around the units of a model, and when.

While a unit (a module that ``fully_shard`` was applied to) runs forward or backward, its parameters are gathered: all
in one tensor, on a stream of its own, out of which each is copied. Its complete gradients are copied to the input of
the reduce-scatter and become shards, parts of one tensor on another stream. In a forward, the output of an all-gather
lives on until the next one or the model has ended; in the backward pass, the unit before is gathered ahead of time, the
input of a reduce-scatter stays until the next one begins, and units whose inputs have no gradient, such as the root,
are gathered to the end. A unit of several modules, as Accelerate has one of the last norm and the output layer, runs
from the first of them to the last, or to the end of the model if one of them does not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only, tree_unflatten

from adaptive_batching._ranks.fsdp import is_sharded
from adaptive_batching._trace.recorder import labelled, on_stream
from adaptive_batching._trace.traced_step import GRADIENTS, WEIGHTS


def simulate(
    root: nn.Module, copied: nn.Module, shards: dict[int, nn.Parameter], number: int, *, offloads: bool
) -> None:
    """Have the copy of a root take what FSDP takes; ``shards`` are by the ids of the copy's whole parameters.

    Each root, by its number, has streams of its own, whose memory no other takes.
    """
    streams = _Streams(number)
    modules = dict(copied.named_modules())
    together: dict[Any, list[nn.Module]] = {}  # modules of each unit, by FSDP's state
    for name, module in root.named_modules():
        if is_sharded(module):
            together.setdefault(state_of(module), []).append(modules[name])
    managed: set[int] = set()
    for state, members in reversed(together.items()):  # a unit manages the parameters that no nested unit does
        own = {id(p): p for module in members for p in module.parameters() if id(p) not in managed}
        managed.update(own)
        policy = state._mp_policy
        for module in members if policy.cast_forward_inputs and policy.param_dtype else ():
            module.register_forward_pre_hook(partial(_cast_inputs, policy.param_dtype), with_kwargs=True)
        if own:
            pairs = [(p, shards[key]) for key, p in own.items()]
            reshards = bool(getattr(state._fsdp_param_group, "_reshard_after_forward", True))
            unit = _Unit(members, pairs, streams, policy.reduce_dtype, reshards=reshards, offloads=offloads)
            streams.units.insert(0, unit)
        for module in members if policy.output_dtype else ():
            module.register_forward_hook(partial(_cast_output, policy.output_dtype))
    copied.register_forward_hook(streams.end_forward)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(dtype, args), _cast(dtype, kwargs)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(dtype, output)


def _cast(dtype: torch.dtype, values: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, values)


class _Streams:
    """Buffers that outlive the unit they belong to, and the order of forwards: one for all units of a root."""

    def __init__(self, root: int) -> None:
        self.gathers, self.reduces = 2 * root + 1, 2 * root + 2  # streams on which these take their outputs
        self.units: list[_Unit] = []  # from the root on, as the modules are listed
        # Output of the last all-gather of a forward, freed when the next has ended, or the root's forward has.
        self.gathered_before: torch.Tensor | None = None
        self.reducing: torch.Tensor | None = None  # input of the last reduce-scatter, freed before the next begins
        self.order: list[_Unit] = []  # of their forwards: the backward pass gathers the one before ahead of time
        self._is_queued = False

    def end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        for unit in reversed(self.units):
            unit.end_forward(output)
        self.gathered_before = None

    def begin_backward(self) -> None:
        """Have the backward pass end as FSDP ends it."""
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        for unit in self.units:
            unit.end_backward()
        self.order.clear()
        self.reducing = None
        self._is_queued = False


class _BeforeUnit(torch.autograd.Function):
    """Passes on the inputs of a unit, so that their gradients, the last that it computes, can be waited for."""

    @staticmethod
    def forward(unit: _Unit, *inputs: torch.Tensor) -> Any:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.unit = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.unit.after_backward()
        return None, *gradients


class _Unit:
    """Simulates gathering and reducing for the modules of a unit, as FSDP2 does by default.

    The order is that of ``unshard``, ``wait_for_unshard``, ``pre_backward`` and ``post_backward`` in
    ``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``. ``pairs`` are whole parameters with the shards that a
    rank keeps. If it ``reshards``, whole ones are freed after the forward; if it ``offloads``, shards are on the host.
    Gradients are reduced in ``reduce_dtype``, None for that of the whole parameters.
    """

    def __init__(
        self, modules: Sequence[nn.Module], pairs: list[tuple[nn.Parameter, nn.Parameter]], streams: _Streams,
        reduce_dtype: torch.dtype | None, *, reshards: bool, offloads: bool,
    ) -> None:  # fmt: skip
        self._modules = modules
        self._to_run: set[nn.Module] = set()  # of a forward that has begun
        self._whole_bytes = [bytes_ for gathered, _ in pairs for bytes_ in _parts(gathered)]
        self._shard_bytes = [bytes_ for _, shard in pairs for bytes_ in _parts(shard)]
        self._cast_bytes = sum(
            local_part(shard).numel() * gathered.element_size()
            for gathered, shard in pairs
            if gathered.dtype != shard.dtype
        )
        self._trained = [(gathered, shard) for gathered, shard in pairs if gathered.requires_grad]
        self._streams, self._reduce_dtype = streams, reduce_dtype
        self._reshards, self._offloads = reshards, offloads
        self._gathered: list[torch.Tensor] = []  # in the order in which they are freed
        self._ahead: torch.Tensor | None = None  # output of an all-gather that has not been copied out
        self._forwards: list[int] = []  # their places in the order
        self._is_ready = False  # gathered for its backward pass
        self._is_done = False  # its gradients are reduced
        for module in modules:
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            module.register_forward_hook(self._after_forward)

    def _gather_ahead(self) -> None:
        """Take the output of an all-gather, of all parameters in one."""
        if self._gathered or self._ahead is not None:
            return
        with labelled(WEIGHTS), on_stream(self._streams.gathers):
            # Offloaded shards come from the host first, others are cast, and go when they are copied into the output.
            copies = [_room(bytes_) for bytes_ in (self._shard_bytes if self._offloads else [self._cast_bytes])]
            self._ahead = _room(sum(self._whole_bytes))
            del copies

    def _unshard(self, *, in_forward: bool) -> None:
        if self._gathered:
            return
        self._gather_ahead()
        output, self._ahead = self._ahead, None
        with labelled(WEIGHTS):
            self._gathered = [_room(bytes_) for bytes_ in self._whole_bytes]
        if in_forward:
            self._streams.gathered_before = output  # a local variable of FSDP holds the one before up to here

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            self._unshard(in_forward=True)
        if self._to_run:
            return None
        self._to_run.update(self._modules)
        leaves, spec = tree_flatten((args, kwargs))
        at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if at and torch.is_grad_enabled():
            passed_on = _BeforeUnit.apply(self, *(leaves[n] for n in at))  # type: ignore[no-untyped-call]
            for n, value in zip(at, passed_on, strict=True):
                leaves[n] = value
        return tree_unflatten(leaves, spec)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._to_run == {module}:
            self.end_forward(output)
        self._to_run.discard(module)

    def end_forward(self, output: Any) -> None:
        """End a forward, if one has begun, that has the result ``output``."""
        if not self._to_run:
            return
        self._to_run.clear()
        if torch._C._current_graph_task_id() == -1:
            if self._reshards:
                self._free_gathered()
            self._forwards.append(len(self._streams.order))
            self._streams.order.append(self)
        for value in tree_iter(output):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(lambda gradient: self._before_backward())  # type: ignore[no-untyped-call]

    def _before_backward(self) -> None:
        self._streams.begin_backward()
        if self._is_ready:
            return
        self._is_ready, self._is_done = True, False
        self._unshard(in_forward=False)
        at = self._forwards.pop() if self._forwards else 0
        if at:
            self._streams.order[at - 1]._gather_ahead()

    def after_backward(self) -> None:
        """Free the whole parameters, and reduce the gradients."""
        self._is_ready, self._is_done = False, True
        gradients = [(gathered, shard) for gathered, shard in self._trained if gathered.grad is not None]
        self._free_gathered()
        self._streams.reducing = None
        if not gradients:
            return
        dtype, own = self._reduce_dtype or gradients[0][0].dtype, gradients[0][1].dtype
        self._streams.reducing = torch.empty(
            sum(local_part(gathered).numel() for gathered, _ in gradients), dtype=dtype
        )
        for gathered, _ in reversed(gradients):  # as a list is emptied
            gathered.grad = None
        with on_stream(self._streams.reduces):
            with labelled(GRADIENTS):
                reduced = torch.empty(sum(shard.numel() for _, shard in gradients), dtype=dtype).to(own)
            if self._offloads:
                return  # copied to the host, where the optimizer steps
            parts = list(torch.split(reduced, [shard.numel() for _, shard in gradients]))
            del reduced
            for _, shard in gradients:
                part = parts.pop(0).view(shard.shape)
                if shard.grad is None:
                    shard.grad = part
                else:
                    shard.grad.add_(part)
                del part
                for hook in (getattr(shard, "_post_accumulate_grad_hooks", None) or {}).values():
                    hook(shard)  # as of an optimizer that steps in the backward pass

    def _free_gathered(self) -> None:
        while self._gathered:
            del self._gathered[0]

    def end_backward(self) -> None:
        if not self._is_done:
            self.after_backward()  # none of its inputs has a gradient
        self._ahead = None
        self._forwards.clear()
        self._to_run.clear()
        self._is_ready = self._is_done = False


def _room(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _parts(tensor: torch.Tensor) -> list[int]:
    """Return the bytes of a tensor, or of what is gathered of each of the tensors inside it."""
    tensor = local_part(tensor)
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.numel() * tensor.element_size()]
    return [size for name in tensor.__tensor_flatten__()[0] for size in _parts(getattr(tensor, name))]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a distributed tensor that this rank has; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def group_of(module: nn.Module) -> Any:
    """Return FSDP's group of a module's parameters; None if it has none."""
    return getattr(state_of(module), "_fsdp_param_group", None)


def state_of(module: nn.Module) -> Any:
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None
