"""Simulate the memory use of FSDP2 on an unsharded copy of the model, so that a trace can see it.

A rank keeps its shards of parameters, gradients and optimizer states. While a unit (a module that ``fully_shard`` was
applied to) runs forward or backward, its parameters are gathered. When its gradients are complete, they are copied to
the input of the reduce-scatter and become shards. The copy has whole parameters, which are not counted; instead, hooks
allocate and free what FSDP would.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class ShardedCopy:
    """Fake copies of a sharded model and its optimizers, all on the CPU.

    Args:
        model: The root FSDP module.
        optimizers: Its optimizers; their copies step the shards.
        fake: The fake tensor mode of the copies.

    Raises:
        NotImplementedError: If a parameter has a type that cannot be copied whole, such as a quantized one.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], fake: FakeTensorMode) -> None:
        self._fake = fake
        names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        whole: dict[int, Any] = {}
        shards: dict[int, Any] = {}
        for parameter in model.parameters():
            whole[id(parameter)] = self._parameter(parameter, parameter.shape)
            shards[id(parameter)] = self._parameter(parameter, _local(parameter).shape)
        for buffer in model.buffers():
            whole[id(buffer)] = shards[id(buffer)] = self._empty(buffer, buffer.shape)
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        shards[id(value)] = self._empty(value, _local(value).shape)
        self.shards: list[nn.Parameter] = [shards[id(p)] for p in model.parameters()]
        with FakeCopyMode(fake):
            self.optimizers: list[Optimizer] = copy.deepcopy(list(optimizers), dict(shards))
        self.model = _plain_copy(model, whole, fake)
        of_copy = {id(whole[key]): shard for key, shard in shards.items() if key in whole}
        modules = dict(self.model.named_modules())
        managed: set[int] = set()
        for name in reversed(names):  # a unit manages the parameters that no nested unit does
            parameters = [p for p in modules[name].parameters() if id(p) not in managed]
            managed.update(map(id, parameters))
            if parameters:
                _Unit(modules[name], [(p, of_copy[id(p)]) for p in parameters])

    def _parameter(self, original: torch.Tensor, shape: torch.Size) -> nn.Parameter:
        copied = self._empty(original, shape)
        with self._fake:
            return nn.Parameter(copied, requires_grad=original.requires_grad)

    def _empty(self, original: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if is_traceable_wrapper_subclass(_local(original)):
            raise NotImplementedError(f"a shard of type {type(_local(original)).__name__} cannot be traced")
        with self._fake:
            return torch.empty(shape, dtype=original.dtype, device="cpu")


class _Unit:
    """Simulates gathering and reducing for one module.

    Args:
        module: A module of the copy.
        parameters: Its whole parameters, each with the shard that a rank keeps.
    """

    def __init__(self, module: nn.Module, parameters: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        self._parameters = parameters
        self._trained = [(whole, shard) for whole, shard in parameters if whole.requires_grad]
        self._gathered: torch.Tensor | None = None
        self._waiting = 0
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        module.register_forward_hook(self._after_forward)
        for whole, _ in self._trained:
            whole.register_post_accumulate_grad_hook(self._after_gradient)  # type: ignore[no-untyped-call]

    def _gather(self) -> None:
        if self._gathered is None:
            size = sum(whole.numel() for whole, _ in self._parameters)
            self._gathered = torch.empty(size, dtype=self._parameters[0][0].dtype)

    def _release(self) -> None:
        self._gathered = None

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._gather()
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
                # the gradient of an input is the last one that the unit computes
                value.register_hook(lambda gradient: self._release())  # type: ignore[no-untyped-call]

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._release()
        for value in tree_iter(output):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(lambda gradient: self._before_backward())  # type: ignore[no-untyped-call]

    def _before_backward(self) -> None:
        self._gather()
        self._waiting = len(self._trained)

    def _after_gradient(self, parameter: torch.Tensor) -> None:
        self._waiting -= 1
        if self._waiting > 0:
            return
        size = sum(whole.numel() for whole, _ in self._trained)
        to_reduce = torch.empty(size, dtype=parameter.dtype)
        for whole, shard in self._trained:
            whole.grad = None
            reduced = torch.empty_like(shard)
            shard.grad = reduced if shard.grad is None else shard.grad + reduced
        del to_reduce
        self._release()


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
