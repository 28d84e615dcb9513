"""Explain that not even a batch of one sample fits: by how much, and what would help."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from adaptive_batching._memory import MemoryMeter, allocator_advice
from adaptive_batching._probe.sizes import Measurement
from adaptive_batching._probe.trial import TrainingStep
from adaptive_batching._trace.trace import trace_peak_memory
from adaptive_batching._trace.traced_step import PeakMemoryCurve, TraceError
from adaptive_batching._values import memory_size

log = logging.getLogger(__name__)


class DoesNotFitError(RuntimeError):
    """Raised if training does not fit in memory, from the start or at a later step. The message lists remedies."""


@dataclass(frozen=True)
class Remedy:
    """A change of settings that could make a batch of one fit."""

    setting: str
    step: TrainingStep | None = None
    """The training step with that setting, for tracing; None if a trace cannot predict the effect."""
    change: Callable[[nn.Module], None] | None = None
    """Applied to the traced copy of the step's model."""
    saves_bytes: int = 0
    """Known saving in bytes that the trace does not show."""


def unknown_to_trace(step: TrainingStep, meter: MemoryMeter) -> float:
    """Return the bytes in use that a trace does not see: libraries on the CPU, nothing on an accelerator."""
    states = [v for o in step.optimizers for state in o.state.values() for v in state.values()]
    known = [*step.model.parameters(), *step.model.buffers(), *(v for v in states if isinstance(v, Tensor))]
    return meter.used_bytes() - sum(tensor.nbytes for tensor in known)


def explain(
    step: TrainingStep,
    meter: MemoryMeter,
    budget: int,
    measurements: Sequence[Measurement],
    remedies: Callable[[], Sequence[Remedy]],
    curve: PeakMemoryCurve | None,
    level: float,
) -> str:
    """Return why a batch of one does not fit and what would help, with predictions corrected by measurements.

    ``level`` is the bytes in use on the device in addition to the predicted ones.
    """
    message = f"a batch of one sample does not fit in {memory_size(budget)}"
    measured = next((m for m in measurements if m.batch_size == 1), None)
    predicted = 0.0 if curve is None else curve.peak_bytes(1) + level
    if measured is not None and measured.peak_bytes is not None:
        message += (
            f": it took {memory_size(measured.peak_bytes)}, {memory_size(max(measured.peak_bytes - budget, 0))} more"
        )
        level += 0 if curve is None else measured.peak_bytes - predicted
    elif curve is not None and predicted > budget:
        message += f": it needs about {memory_size(predicted)}, {memory_size(predicted - budget)} more"
    elif curve is not None:
        # The step needs more than the budget, so the prediction is too low by at least the difference.
        message += f": it ran out of memory, though only about {memory_size(predicted)} was predicted"
        level += budget - predicted
    lines = []
    for remedy in remedies():
        predicted_with = _predict_remedy(remedy)
        if predicted_with is None or curve is None:
            lines.append(f"  {remedy.setting} (not predicted)")
            continue
        needed = predicted_with + level
        verdict = "would fit" if needed < budget else f"still {memory_size(needed - budget)} too much"
        lines.append(f"  {remedy.setting}: about {memory_size(needed)}, {verdict}")
    advice = allocator_advice(meter.device)
    if advice is not None:
        lines.append(f"  the environment variable {advice} (not predicted)")
    return "\n".join([message + ". What would help:", *lines, "  or raise adaptive_batching.memory_limit, if set"])


def _predict_remedy(remedy: Remedy) -> int | None:
    if remedy.step is None:
        return None
    try:
        return trace_peak_memory(remedy.step, remedy.change).peak_bytes(1) - remedy.saves_bytes
    except TraceError as error:
        log.debug("%s cannot be predicted: %s", remedy.setting, error)
        return None
