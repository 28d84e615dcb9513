"""Run a training step on fake copies of its models and optimizers, and record what it takes.

Of a model that FSDP2 has sharded, a rank keeps its shards of parameters, gradients and optimizer states. The copy has
whole parameters, which are not counted; instead, hooks allocate and free what FSDP would, in its order:
:mod:`adaptive_batching._trace.fsdp_units`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._functorch import config as functorch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from adaptive_batching._ranks.fsdp import is_sharded
from adaptive_batching._trace.bits_and_bytes import traced_as
from adaptive_batching._trace.fsdp_units import group_of, local_part, simulate, state_of
from adaptive_batching._trace.recorder import Recorder, state_tensors
from adaptive_batching._trace.traced_step import STATES, WEIGHTS, StepRecord
from adaptive_batching._trace.training import TrainingStep, has_states, kept_tensors, models_of, trainable

modes: weakref.WeakSet[FakeTensorMode] = weakref.WeakSet()
"""The modes of traces, by which their tensors are known; a class of our own would not run operators of higher order."""


def record(step: TrainingStep, batch: Any, device: torch.device, *, notes_work: bool = False) -> StepRecord:
    """Return the record of ``step`` on ``batch`` as it repeats, on fake tensors of ``device``."""
    with _with_nothing_that_needs_pointers():
        return _record(step, batch, device, notes_work)


@contextlib.contextmanager
def _with_nothing_that_needs_pointers() -> Iterator[None]:
    """Keep kernels from being launched on fake tensors, whose pointers are null: on a card, one would end the process.

    Triton's are left out, since what they write to has been allocated before. Memory is not pinned, of which there is
    no fake. Whatever else asks a fake tensor for its pointer fails, which ends the trace.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(functorch.patch(fake_tensor_allow_unsafe_data_ptr_access=False))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor))
        if (jit := sys.modules.get("triton.runtime.jit")) is not None:
            of_grid = jit.KernelInterface.__getitem__

            def launch_if_real(kernel: Any, grid: Any) -> Callable[..., Any]:
                launch: Callable[..., Any] = of_grid(kernel, grid)

                def launch_or_not(*args: Any, **kwargs: Any) -> Any:
                    is_fake = any(isinstance(each, FakeTensor) for each in (*args, *kwargs.values()))
                    return None if is_fake else launch(*args, **kwargs)

                return launch_or_not

            stack.enter_context(mock.patch.object(jit.KernelInterface, "__getitem__", launch_if_real))
        yield


def _record(step: TrainingStep, batch: Any, device: torch.device, notes_work: bool) -> StepRecord:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    modes.add(fake)
    stepped = [traced_as(optimizer) for optimizer in step.optimizers]
    # `kept` is what a rank keeps of the parameters, and the optimizers step: its shards, where there are several ranks.
    # They, their gradients and the optimizer states may be on the host.
    if any(map(is_sharded, models_of(step.model))):
        model, optimizers, kept, on_host = _sharded_copy(step.model, stepped, fake)
    else:
        model, optimizers = _whole_copy(step.model, stepped, fake, device)
        kept, on_host = list(model.parameters()), False
    try:
        code = _copies_of(step.code, (step.model, *stepped), (model, *optimizers), fake)
        for optimizer, original in zip(optimizers, stepped, strict=True):
            _complete(optimizer, original)
        with fake:
            run = step.bind(model, optimizers, *code)
            earlier, batch = (
                tree_map_only(torch.Tensor, lambda tensor: _fake_on(device, tensor, fake), batch) for _ in range(2)
            )
            if step.compiles or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
                # Compiles or finds out how to distribute, and leaves behind what later steps do not make again.
                run(earlier)
                gc.collect()
        recorder = Recorder(step.vocabulary, device.type, on_cuda=step.on_cuda, notes_work=notes_work)
        recorder.hold(kept, WEIGHTS, counts=not on_host)
        recorder.hold(model.buffers(), WEIGHTS)
        recorder.hold(state_tensors(optimizers), STATES, counts=not on_host)
        # whole parameters of a sharded model, and their views, take no memory
        recorder.hold(model.parameters(), WEIGHTS, counts=False)
        with fake, recorder, recorder.watching(models_of(model), kept, steps_elsewhere=on_host):
            if not optimizers:
                run(batch)  # creates optimizers of its own, and their states
            for optimizer in optimizers:
                _make_states(optimizer)
            recorder.hold(state_tensors(optimizers), STATES)
            resting_bytes = recorder.current_bytes
            if step.keeps:
                run(earlier)
                del earlier
                gc.collect()
            recorder.begin(kept_bytes=recorder.current_bytes - resting_bytes)
            if step.holds_gradients:
                _hold_gradients(optimizers)  # those of earlier forwards, which take no more than the last one
            run(batch)  # the steady state
        return recorder.record()
    finally:
        # Optimizers that step in backward hang on hooks of what they step: a circle that Python does not collect.
        for parameter in model.parameters():
            for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
                if hooks is not None:
                    hooks.clear()


def _make_states(optimizer: Optimizer) -> None:
    """Step a copied optimizer on gradients of its own, to have its states without a forward and backward."""
    if not has_states(optimizer):
        for parameter in trainable(optimizer):
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for parameter in trainable(optimizer):
            parameter.grad = None


def _hold_gradients(optimizers: Sequence[Optimizer]) -> None:
    for parameter in (parameter for optimizer in optimizers for parameter in trainable(optimizer)):
        if parameter.grad is None and not getattr(parameter, "is_on_host", False):
            parameter.grad = torch.zeros_like(parameter)


def _whole_copy(
    model: nn.Module, optimizers: Sequence[Optimizer], fake: FakeTensorMode, device: torch.device
) -> tuple[nn.Module, list[Optimizer]]:
    """Copy model and optimizers together, the optimizers tied to the copied model.

    On the CPU all tensors are together; on another device, what was on the host stays there, such as an optimizer's
    count of steps.
    """
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers(), *kept_tensors(model), *state_tensors(optimizers)]:
        copied = _fake_on(device if device.type == "cpu" else tensor.device, tensor, fake)
        memo[id(tensor)] = _as_parameter(copied, tensor, fake) if isinstance(tensor, nn.Parameter) else copied
    with FakeCopyMode(fake):
        both: tuple[nn.Module, list[Optimizer]] = copy.deepcopy((model, list(optimizers)), memo)
    return both


def _sharded_copy(
    model: nn.Module, optimizers: Sequence[Optimizer], fake: FakeTensorMode
) -> tuple[nn.Module, list[Optimizer], list[nn.Parameter], bool]:
    """Copy a root FSDP module, or a list of several, each with all-gathers of its own, all on the CPU.

    Also return the shards, and whether they are on the host.
    """
    groups = [group for module in model.modules() if (group := group_of(module)) is not None]
    offloads = any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)
    by_id: dict[int, Any] = {}
    shards: dict[int, Any] = {}
    of_fsdp = {id(part.sharded_param): part for group in groups for part in group.fsdp_params}
    for parameter in model.parameters():
        shard, part = local_part(parameter), of_fsdp.get(id(parameter))
        gathered = _fake_like(shard, parameter.shape, fake) if part is None else _fake_gathered(part, parameter, fake)
        by_id[id(parameter)] = _as_parameter(gathered, parameter, fake)
        shards[id(parameter)] = _as_parameter(_fake_like(shard, shard.shape, fake), parameter, fake)
    for buffer in [*model.buffers(), *kept_tensors(model)]:
        by_id[id(buffer)] = shards[id(buffer)] = _fake_like(buffer, buffer.shape, fake)
    for state in state_tensors(optimizers):
        shards[id(state)] = _fake_like(local_part(state), local_part(state).shape, fake)
    kept: list[nn.Parameter] = [shards[id(p)] for p in model.parameters()]
    for shard in kept:
        shard.is_on_host = offloads  # type: ignore[attr-defined]
    with FakeCopyMode(fake):
        copied_optimizers = copy.deepcopy(list(optimizers), dict(shards))
    copied_model = _plain_copy(model, by_id, fake)
    of_copy = {id(by_id[key]): shard for key, shard in shards.items() if key in by_id}
    for number, (root, copied) in enumerate(zip(models_of(model), models_of(copied_model), strict=True)):
        simulate(root, copied, of_copy, number, offloads=offloads)
    return copied_model, copied_optimizers, kept, offloads


def _copies_of(code: Sequence[Any], originals: Sequence[Any], copies: Sequence[Any], fake: FakeTensorMode) -> list[Any]:
    """Return copies of functions and objects of the user's, tied to those of models and optimizers.

    What they keep of a trace, they keep in the copies. A function is its own copy.
    """
    memo: dict[int, Any] = {}
    for original, copied in zip(originals, copies, strict=True):
        memo[id(original)] = copied
        if isinstance(original, nn.Module):
            memo.update(zip(map(id, original.modules()), copied.modules(), strict=True))
            memo.update(zip(map(id, original.parameters()), copied.parameters(), strict=True))
    with FakeCopyMode(fake):
        return copy.deepcopy(list(code), memo)


def _as_parameter(tensor: torch.Tensor, original: torch.Tensor, fake: FakeTensorMode) -> nn.Parameter:
    with fake:
        return nn.Parameter(tensor, requires_grad=original.requires_grad)


def _complete(copied: Optimizer, original: Optimizer) -> None:
    """Give a copied optimizer what deepcopy, which copies states and groups alone, has left out.

    Its implementation is what torch would choose by device: the for-loop on the CPU, foreach (with its temporaries)
    elsewhere.
    """
    for name, value in vars(original).items():
        if name != "step":  # a learning-rate scheduler binds it to the original
            vars(copied).setdefault(name, value)
    for group, original_group in zip(copied.param_groups, original.param_groups, strict=True):
        on_cpu = all(parameter.device.type == "cpu" for parameter in original_group["params"])
        if group.get("foreach", ...) is None and group.get("fused") is None:  # torch respects a choice of either
            group["foreach"] = not on_cpu


def _fake_on(device: torch.device, tensor: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor of the same type, shape and strides; of subclasses such as NF4, the inner ones."""
    if isinstance(tensor, DTensor):
        part = _fake_on(device, tensor.to_local(), fake)
        mesh, placed = tensor.device_mesh, tensor.placements
        return DTensor.from_local(part, mesh, placed, run_check=False, shape=tensor.shape, stride=tensor.stride())
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        inner = {name: _fake_on(device, getattr(tensor, name), fake) for name in names}
        with fake:
            return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    with fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _fake_like(original: torch.Tensor, shape: torch.Size, fake: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor of the same type on the CPU, of another number of rows."""
    if not is_traceable_wrapper_subclass(original):
        with fake:
            return torch.empty(shape, dtype=original.dtype, device="cpu")
    if type(original).__name__ != "NF4Tensor":
        raise NotImplementedError(f"a shard of type {type(original).__name__} cannot be traced")
    names, context = original.__tensor_flatten__()
    meta = replace(context["tensor_meta"], original_shape=shape, device=torch.device("cpu"))
    inner = {}
    with fake:
        for name in names:
            part = getattr(original, name)
            by_rows = name in ("quantized_data", "quantized_scalers", "quantization_factor")
            size = part.numel() * shape.numel() // original.shape.numel() if by_rows else part.shape
            inner[name] = torch.empty(size, dtype=part.dtype, device="cpu")
        wrapper: torch.Tensor = type(original).__tensor_unflatten__(
            inner, {**context, "tensor_meta": meta}, shape, original.stride()
        )
        return wrapper


def _fake_gathered(part: Any, parameter: nn.Parameter, fake: FakeTensorMode) -> torch.Tensor:
    """Return what is gathered of ``parameter``, FSDP's ``part``; of tensor parallelism, what one device has of it."""
    if not part.is_dtensor:
        gathered, dtype = _fake_like(local_part(parameter), parameter.shape, fake), part.mp_policy.param_dtype
        return gathered if dtype is None or not gathered.is_floating_point() else gathered.to(dtype)
    spec = part._unsharded_dtensor_spec
    with fake:
        local = torch.empty(part._orig_size, dtype=part.sharded_param.dtype, device="cpu")
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=spec.tensor_meta.shape, stride=spec.tensor_meta.stride
    )


def _plain_copy(model: nn.Module, memo: dict[int, Any], fake: FakeTensorMode) -> nn.Module:
    """Return a deep copy of ``model`` without FSDP's classes, states and hooks."""
    states = {id(state): state for module in model.modules() if (state := state_of(module)) is not None}
    handles = [h for s in states.values() for h in (s._pre_forward_hook_handle, s._post_forward_hook_handle)]
    of_fsdp = {hook.id for handle in handles for hook in getattr(handle, "handles", [handle])}
    classes: list[Any] = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, sharded_class in classes:  # which refuse to be copied
            module.__class__ = sharded_class.__mro__[2]  # [FSDP<Original>, FSDPModule, Original, ...]
        with FakeCopyMode(fake):
            copied: nn.Module = copy.deepcopy(model, {**memo, **dict.fromkeys(states, object())})
    finally:
        for module, sharded_class in classes:
            module.__class__ = sharded_class
    for module in copied.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in of_fsdp & hooks.keys():
                del hooks[key]
    return copied
