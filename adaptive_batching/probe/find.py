"""Find the largest batch size of a training step before training starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from adaptive_batching.config import AdaptiveBatchingConfig
from adaptive_batching.memory import MemoryMeter, allocator_advice, is_out_of_memory
from adaptive_batching.probe.result import ProbeResult
from adaptive_batching.probe.search import SEARCHES, settle_for_enough
from adaptive_batching.probe.sizes import Measurement, SizesRun, candidate_sizes
from adaptive_batching.probe.trace import PeakMemoryCurve, TraceError, trace_peak_memory
from adaptive_batching.probe.trial import TrainingStep, Trial
from adaptive_batching.ranks.agree import Ranks

log = logging.getLogger(__name__)

ALONE = Ranks(alone=True)


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


class _Measuring:
    """Run trial steps on all ranks and combine their measurements.

    All ranks use the numbers of the rank with the least memory left. Its budget applies to every rank, and a rank with
    a larger budget subtracts the difference from its peaks.

    Args:
        trial: Runs the steps on this rank.
        config: Provides ``memory_limit`` and ``headroom``.
        meter: Memory meter of this rank's device.
        ranks: All ranks of the run.
    """

    def __init__(self, trial: Trial, config: AdaptiveBatchingConfig, meter: MemoryMeter, ranks: Ranks) -> None:
        self._trial = trial
        self._config = config
        self._meter = meter
        self._ranks = ranks
        self._is_first = True
        self._share()

    def _share(self) -> None:
        self.budget_bytes = int(self._ranks.smallest(self._trial.budget_bytes))
        self.spare_bytes = self._trial.budget_bytes - self.budget_bytes

    def measure(self, batch_size: int) -> Measurement:
        """Run a step at ``batch_size`` after releasing the memory of the previous step."""
        measured = self._trial.measure(batch_size)
        if self._is_first:
            # The first step loads libraries and creates handles and communicators, which keep their memory.
            self._is_first = False
            self._trial.budget_bytes = min(self._trial.budget_bytes, memory_budget(self._config, self._meter))
            self._share()
            if measured.peak_bytes is not None and measured.peak_bytes > self._trial.budget_bytes:
                measured = replace(measured, fits=False)
        return self._agreed(measured)

    def measure_again(self, batch_size: int) -> Measurement:
        """Run another step at the same size as the previous one."""
        return self._agreed(self._trial.measure_again(batch_size))

    def _agreed(self, here: Measurement) -> Measurement:
        ranks = self._ranks
        ran = ranks.all(here.peak_bytes is not None)
        return Measurement(
            batch_size=here.batch_size,
            fits=ranks.all(here.fits),
            peak_bytes=int(ranks.largest((here.peak_bytes or 0) - self.spare_bytes)) if ran else None,
            seconds=ranks.largest(here.seconds),
            overhead=ranks.largest(here.overhead),
            retries=int(ranks.largest(here.retries)),
        )


def memory_budget(config: AdaptiveBatchingConfig, meter: MemoryMeter) -> int:
    """Return the peak memory in bytes that training may take: memory in use plus free memory, within the limits.

    ``memory_limit`` caps it; without one, ``headroom`` is subtracted.
    """
    headroom = config.headroom.of(meter.total_bytes) if config.memory_limit is None else 0
    return max(_memory_available(config, meter) - headroom, 0)


def _memory_available(config: AdaptiveBatchingConfig, meter: MemoryMeter) -> int:
    available = meter.used_bytes() + meter.free_bytes()
    return available if config.memory_limit is None else min(config.memory_limit.of(meter.total_bytes), available)


def find_maximum_batch_size(
    step: TrainingStep,
    config: AdaptiveBatchingConfig,
    meter: MemoryMeter,
    *,
    upper: int,
    upper_reason: str = "upper bound",
    include: int | None = None,
    coarse: bool = False,
    enough: Callable[[], int | None] | None = None,
    ranks: Ranks = ALONE,
    remedies: Callable[[], Sequence[Remedy]] = tuple,
    scratch: Path | None = None,
) -> ProbeResult:
    """Find the largest batch size whose full training step fits, and restore all state afterwards.

    The returned size has run twice in a row within the limit, without the device's allocator emptying its cache.

    Args:
        step: The training step, with worst-case samples.
        config: Provides ``search``, ``round_to_power_of_two``, ``memory_limit`` and ``headroom``.
        meter: Memory meter of the device.
        upper: Largest size to try, such as the most that the data can fill; at least 1.
        upper_reason: Value of :attr:`ProbeResult.reason` if ``upper`` is the answer.
        include: A size to consider although it is not a power of two.
        coarse: Accept an answer up to an eighth below the maximum. If the prediction shows that the next candidate does
            not fit, this saves the step that would prove it, and its out-of-memory error.
        enough: With ``search="predict"``, look no further than the size that this returns after steps at the two
            smallest ones; see :func:`~adaptive_batching.probe.search.settle_for_enough`.
        ranks: Ranks that run the step together, each on its own device. All get the same answer, which fits on every
            one of them.
        remedies: Called if a batch of one does not fit; returns the changes to suggest.
        scratch: Folder for saved weights and states if the one for temporary files has no room.

    Raises:
        ConfigError: If there is no room to save weights and optimizer states.
        DoesNotFitError: If a batch of one sample does not fit.
    """
    start = time.perf_counter()
    meter.release()
    budget = memory_budget(config, meter)
    candidates = candidate_sizes(
        upper,
        powers_of_two=config.round_to_power_of_two,
        include=include,
        coarse=coarse and config.search == "predict",  # the other searches walk through a list one by one
    )
    log.info(
        "probing for the largest batch size up to %d in %.0f MiB (%.0f MiB in use)",
        candidates[-1], budget / 2**20, meter.used_bytes() / 2**20,
    )  # fmt: skip
    advice = allocator_advice(meter.device)
    if advice is not None:
        log.info("more would fit with less memory fragmentation: set the environment variable %s", advice)
    curve: PeakMemoryCurve | None = None
    level = 0.0  # bytes in use on the device that the trace does not see
    sizes: SizesRun | None = None
    settled: int | None = None
    try:
        # If a failed allocation can end the process, a step slightly above the budget is measured rather than stopped.
        stopped_at = None if meter.fails_safely else _memory_available(config, meter)
        with Trial(step, meter, budget, scratch, ranks.all, stopped_at) as trial:
            if ranks.all(True):  # a rank that failed on entry takes part below, with False
                steps = _Measuring(trial, config, meter, ranks)
                # All ranks must search alike, although a limit on one process makes only that rank predictable.
                avoids = ranks.any(not meter.fails_safely)
                trusts = ranks.all(not avoids or (meter.is_predictable and _is_single_precision(step.model)))
                starved: Exception | None = None
                try:
                    curve = _trace(step, avoids_failures=avoids) if config.search == "predict" else None
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    starved = error
                if ranks.any(starved is not None):  # a real step takes more memory than its trace
                    curve = None
                    raise starved or MemoryError("on another rank")
                # All ranks use one curve: shards are uneven, so separate curves would lead to different sizes.
                curve = ranks.on_first(lambda: curve) if ranks.all(curve is not None) else None
                if curve is not None:
                    level = ranks.largest(meter.used_bytes() - curve.resting_bytes - steps.spare_bytes)
                sizes = SizesRun(
                    steps.measure, candidates, lambda: steps.budget_bytes, steps.measure_again,
                    avoids_failures=avoids,
                    trusts_prediction=trusts,
                )  # fmt: skip
                predict = (lambda b: curve.peak_bytes(b) + level) if curve else None
                if enough is not None and config.search == "predict":
                    settled = settle_for_enough(sizes, predict, partial(_agreed, enough, ranks))
                if settled is None:
                    SEARCHES[config.search](sizes, predict)
                    while sizes.found is not None and not sizes.confirm():
                        SEARCHES[config.search](sizes, predict)
    except Exception as error:
        if sizes is not None or not is_out_of_memory(error):
            raise
        ranks.all(False)
    if sizes is None or sizes.found is None:  # the optimizer states, or a single sample, do not fit
        limit, measured = (budget, []) if sizes is None else (sizes.budget_bytes, sizes.measurements)
        try:
            known = (curve, level) if curve is not None else (_trace(step), _unknown_to_trace(step, meter))
            message = _explain(step, meter, limit, measured, remedies, *known)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            message = f"a batch of one sample does not fit in {_size(limit)}, and too little is left to say what would"
        raise DoesNotFitError(message)

    batch_size = sizes.found
    predicted = _calibrated(curve, sizes, settled) if curve is not None else []
    result = ProbeResult(
        batch_size=batch_size,
        reason="what is of use" if settled else upper_reason if batch_size == candidates[-1] else "memory",
        budget_bytes=sizes.budget_bytes,
        total_bytes=meter.total_bytes,
        search=config.search if curve is not None or config.search != "predict" else "predict (measured, no trace)",
        seconds=time.perf_counter() - start,
        measurements=sizes.measurements,
        predicted=predicted,
        enough=settled,
    )
    if settled is not None:
        peak = max((at for size, at in predicted if size <= settled), default=0)
        log.info(
            "forwards of up to %d samples are enough, and predicted to fit by far (%.0f of %.0f MiB); %d training "
            "steps at up to %d samples, %.1f s",
            settled, peak / 2**20, result.budget_bytes / 2**20, result.num_steps, batch_size, result.seconds,
        )  # fmt: skip
        return result
    log.info(
        "maximum batch size %d (%s): peak %.0f of %.0f MiB; %d training steps, %d out of memory, %.1f s",
        batch_size, result.reason, result.peak_bytes / 2**20, result.budget_bytes / 2**20,
        result.num_steps, result.num_out_of_memory, result.seconds,
    )  # fmt: skip
    return result


def _agreed(enough: Callable[[], int | None], ranks: Ranks) -> int | None:
    """Return the largest answer of all ranks, or None if one of them does not know."""
    here = enough()
    known = ranks.all(here is not None)
    wanted = int(ranks.largest(here or 0))
    return wanted if known else None


def _trace(step: TrainingStep, *, avoids_failures: bool = False) -> PeakMemoryCurve | None:
    try:
        return trace_peak_memory(step)
    except TraceError as error:
        if avoids_failures and error.__cause__ is not None and is_out_of_memory(error.__cause__):
            raise error.__cause__ from None  # a real step takes more memory
        log.warning("the training step cannot be traced (%s); searching by measured steps alone", error)
        return None


def _is_single_precision(model: nn.Module) -> bool:
    return all(parameter.dtype == torch.float32 for parameter in model.parameters())


def _calibrated(curve: PeakMemoryCurve, sizes: SizesRun, settled: int | None) -> list[tuple[int, int]]:
    """Return points of the curve around the sizes that ran, calibrated by the largest one that fitted."""
    known = [m for m in sizes.measurements if m.fits and m.peak_bytes is not None]
    largest = max(known, key=lambda m: m.batch_size)
    assert largest.peak_bytes is not None
    measured_at, traced_at = largest.peak_bytes, curve.peak_bytes(largest.batch_size)
    next_size = sizes.candidates[min(sizes.low + 1, len(sizes.candidates) - 1)]
    last = max(next_size, sizes.candidates[-1] if settled else 0, *(m.batch_size for m in sizes.measurements))
    points = sorted(
        {last, next_size, *(m.batch_size for m in sizes.measurements), *range(1, last + 1, max(1, last // 16))}
    )
    return [(b, int(measured_at + largest.overhead * (curve.peak_bytes(b) - traced_at))) for b in points]


def _unknown_to_trace(step: TrainingStep, meter: MemoryMeter) -> float:
    """Return the bytes in use that a trace does not see: libraries on the CPU, nothing on an accelerator."""
    states = [v for o in step.optimizers for state in o.state.values() for v in state.values()]
    known = [*step.model.parameters(), *step.model.buffers(), *(v for v in states if isinstance(v, Tensor))]
    return meter.used_bytes() - sum(tensor.nbytes for tensor in known)


def _explain(
    step: TrainingStep,
    meter: MemoryMeter,
    budget: int,
    measurements: Sequence[Measurement],
    remedies: Callable[[], Sequence[Remedy]],
    curve: PeakMemoryCurve | None,
    level: float,
) -> str:
    """Return why a batch of one does not fit and what would help, with predictions corrected by measurements.

    Args:
        curve: The predicted peaks; None if no trace was possible.
        level: Bytes in use on the device in addition to the predicted ones.
    """
    message = f"a batch of one sample does not fit in {_size(budget)}"
    measured = next((m for m in measurements if m.batch_size == 1), None)
    predicted = 0.0 if curve is None else curve.peak_bytes(1) + level
    if measured is not None and measured.peak_bytes is not None:
        message += f": it took {_size(measured.peak_bytes)}, {_size(max(measured.peak_bytes - budget, 0))} more"
        level += 0 if curve is None else measured.peak_bytes - predicted
    elif curve is not None and predicted > budget:
        message += f": it needs about {_size(predicted)}, {_size(predicted - budget)} more"
    elif curve is not None:
        # The step needs more than the budget, so the prediction is too low by at least the difference.
        message += f": it ran out of memory, though only about {_size(predicted)} was predicted"
        level += budget - predicted
    lines = []
    for remedy in remedies():
        predicted_with = _predict_remedy(remedy)
        if predicted_with is None or curve is None:
            lines.append(f"  {remedy.setting} (not predicted)")
            continue
        needed = predicted_with + level
        verdict = "would fit" if needed < budget else f"still {_size(needed - budget)} too much"
        lines.append(f"  {remedy.setting}: about {_size(needed)}, {verdict}")
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


def _size(num_bytes: float) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes >= 10 * 2**20 else f"{num_bytes / 2**20:.1f} MiB"
