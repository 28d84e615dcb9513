"""Predict the peak memory of a training step at any batch size, from two traces that allocate nothing.

The step runs twice under :class:`~torch._subclasses.fake_tensor.FakeTensorMode`, and the bytes alive after every
operation are recorded; :mod:`adaptive_batching._probe.curve` says what follows from them.

Where the step runs on CUDA, the traces run on fake tensors of that device, so that torch chooses the kernels of
attention and the implementation of optimizers as in a real step. Elsewhere, and for a sharded model, they run on fake
*CPU* tensors: on the CPU, native attention takes the memory of CUDA's fused kernels. Without CUDA in the process, a
backward pass over fake CUDA tensors would abort it.

The curve's level leaves out kernel workspaces and fragmentation; a measured step calibrates it. What CUDA's allocator
reserves is found by replaying the record of a step: :mod:`adaptive_batching._probe.reserved`.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from adaptive_batching._probe.block_wise import traced_as
from adaptive_batching._probe.curve import TRACED_SIZES, PeakMemoryCurve, TracedStep, TraceError
from adaptive_batching._probe.ledger import STATES, WEIGHTS, StepRecord
from adaptive_batching._probe.recording import Recorder, state_tensors
from adaptive_batching._probe.sharded_trace import ShardedCopy
from adaptive_batching._probe.trial import TrainingStep, has_states, kept_tensors, models_of
from adaptive_batching._ranks.fsdp import is_sharded

log = logging.getLogger(__name__)


def trace_peak_memory(step: TrainingStep, change: Callable[[nn.Module], None] | None = None) -> PeakMemoryCurve:
    """Trace ``step`` at two batch sizes, leaving model, optimizers and random state unchanged.

    Optimizer states need not exist yet. To predict the effect of a ``change``, it is applied to the fake copy of the
    model. If an operation has no fake implementation or depends on the data, raise TraceError.
    """
    return trace_step(step, change).curve


def trace_step(step: TrainingStep, change: Callable[[nn.Module], None] | None = None) -> TracedStep:
    """Trace ``step`` as :func:`trace_peak_memory` does, and return all that the traces say."""
    device = _device_of_trace(step.model)
    try:
        records = [_record_at(size, step, change, device) for size in TRACED_SIZES]
    except TraceError as error:
        if device.type == "cpu":
            raise
        log.debug("tracing again on the CPU, because on %s: %s", device, error)
        records = [_record_at(size, step, change, torch.device("cpu")) for size in TRACED_SIZES]
    try:
        return TracedStep(records[0], records[1])
    except TraceError:
        raise
    except (RuntimeError, MemoryError) as error:  # the host ran out of memory
        raise TraceError(f"no memory to trace in: {error}") from error


def _device_of_trace(model: nn.Module) -> torch.device:
    """Return the device whose tensors a trace fakes: that of the model if it is CUDA and there, else the CPU."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or any(map(is_sharded, models_of(model))):
        return torch.device("cpu")
    [device] = devices
    is_there = device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return device if is_there else torch.device("cpu")


def _record_at(
    size: int, step: TrainingStep, change: Callable[[nn.Module], None] | None, device: torch.device
) -> StepRecord:
    try:
        with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            return _record(step, step.make_batch(size), change, device)
    except Exception as error:  # third-party operations may raise anything under fake tensors
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise TraceError(f"{type(error).__name__}: {first_line[:200]}") from error


def _record(
    step: TrainingStep, batch: Any, change: Callable[[nn.Module], None] | None, device: torch.device
) -> StepRecord:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    kept: Sequence[nn.Parameter]
    stepped = [traced_as(optimizer) for optimizer in step.optimizers]
    on_host = False
    if any(map(is_sharded, models_of(step.model))):
        sharded = ShardedCopy(step.model, stepped, fake)
        model, optimizers, kept = sharded.model, sharded.optimizers, sharded.shards
        on_host = sharded.offloads
        for optimizer, original in zip(optimizers, stepped, strict=True):
            _complete(optimizer, original)
    else:
        model, optimizers = _fake_copy(step.model, stepped, fake, device)
        kept = list(model.parameters())
    if change is not None:
        change(model)
    with fake:
        run = step.bind(model, optimizers)
        earlier, batch = (
            tree_map_only(torch.Tensor, lambda tensor: _fake_on(device, tensor, fake), batch) for _ in range(2)
        )
        if step.compiles or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            # Compiles or finds out how to distribute, and leaves behind what later steps do not make again.
            run(earlier)
            gc.collect()
    recorder = Recorder(step.vocabulary, device.type, on_cuda=step.on_cuda)
    for parameter in kept:
        recorder.hold(parameter, WEIGHTS, counts=not on_host)
    for tensor in model.buffers():
        recorder.hold(tensor, WEIGHTS)
    for tensor in state_tensors(optimizers):
        recorder.hold(tensor, STATES, counts=not on_host)
    for parameter in model.parameters():  # whole parameters of a sharded model, and their views, take no memory
        recorder.hold(parameter, WEIGHTS, counts=False)
    with fake, recorder, recorder.watching(models_of(model), kept, steps_elsewhere=on_host):
        if not optimizers:
            run(batch)  # creates optimizers of its own, and their states
        for optimizer in optimizers:
            _make_states(optimizer)
        for tensor in state_tensors(optimizers):
            recorder.hold(tensor, STATES)
        kept_bytes = -recorder.current_bytes
        if step.keeps:
            run(earlier)
            del earlier
            gc.collect()
        recorder.begin(kept_bytes=kept_bytes + recorder.current_bytes)
        run(batch)  # the steady state
    return recorder.record()


def _make_states(optimizer: Optimizer) -> None:
    """Step a copied optimizer on gradients of its own, to have its states without a forward and backward."""
    if has_states(optimizer):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def _fake_copy(
    model: nn.Module, optimizers: Sequence[Optimizer], fake: FakeTensorMode, device: torch.device
) -> tuple[nn.Module, list[Optimizer]]:
    """Copy model and optimizers together, the optimizers tied to the copied model.

    Every tensor is fake. On the CPU all are together; on another device, what was on the host stays there, such as an
    optimizer's count of steps.
    """
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers(), *kept_tensors(model), *state_tensors(optimizers)]:
        copied = _fake_on(device if device.type == "cpu" else tensor.device, tensor, fake)
        if isinstance(tensor, nn.Parameter):
            with fake:
                copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = copied
    with FakeCopyMode(fake):
        copied_model, copied_optimizers = copy.deepcopy((model, list(optimizers)), memo)
    for optimizer, original in zip(copied_optimizers, optimizers, strict=True):
        _complete(optimizer, original)
    return copied_model, copied_optimizers


def _complete(copied: Optimizer, original: Optimizer) -> None:
    for name, value in vars(original).items():  # deepcopy of an optimizer copies only states and groups
        if name != "step":  # a learning-rate scheduler binds it to the original
            vars(copied).setdefault(name, value)
    _choose_implementation_of_device(copied, original)


def _choose_implementation_of_device(copied: Optimizer, original: Optimizer) -> None:
    """Set what torch would choose by device: the for-loop on the CPU, foreach (with its temporaries) elsewhere."""
    for group, original_group in zip(copied.param_groups, original.param_groups, strict=True):
        on_cpu = all(parameter.device.type == "cpu" for parameter in original_group["params"])
        if group.get("foreach", ...) is None and group.get("fused") is None:  # torch respects a choice of either
            group["foreach"] = not on_cpu


def _fake_on(device: torch.device, tensor: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor of the same type, shape and strides; for subclasses such as NF4, fake the inner ones."""
    if isinstance(tensor, DTensor):
        part = _fake_on(device, tensor.to_local(), fake)
        placed = tensor.placements
        return DTensor.from_local(
            part, tensor.device_mesh, placed, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        inner = {name: _fake_on(device, getattr(tensor, name), fake) for name in names}
        with fake:
            return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    with fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
