"""Find the largest batch size of a training step before training starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory import MemoryMeter, Segments, allocator_advice, is_out_of_memory
from adaptive_batching._probe.budget import memory_available, memory_budget, require_room
from adaptive_batching._probe.corrected_curve import CorrectedCurve, Count
from adaptive_batching._probe.does_not_fit import DoesNotFitError, Remedy, explain, unknown_to_trace
from adaptive_batching._probe.result import ProbeResult
from adaptive_batching._probe.search import SEARCHES, settle_for_enough
from adaptive_batching._probe.sizes import Measurement, SizesRun, candidate_sizes
from adaptive_batching._probe.trial import TrainingStep, Trial
from adaptive_batching._ranks.agree import ALONE, ONLY_HERE, Ranks
from adaptive_batching._trace.allocator import CachingAllocator, ExpandableAllocator
from adaptive_batching._trace.reserved import ReservedPeaks
from adaptive_batching._trace.trace import trace_step
from adaptive_batching._trace.traced_step import PeakMemoryCurve, TracedStep, TraceError
from adaptive_batching._values import ConfigError, memory_size

log = logging.getLogger(__name__)

_ALLOCATORS = {Segments.FIXED: CachingAllocator, Segments.EXPANDABLE: ExpandableAllocator}


class _Measuring:
    """Run the steps of a :class:`Trial` on all ranks and combine their measurements.

    All ranks use the numbers of the rank with the least memory left. Its budget applies to every rank, and a rank with
    a larger budget subtracts the difference from its peaks. ``expected`` is the likely number of steps, for messages.
    """

    def __init__(
        self,
        trial: Trial,
        config: AdaptiveBatchingConfig,
        meter: MemoryMeter,
        ranks: Ranks,
        expected: int | None,
    ) -> None:
        self._trial = trial
        self._config = config
        self._meter = meter
        self._ranks = ranks
        self._is_first = True
        self._expected = expected
        self._num_steps = 0
        self._start = time.perf_counter()
        self._share()

    def _share(self) -> None:
        self.budget_bytes = int(self._ranks.smallest(self._trial.budget_bytes))
        self.spare_bytes = self._trial.budget_bytes - self.budget_bytes

    def measure(self, batch_size: int) -> Measurement:
        self._announce(batch_size)
        measured = self._trial.measure(batch_size)
        if self._is_first:
            # The first step loads libraries and creates handles and communicators, which keep their memory.
            self._is_first = False
            self._trial.budget_bytes = min(self._trial.budget_bytes, memory_budget(self._config, self._meter))
            self._share()
            if measured.peak_bytes is not None and measured.peak_bytes > self._trial.budget_bytes:
                measured = replace(measured, fits=False)
        return self._agreed(measured)

    def begin(self, batch_size: int) -> Measurement:
        self._announce(batch_size)
        return self._agreed(self._trial.begin(batch_size))

    def measure_again(self, batch_size: int) -> Measurement:
        self._announce(batch_size)
        return self._agreed(self._trial.measure_again(batch_size))

    def _announce(self, batch_size: int) -> None:
        self._num_steps += 1
        of = f" of about {self._expected}" if self._expected and self._num_steps <= self._expected else ""
        log.info(
            "trial step %d%s: batch size %d, %.0f s since the first began",
            self._num_steps, of, batch_size, time.perf_counter() - self._start,
        )  # fmt: skip

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
            freed_bytes=int(ranks.largest(here.freed_bytes)),
            makes_states=here.makes_states,
        )


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

    The returned size has run within the limit as training repeats it: twice in a row without the device's allocator
    emptying its cache, its first step left aside. Where freed memory goes back at once, one that left room will do.

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
            smallest ones; see :func:`~adaptive_batching._probe.search.settle_for_enough`.
        ranks: Ranks that run the step together, each on its own device. All get the same answer, which fits on every
            one of them.
        remedies: Called if a batch of one does not fit; returns the changes to suggest.
        scratch: Folder for saved weights and states if the one for temporary files has no room.

    Raises:
        ConfigError: If ``upper`` is below 1, if the limits leave nothing beyond what is in use, or if there is no room
            to save weights and optimizer states.
        DoesNotFitError: If a batch of one sample does not fit.
    """
    if upper < 1:
        raise ConfigError(f"upper={upper} must be at least 1, as the largest batch size to try")
    start = time.perf_counter()
    meter.release()
    require_room(config, meter, ranks)
    budget = memory_budget(config, meter)
    candidates = candidate_sizes(
        upper,
        powers_of_two=config.round_to_power_of_two,
        include=include,
        coarse=coarse and config.search == "predict",  # the other searches walk through a list one by one
    )
    log.info(
        "looking for the largest batch size, up to %d, in %s of memory, of which %s are in use",
        candidates[-1], memory_size(budget), memory_size(meter.used_bytes()),
    )  # fmt: skip
    advice = allocator_advice(meter.device)
    if advice is not None:
        log.info("more would fit if memory were less fragmented: set the environment variable %s", advice)
    traced: TracedStep | None = None
    curve: PeakMemoryCurve | None = None
    count: Count | None = None  # of the curve, what the limit counts
    level = 0.0  # bytes in use on the device that the trace does not see
    sizes: SizesRun | None = None
    settled: int | None = None
    try:
        # If a failed allocation can end the process, a step slightly above the budget is measured rather than stopped.
        stopped_at = None if meter.fails_safely else memory_available(config, meter)
        with Trial(step, meter, budget, scratch, ranks.all, stopped_at) as trial:
            if ranks.all(True):  # a rank that failed on entry takes part below, with False
                expected = None if config.search != "predict" else 3 if enough is None else 2
                steps = _Measuring(trial, config, meter, ranks, expected)
                # All ranks must search alike, although a limit on one process makes only that rank predictable.
                avoids = ranks.any(not meter.fails_safely)
                trusts = ranks.all(not avoids or (meter.is_predictable and _is_single_precision(step.model)))
                starved: Exception | None = None
                try:
                    traced = _trace(step, avoids_failures=avoids) if config.search == "predict" else None
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    starved = error
                if ranks.any(starved is not None):  # a real step takes more memory than its trace
                    raise starved or MemoryError("on another rank")
                # All ranks use one curve: shards are uneven, so separate curves would lead to different sizes.
                traced = ranks.on_first(lambda: traced) if ranks.all(traced is not None) else None
                segments = ranks.on_first(meter.segments)
                if traced is not None:
                    curve = traced.curve
                    level = ranks.largest(meter.used_bytes() - curve.resting_bytes - steps.spare_bytes)
                    if segments is not None and traced.is_uniform:
                        peaks = ReservedPeaks(traced.at, _ALLOCATORS[segments], makes_states=trial.makes_states)
                        count = partial(_reserved, peaks, level)
                # What follows on a first step that makes the optimizer states is known by a replay alone. Without one,
                # too many sizes that cannot go on would look as if they could.
                begin = steps.measure if count is None else steps.begin
                sizes = SizesRun(
                    steps.measure, candidates, lambda: steps.budget_bytes, steps.measure_again,
                    avoids_failures=avoids,
                    trusts_prediction=trusts,
                    begin=begin if meter.keeps_freed_memory else None,
                )  # fmt: skip
                predict = partial(_peak, curve, level) if curve is not None else None
                if enough is not None and config.search == "predict":
                    settled = settle_for_enough(sizes, predict, partial(_agreed, enough, ranks), count)
                if settled is None:
                    SEARCHES[config.search](sizes, predict, count)
                    while sizes.found is not None and not sizes.confirm():
                        SEARCHES[config.search](sizes, predict, count)
    except Exception as error:
        if sizes is not None or not is_out_of_memory(error):
            raise
        ranks.all(False)
    if sizes is None or sizes.found is None:  # the optimizer states, or a single sample, do not fit
        limit, measured = (budget, []) if sizes is None else (sizes.budget_bytes, sizes.measurements)
        try:
            if curve is None:
                traced, level = _trace(step), unknown_to_trace(step, meter)
                curve = None if traced is None else traced.curve
            message = explain(step, meter, limit, measured, remedies, curve, level)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            message = (
                f"a batch of one sample does not fit in {memory_size(limit)}, and too little is left to say what would"
            )
        raise DoesNotFitError(message)

    batch_size = sizes.found
    predicted = _calibrated(curve, count, sizes, settled) if curve is not None else []
    moment, kinds = "", dict[str, int]()
    if traced is not None and traced.is_uniform:
        moment, kinds = traced.at(settled or batch_size).at_peak()
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
        peak_moment=moment,
        peak_kinds=kinds,
    )
    if settled is not None:
        peak = max((at for size, at in predicted if size <= settled), default=0)
        log.info(
            "forwards of up to %d samples are large enough, and predicted to fit by far (%s of %s); found in %.1f s "
            "with %d training steps, at up to %d samples",
            settled, memory_size(peak), memory_size(result.budget_bytes), result.seconds, result.num_steps, batch_size,
        )  # fmt: skip
        return result
    log.info(
        "maximum batch size %d, bound by %s: it takes %s of %s; found in %.1f s with %d training steps, %d out of "
        "memory",
        batch_size, result.reason, memory_size(result.peak_bytes), memory_size(result.budget_bytes),
        result.seconds, result.num_steps, result.num_out_of_memory,
    )  # fmt: skip
    return result


def _peak(curve: PeakMemoryCurve, level: float, batch_size: int) -> float:
    return curve.peak_bytes(batch_size) + level


def _reserved(peaks: ReservedPeaks, level: float, batch_size: int) -> tuple[float, float, float]:
    once, repeated, least = peaks(batch_size)
    return once + level, repeated + level, least + level


def _agreed(enough: Callable[[], int | None], ranks: Ranks) -> int | None:
    """Return the largest answer of all ranks, or None if one of them does not know."""
    here = enough()
    known = ranks.all(here is not None)
    wanted = int(ranks.largest(here or 0))
    return wanted if known else None


def _trace(step: TrainingStep, *, avoids_failures: bool = False) -> TracedStep | None:
    if not step.can_be_traced:
        return None
    start = time.perf_counter()
    log.info("tracing the training step to predict its memory, twice, without taking any")
    try:
        traced = trace_step(step)
        log.info("traced in %.1f s", time.perf_counter() - start)
        return traced
    except TraceError as error:
        if avoids_failures and error.__cause__ is not None and is_out_of_memory(error.__cause__):
            raise error.__cause__ from None  # a real step takes more memory
        text = "the training step cannot be traced (%s); searching by measured steps alone"
        log.warning(text, error, extra=ONLY_HERE)
        return None


def _is_single_precision(model: nn.Module) -> bool:
    return all(parameter.dtype == torch.float32 for parameter in model.parameters())


def _calibrated(
    curve: PeakMemoryCurve, count: Count | None, sizes: SizesRun, settled: int | None
) -> list[tuple[int, int]]:
    """Return points around the sizes that ran, of the curve by which the search decided."""
    next_size = sizes.candidates[min(sizes.low + 1, len(sizes.candidates) - 1)]
    last = max(next_size, sizes.candidates[-1] if settled else 0, *(m.batch_size for m in sizes.measurements))
    points = {last, next_size, *(m.batch_size for m in sizes.measurements), *range(1, last + 1, max(1, last // 16))}
    known = CorrectedCurve(sizes, curve.peak_bytes, count)
    return [(b, int(known.peak_bytes(b))) for b in sorted(points)]
