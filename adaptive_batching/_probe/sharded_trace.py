"""Simulate the memory use of FSDP2 on an unsharded copy of the model, so that a trace can see it.

A rank keeps its shards of parameters, gradients and optimizer states. While a unit (a module that ``fully_shard`` was
applied to) runs forward or backward, its parameters are gathered. When its gradients are complete, they are copied to
the input of the reduce-scatter and become shards. The copy has whole parameters, which are not counted; instead, hooks
allocate and free what FSDP would, in its order: in a forward, the output of an all-gather lives on until the next one
or the model has ended; in the backward pass, the unit before is gathered ahead of time, the input of a reduce-scatter
stays until the next one begins, and units whose inputs have no gradient, such as the root, are gathered to the end.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from adaptive_batching._probe.ledger import GRADIENTS, WEIGHTS
from adaptive_batching._probe.recording import labelled
from adaptive_batching._probe.trial import kept_tensors, models_of
from adaptive_batching._ranks.fsdp import is_sharded

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class ShardedCopy:
    """Fake copies of sharded models and of the optimizers, all on the CPU.

    Args:
        model: The root FSDP module, or a list of several, each with all-gathers of its own.
        optimizers: The optimizers; their copies step the shards.
        fake: The fake tensor mode of the copies.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], fake: FakeTensorMode) -> None:
        self._fake = fake
        groups = [group for module in model.modules() if (group := _group(module)) is not None]
        self.offloads = any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)
        """True if shards, their gradients and the optimizer states are on the host."""

        whole: dict[int, Any] = {}
        shards: dict[int, Any] = {}
        in_parts = {id(p.sharded_param): p for group in groups for p in group.fsdp_params if p.is_dtensor}
        for parameter in model.parameters():
            shard = _local(parameter)
            part = in_parts.get(id(parameter))
            gathered = _fake_like(shard, parameter.shape, fake) if part is None else _fake_part(part, fake)
            whole[id(parameter)] = self._parameter(parameter, gathered)
            shards[id(parameter)] = self._parameter(parameter, _fake_like(shard, shard.shape, fake))
        for buffer in [*model.buffers(), *kept_tensors(model)]:
            whole[id(buffer)] = shards[id(buffer)] = _fake_like(buffer, buffer.shape, fake)
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        shards[id(value)] = _fake_like(_local(value), _local(value).shape, fake)
        self.shards: list[nn.Parameter] = [shards[id(p)] for p in model.parameters()]
        for shard in self.shards:
            shard.is_on_host = self.offloads  # type: ignore[attr-defined]
        with FakeCopyMode(fake):
            self.optimizers: list[Optimizer] = copy.deepcopy(list(optimizers), dict(shards))
        self.model = _plain_copy(model, whole, fake)
        of_copy = {id(whole[key]): shard for key, shard in shards.items() if key in whole}
        for root, copied in zip(models_of(model), models_of(self.model), strict=True):
            self._simulate(root, copied, of_copy)

    def _simulate(self, root: nn.Module, copied: nn.Module, shards: dict[int, nn.Parameter]) -> None:
        """Have the copy of a root take what FSDP takes.

        Args:
            root: The FSDP module.
            copied: Its copy.
            shards: The shard of each whole parameter of the copy, by its id.
        """
        units: dict[str, nn.Module] = {name: module for name, module in root.named_modules() if is_sharded(module)}
        modules = dict(copied.named_modules())
        managed: set[int] = set()
        streams = _Streams()
        for name in reversed(units):  # a unit manages the parameters that no nested unit does
            parameters = [p for p in modules[name].parameters() if id(p) not in managed]
            managed.update(map(id, parameters))
            if parameters:
                pairs = [(p, shards[id(p)]) for p in parameters]
                reshards = bool(getattr(_group(units[name]), "_reshard_after_forward", True))
                unit = _Unit(modules[name], pairs, streams, reshards=reshards, offloads=self.offloads)
                streams.units.insert(0, unit)
        copied.register_forward_hook(lambda *_: setattr(streams, "gathered_before", None))

    def _parameter(self, original: torch.Tensor, copied: torch.Tensor) -> nn.Parameter:
        with self._fake:
            return nn.Parameter(copied, requires_grad=original.requires_grad)


class _Streams:
    """Buffers that outlive the unit they belong to, and the order of forwards: one for all units of a root."""

    def __init__(self) -> None:
        self.units: list[_Unit] = []
        """From the root on, as the modules are listed."""

        self.gathered_before: torch.Tensor | None = None
        """Output of the last all-gather of a forward, freed when the next has ended, or the root's forward has."""

        self.reducing: torch.Tensor | None = None
        """Input of the last reduce-scatter, freed before the next begins."""

        self.order: list[_Unit] = []
        """Units in the order of their forwards. The backward pass gathers the one before ahead of time."""

        self._is_queued = False

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
    """Simulates gathering and reducing for one module, as FSDP2 does by default.

    The order is that of ``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``, in ``unshard``,
    ``wait_for_unshard``, ``pre_backward`` and ``post_backward``.

    Args:
        module: A module of the copy.
        parameters: Its whole parameters, each with the shard that a rank keeps.
        streams: Buffers of all units.
        reshards: Whole parameters are freed after the forward.
        offloads: Shards are on the host.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: list[tuple[nn.Parameter, nn.Parameter]],
        streams: _Streams,
        *,
        reshards: bool,
        offloads: bool,
    ) -> None:
        self._parameters = parameters
        self._trained = [(whole, shard) for whole, shard in parameters if whole.requires_grad]
        self._streams = streams
        self._reshards, self._offloads = reshards, offloads
        self._gathered: torch.Tensor | None = None
        self._ahead: torch.Tensor | None = None  # output of an all-gather that has not been copied out
        self._forwards: list[int] = []  # their places in the order
        self._is_ready = False  # gathered for its backward pass
        self._is_done = False  # its gradients are reduced
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        module.register_forward_hook(self._after_forward)

    def _all_gather(self) -> torch.Tensor:
        """Return the output of an all-gather, of all parameters in one."""
        size = sum(map(_bytes, (whole for whole, _ in self._parameters)))
        with labelled(WEIGHTS):
            from_host = None
            if self._offloads:  # the shard comes from the host first, and goes when it is copied into the output
                from_host = torch.empty(sum(map(_bytes, (shard for _, shard in self._parameters))), dtype=torch.uint8)
            output = torch.empty(size, dtype=torch.uint8)
            del from_host
            return output

    def _gather_ahead(self) -> None:
        if self._gathered is None and self._ahead is None:
            self._ahead = self._all_gather()

    def _unshard(self, *, in_forward: bool) -> None:
        if self._gathered is not None:
            return
        self._gather_ahead()
        output, self._ahead = self._ahead, None
        assert output is not None
        with labelled(WEIGHTS):
            self._gathered = torch.empty_like(output)  # each parameter is copied out of it
        if in_forward:
            self._streams.gathered_before = output  # a local variable of FSDP holds the one before up to here

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            self._unshard(in_forward=True)
        leaves, spec = tree_flatten((args, kwargs))
        at = [n for n, each in enumerate(leaves) if isinstance(each, torch.Tensor) and each.requires_grad]
        if at and torch.is_grad_enabled():
            passed_on = _BeforeUnit.apply(self, *(leaves[n] for n in at))  # type: ignore[no-untyped-call]
            for n, value in zip(at, passed_on, strict=True):
                leaves[n] = value
        return tree_unflatten(leaves, spec)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            if self._reshards:
                self._gathered = None
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
        gradients = [(whole, shard) for whole, shard in self._trained if whole.grad is not None]
        self._gathered = None
        self._streams.reducing = None
        if not gradients:
            return
        size = sum(_local(whole).numel() for whole, _ in gradients)
        self._streams.reducing = torch.empty(size, dtype=gradients[0][0].dtype)
        for whole, _ in gradients:
            whole.grad = None
        with labelled(GRADIENTS):
            reduced = [torch.empty_like(shard) for _, shard in gradients]
        if self._offloads:
            return  # copied to the host, where the optimizer steps
        for _, shard in gradients:
            part = reduced.pop(0)
            if shard.grad is None:
                shard.grad = part
            else:
                shard.grad.add_(part)
            del part
            for hook in (getattr(shard, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(shard)  # as of an optimizer that steps in the backward pass

    def end_backward(self) -> None:
        """Do what is left to do when the backward pass of all units has ended."""
        if not self._is_done:
            self.after_backward()  # none of its inputs has a gradient
        self._ahead = None
        self._forwards.clear()
        self._is_ready = self._is_done = False


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, or of what is gathered of the tensors inside it."""
    tensor = _local(tensor)
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.numel() * tensor.element_size()
    names, _ = tensor.__tensor_flatten__()
    return sum(_bytes(getattr(tensor, name)) for name in names)


def _fake_like(original: torch.Tensor, shape: torch.Size, fake: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor of the same type on the CPU, of another number of rows.

    Raises:
        NotImplementedError: If the type is one whose rows are not known.
    """
    if not is_traceable_wrapper_subclass(original):
        with fake:
            return torch.empty(shape, dtype=original.dtype, device="cpu")
    if type(original).__name__ != "NF4Tensor":
        raise NotImplementedError(f"a shard of type {type(original).__name__} cannot be traced")
    names, context = original.__tensor_flatten__()
    numerator, denominator = shape.numel(), original.shape.numel()
    inner = {}
    for name in names:
        part = getattr(original, name)
        by_rows = name in ("quantized_data", "quantized_scalers", "quantization_factor")
        size = part.numel() * numerator // denominator if by_rows else part.numel()
        with fake:
            inner[name] = torch.empty(size if by_rows else part.shape, dtype=part.dtype, device="cpu")
    meta = replace(context["tensor_meta"], original_shape=shape, device=torch.device("cpu"))
    with fake:
        found: torch.Tensor = type(original).__tensor_unflatten__(
            inner, {**context, "tensor_meta": meta}, shape, original.stride()
        )
        return found


def _fake_part(parameter: Any, fake: FakeTensorMode) -> torch.Tensor:
    """Return what is gathered of FSDP's ``parameter`` under tensor parallelism: the part of one device, distributed."""
    spec = parameter._unsharded_dtensor_spec
    with fake:
        local = torch.empty(parameter._orig_size, dtype=parameter.sharded_param.dtype, device="cpu")
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=spec.tensor_meta.shape, stride=spec.tensor_meta.stride
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _plain_copy(model: nn.Module, memo: dict[int, Any], fake: FakeTensorMode) -> nn.Module:
    """Return a deep copy of ``model`` without FSDP's classes, states and hooks."""
    states = {id(state): state for module in model.modules() if (state := _state(module)) is not None}
    gone = object()
    with _original_classes(model), FakeCopyMode(fake):
        copied: nn.Module = copy.deepcopy(model, {**memo, **dict.fromkeys(states, gone)})
    for module in copied.modules():
        for name in _HOOKS:
            hooks = getattr(module, name)
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is gone]:
                del hooks[key]
    return copied


def _group(module: nn.Module) -> Any:
    """Return FSDP's group of a module's parameters; None if it has none."""
    return getattr(_state(module), "_fsdp_param_group", None)


def _state(module: nn.Module) -> Any:
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


@contextlib.contextmanager
def _original_classes(model: nn.Module) -> Iterator[None]:
    """Give FSDP modules their original classes inside the context, because FSDP's classes refuse to be copied."""
    classes = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    for module, sharded_class in classes:
        module.__class__ = sharded_class.__mro__[2]  # [FSDP<Original>, FSDPModule, Original, ...]
    try:
        yield
    finally:
        for module, sharded_class in classes:
            module.__class__ = sharded_class
