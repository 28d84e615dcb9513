"""Copy a model that FSDP2 has sharded so that a trace sees the memory that one rank uses.

A rank keeps its shards of parameters, gradients and optimizer states. The copy has whole parameters, which are not
counted; instead, hooks allocate and free what FSDP would, in its order: :mod:`adaptive_batching._probe.fsdp_units`.
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

from adaptive_batching._probe.fsdp_units import Streams, Unit, local_part
from adaptive_batching._probe.trial import kept_tensors, models_of
from adaptive_batching._ranks.fsdp import is_sharded

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class ShardedCopy:
    """Fake copies of sharded models and of the optimizers, which step the shards, all on the CPU.

    ``model`` is the root FSDP module, or a list of several, each with all-gathers of its own.
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
            shard = local_part(parameter)
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
                        shards[id(value)] = _fake_like(local_part(value), local_part(value).shape, fake)
        self.shards: list[nn.Parameter] = [shards[id(p)] for p in model.parameters()]
        for shard in self.shards:
            shard.is_on_host = self.offloads  # type: ignore[attr-defined]
        with FakeCopyMode(fake):
            self.optimizers: list[Optimizer] = copy.deepcopy(list(optimizers), dict(shards))
        self.model = _plain_copy(model, whole, fake)
        of_copy = {id(whole[key]): shard for key, shard in shards.items() if key in whole}
        for number, (root, copied) in enumerate(zip(models_of(model), models_of(self.model), strict=True)):
            self._simulate(root, copied, of_copy, Streams(number))

    def _simulate(self, root: nn.Module, copied: nn.Module, shards: dict[int, nn.Parameter], streams: Streams) -> None:
        """Have the copy of a root take what FSDP takes; ``shards`` are by the ids of the copy's whole parameters."""
        units: dict[str, nn.Module] = {name: module for name, module in root.named_modules() if is_sharded(module)}
        modules = dict(copied.named_modules())
        managed: set[int] = set()
        for name in reversed(units):  # a unit manages the parameters that no nested unit does
            parameters = [p for p in modules[name].parameters() if id(p) not in managed]
            managed.update(map(id, parameters))
            if parameters:
                pairs = [(p, shards[id(p)]) for p in parameters]
                reshards = bool(getattr(_group(units[name]), "_reshard_after_forward", True))
                unit = Unit(modules[name], pairs, streams, reshards=reshards, offloads=self.offloads)
                streams.units.insert(0, unit)
        copied.register_forward_hook(lambda *_: setattr(streams, "gathered_before", None))

    def _parameter(self, original: torch.Tensor, copied: torch.Tensor) -> nn.Parameter:
        with self._fake:
            return nn.Parameter(copied, requires_grad=original.requires_grad)


def _fake_like(original: torch.Tensor, shape: torch.Size, fake: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor of the same type on the CPU, of another number of rows."""
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
