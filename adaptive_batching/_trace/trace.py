"""Predict the peak memory of a training step at any batch size, from two traces that allocate nothing.

The step runs twice under :class:`~torch._subclasses.fake_tensor.FakeTensorMode`, and the bytes alive after every
operation are recorded; :mod:`adaptive_batching._trace.traced_step` says what follows from them. The curve's level
leaves out kernel workspaces and fragmentation; a measured step calibrates it.

Where the step runs on CUDA, the traces run on fake tensors of that device, so that torch chooses the kernels of
attention and the implementation of optimizers as in a real step. Elsewhere, and for a sharded model, they run on fake
*CPU* tensors: on the CPU, native attention takes the memory of CUDA's fused kernels. Without CUDA in the process, a
backward pass over fake CUDA tensors would abort it.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from adaptive_batching._device import RandomState
from adaptive_batching._ranks.fsdp import is_sharded
from adaptive_batching._snapshot import Snapshot, without_hooks
from adaptive_batching._trace.traced_step import TRACED_SIZES, PeakMemoryCurve, StepRecord, TracedStep, TraceError
from adaptive_batching._trace.training import TrainingStep, models_of

log = logging.getLogger(__name__)


def trace_peak_memory(step: TrainingStep) -> PeakMemoryCurve:
    """Trace ``step`` at two batch sizes, leaving model, optimizers and random state unchanged.

    Optimizer states need not exist yet. If an operation has no fake implementation or depends on the data, raise
    TraceError.
    """
    return trace_step(step).curve


def trace_step(step: TrainingStep, *, notes_work: bool = False) -> TracedStep:
    """Trace ``step`` as :func:`trace_peak_memory` does, and return all that the traces say.

    What the step asks of a device is noted only if ``notes_work``, since that takes half as long again.
    """
    # What keeps what it has computed would keep fake tensors.
    around = Snapshot([step.model, *step.owners], looks_into_hooks=True, copies="nowhere")
    random_state = RandomState(torch.device("cpu"))
    stepped = [p for optimizer in step.optimizers for group in optimizer.param_groups for p in group["params"]]
    gradients = [(parameter, parameter.grad) for parameter in (*around.parameters, *stepped)]
    try:
        with without_hooks(step.optimizers):
            return _trace_step(step, notes_work)
    finally:
        around.put_back()
        random_state.put_back()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def num_left_behind() -> int:
    """Return how many fake tensors of traces are still alive, because something keeps them out of sight."""
    if (module := sys.modules.get("adaptive_batching._trace.fake_step")) is None:
        return 0
    gc.collect()
    fake = [value for value in gc.get_objects() if type(value) is module.FakeTensor]
    return sum(value.fake_mode in module.modes for value in fake)


def _trace_step(step: TrainingStep, notes_work: bool) -> TracedStep:
    device = _device_of_trace(step.model)
    try:
        records = [_record_at(size, step, device, notes_work) for size in TRACED_SIZES]
    except TraceError as error:
        if device.type == "cpu":
            raise
        records = [_record_at(size, step, torch.device("cpu"), notes_work) for size in TRACED_SIZES]
        log.debug("traced with the kernels of the CPU, because on %s: %s", device, error)
    try:
        return TracedStep(*records)
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


@contextmanager
def _unlogged() -> Iterator[None]:
    """Have torch log no operation that fails under fake tensors, which ends a trace and nothing more."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _record_at(size: int, step: TrainingStep, device: torch.device, notes_work: bool) -> StepRecord:
    try:
        # The first trace imports it: it stands on private names of torch, and one that is gone ends no more than that.
        from adaptive_batching._trace import fake_step

        with torch.compiler.set_stance("force_eager"), _unlogged():
            return fake_step.record(step, step.make_batch(size), device, notes_work=notes_work)
    except Exception as error:  # third-party operations may raise anything under fake tensors
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise TraceError(f"{type(error).__name__}: {first_line[:200]}") from error
