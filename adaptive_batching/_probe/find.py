"""Find the largest batch size of a training step before training starts.

:func:`find_largest` begins and ends a probe; what is in between, and in which order, is :meth:`_Search.run`.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batching._caching_allocator import Segments, allocator_advice
from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory import MemoryMeter, memory_meter
from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import (
    DoesNotFitError,
    explain,
    memory_available,
    memory_budget,
    require_room,
    unexplained,
)
from adaptive_batching._probe.search import SEARCHES, CorrectedCurve, Count, StepTimes, settle_for_enough
from adaptive_batching._probe.sizes import Measure, Measurement, ProbeResult, SizesRun, candidate_sizes
from adaptive_batching._probe.sizing import ProbeRequest
from adaptive_batching._probe.trial import Trial
from adaptive_batching._ranks.agree import ALONE, ONLY_HERE, Ranks
from adaptive_batching._trace.allocator import CachingAllocator, ExpandableAllocator
from adaptive_batching._trace.reserved import ReservedPeaks
from adaptive_batching._trace.trace import num_left_behind, trace_step
from adaptive_batching._trace.traced_step import TracedStep, TraceError
from adaptive_batching._trace.training import Run, TrainingStep
from adaptive_batching._unused_memory import keep_freed_memory_on_the_host, little_to_collect
from adaptive_batching._values import ConfigError, memory_size

log = logging.getLogger(__name__)

LARGEST_TRIED = 4096
"""Batch size that a search ends at if nothing else bounds it."""

_ALLOCATORS = {Segments.FIXED: CachingAllocator, Segments.EXPANDABLE: ExpandableAllocator}


class _Search:
    """A search by steps that all ranks run alike, and what is known so far.

    All ranks use the numbers of the rank with the least memory left. Its budget applies to every rank, and a rank with
    a larger budget subtracts the difference from its peaks.
    """

    def __init__(
        self, step: TrainingStep, config: AdaptiveBatchingConfig, meter: MemoryMeter, ranks: Ranks,
        request: ProbeRequest, times: StepTimes | None, scratch: Path | None,
    ) -> None:  # fmt: skip
        self._step, self._config, self._meter, self._ranks = step, config, meter, ranks
        self._request, self._scratch = request, scratch
        self._times = times if request.may_stop_early else None
        self._num_steps = self._expected_steps = 0
        self.own_budget = self._budget_bytes = memory_budget(config, meter)
        self.traced: TracedStep | None = None
        self._cannot_be_traced = False  # as was found here, and told
        self._level = 0.0  # bytes in use on the device that the trace does not see
        self._count: Count | None = None  # of the predicted bytes, what the limit counts
        self.sizes: SizesRun | None = None
        self.settled: int | None = None  # what is enough, and predicted to fit by far

    def run(self, candidates: Sequence[int]) -> None:
        """Trace the step, run sizes among ``candidates`` as the search asks for them, and confirm its answer.

        All state is as before when this ends. :attr:`sizes` stays None if memory runs out before the first step.
        """
        config, meter, ranks, times = self._config, self._meter, self._ranks, self._times
        search, by_curve = SEARCHES[config.search], config.search == "predict"
        # If a failed allocation can end the process, a step slightly above the budget is measured rather than stopped.
        stopped_at = None if meter.fails_safely else memory_available(config, meter)
        self._trial = trial = Trial(self._step, meter, self.own_budget, self._scratch, ranks.all, stopped_at)
        try:
            with trial:  # to save all state takes memory, too
                if not ranks.all(True):  # a rank that had too little answers below, with False
                    return
                self._started = time.perf_counter()
                self._agree_on_budget()
                # All ranks must search alike, although a limit on one process makes only that rank predictable.
                avoids = ranks.any(not meter.fails_safely)
                is_single_precision = all(weight.dtype == torch.float32 for weight in self._step.model.parameters())
                trusts = ranks.all(not avoids or (meter.is_predictable and is_single_precision))
                # On a host, kernels in half precision convert their inputs, in memory that no trace sees.
                suffices = self._request.suffices if ranks.all(not avoids or is_single_precision) else None
                if by_curve:
                    self._predict(avoids_failures=avoids)
                    self._expected_steps = 3 if times is None else 2 if suffices is None else 1

                # What follows on a first step that makes the optimizer states is known by a replay alone. Without one,
                # too many sizes that cannot go on would look as if they could.
                begin = trial.measure if self._count is None else trial.begin
                self.sizes = sizes = SizesRun(
                    partial(self._on_all_ranks, trial.measure),
                    candidates,
                    self._budget_bytes,
                    partial(self._on_all_ranks, trial.measure_again),
                    partial(self._on_all_ranks, begin) if meter.keeps_freed_memory else None,
                    avoids_failures=avoids,
                    trusts_prediction=trusts,
                )
                traced = self.traced
                curve = CorrectedCurve(
                    sizes, None if traced is None else lambda size: traced.curve.peak_bytes(size) + self._level,
                    self._count,
                )  # fmt: skip
                if times is not None and by_curve:
                    enough, is_worth = partial(_largest, times.enough, ranks), times.is_worth
                    self.settled = settle_for_enough(
                        curve, enough, lambda small, large: ranks.any(is_worth(small, large)), suffices
                    )
                if self.settled is None:
                    search(curve)
                    while sizes.largest is not None and not sizes.confirm():
                        search(curve)  # among smaller sizes, as its answer could not be repeated
        except Exception as error:
            if self.sizes is not None or not is_out_of_memory(error):
                raise
            ranks.all(False)
        if self.settled is not None and meter.device.type == "cpu":  # as a rule, what runs leaves a fifth of the budget
            keep_freed_memory_on_the_host()

    def _agree_on_budget(self) -> None:
        trial = self._trial
        self._budget_bytes = int(self._ranks.smallest(trial.budget_bytes))
        self._spare_bytes = trial.budget_bytes - self._budget_bytes

    def _predict(self, *, avoids_failures: bool) -> None:
        """Trace the step on each rank, and take the trace of the first: separate ones would lead to different sizes."""
        ranks = self._ranks
        traced: TracedStep | None = None
        starved: Exception | None = None
        try:
            traced = _trace(self._step, avoids_failures=avoids_failures)
            self._cannot_be_traced = traced is None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            starved = error
        if ranks.any(starved is not None):  # a real step takes more memory than its trace
            raise starved or MemoryError("on another rank")
        traced = ranks.on_first(lambda: traced) if ranks.all(traced is not None) else None
        segments = ranks.on_first(self._meter.segments)
        if traced is None:
            return
        self.traced = traced
        level = ranks.largest(self._meter.used_bytes() - traced.curve.resting_bytes - self._spare_bytes)
        self._level = level
        if segments is not None and traced.is_uniform:
            peaks = ReservedPeaks(traced.record_at, _ALLOCATORS[segments], makes_states=self._trial.makes_states)

            def count(batch_size: int) -> tuple[float, float, float]:
                once, repeated, least = peaks(batch_size)
                return once + level, repeated + level, least + level

            self._count = count

    def _on_all_ranks(self, run: Measure, batch_size: int) -> Measurement:
        """Run a step, and combine the measurements of all ranks."""
        self._num_steps += 1
        of = f" of about {self._expected_steps}" if self._num_steps <= self._expected_steps else ""
        log.info(
            "trial %d%s: batch size %d (%.0f s)",
            self._num_steps, of, batch_size, time.perf_counter() - self._started
        )  # fmt: skip
        here, ranks, trial = run(batch_size), self._ranks, self._trial
        if self._num_steps == 1:
            # The first step loads libraries and creates handles and communicators, which keep their memory.
            trial.budget_bytes = min(trial.budget_bytes, memory_budget(self._config, self._meter))
            self._agree_on_budget()
            assert self.sizes is not None
            self.sizes.budget_bytes = self._budget_bytes
            if here.peak_bytes is not None and here.peak_bytes > trial.budget_bytes:
                here = replace(here, fits=False)
        ran = ranks.all(here.peak_bytes is not None)
        return Measurement(
            here.batch_size, ranks.all(here.fits),
            int(ranks.largest((here.peak_bytes or 0) - self._spare_bytes)) if ran else None,
            ranks.largest(here.seconds), ranks.largest(here.overhead), int(ranks.largest(here.retries)),
            freed_bytes=int(ranks.largest(here.freed_bytes)), makes_states=here.makes_states,
        )  # fmt: skip

    def why_nothing_fits(self, remedy: str) -> str:
        """Explain that the optimizer states, or a single sample, do not fit."""
        step, meter, sizes = self._step, self._meter, self.sizes
        limit, measured = (self.own_budget, []) if sizes is None else (sizes.budget_bytes, sizes.measurements)
        predicted = None
        try:
            if self.traced is None and not self._cannot_be_traced:
                self.traced = _trace(step)
                # What a trace does not see: libraries on the CPU, nothing on an accelerator.
                states = [v for o in step.optimizers for state in o.state.values() for v in state.values()]
                seen = [*step.model.parameters(), *step.model.buffers(), *states]
                self._level = meter.used_bytes() - sum(v.nbytes for v in seen if isinstance(v, torch.Tensor))
            if self.traced is not None:
                predicted = self.traced.curve.peak_bytes(1) + self._level
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):  # else too little is left to trace in
                raise
        if predicted is not None:
            answer = unexplained(limit, measured, predicted, self._trial.failure)
            if answer is not None:
                return answer
        return explain(meter.device, limit, measured, predicted, remedy)

    def predicted(self, sizes: SizesRun) -> list[tuple[int, int]]:
        """Return points around the sizes that ran, of the curve by which the search decided."""
        if self.traced is None:
            return []
        ran = [m.batch_size for m in sizes.measurements]
        next_size = sizes.candidates[min(sizes.low + 1, len(sizes.candidates) - 1)]
        last = max(next_size, sizes.candidates[-1] if self.settled else 0, *ran)
        curve = CorrectedCurve(sizes, self.traced.curve.peak_bytes, self._count)
        number = 16 if self._count is None else 3  # each is several replays of the allocator
        points = {last, next_size, self.settled or last, *ran, *range(1, last + 1, max(1, last // number))}
        return [(b, int(curve.peak_bytes(b))) for b in sorted(points)]

    def unrounded_maximum(self, sizes: SizesRun) -> int | None:
        """Return the largest size that is predicted to fit, where larger than the answer, which memory bounds."""
        if self.traced is None or not self._request.rounds or sizes.low + 1 == len(sizes.candidates):
            return None
        curve = CorrectedCurve(sizes, self.traced.curve.peak_bytes, self._count)
        rounded, beyond = sizes.candidates[sizes.low], sizes.candidates[sizes.low + 1]
        above = range(rounded + 1, beyond)
        count = bisect_right(above, sizes.budget_bytes, key=lambda size: int(curve.peak_bytes(size)))
        return rounded + count if count else None


def find_maximum_batch_size(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss: Callable[[nn.Module, Any], torch.Tensor | None],
    make_batch: Callable[[int], Any],
    *,
    upper: int = LARGEST_TRIED,
    settings: AdaptiveBatchingConfig = AdaptiveBatchingConfig(),  # noqa: B008 (immutable)
) -> ProbeResult:
    """Find the largest batch size whose full training step fits, and restore all state afterwards.

    Args:
        model: The model that is trained, on its device.
        optimizer: One optimizer, or several that step one after another.
        loss: ``(model, batch)`` -> the loss, to run backward on. A function that runs backward itself, as in parts or
            with its gradients clipped, returns None. It must use the model that it is given: a trace runs it on a copy.
        make_batch: Batch size -> a batch of that many worst-case samples, such as the longest, on the device.
        upper: Largest size to try, such as the number of samples in the data; at least 1.
        settings: Provides ``search``, ``round_to_power_of_two``, ``memory_limit`` and ``headroom``.

    Returns:
        The size as ``batch_size``, which has run within the limit as training repeats it: twice in a row without the
        device's allocator emptying its cache, its first step left aside. Where freed memory goes back at once, one that
        left room will do.

    Raises:
        ConfigError: If ``upper`` is below 1, if the limits leave nothing beyond what is in use, or if there is no room
            to save weights and optimizer states.
        DoesNotFitError: If a batch of one sample does not fit.
        NotImplementedError: If the peak of a step cannot be measured on the model's device.
    """

    def bind(model: nn.Module, optimizers: Sequence[Optimizer], loss: Any) -> Run:
        def run(batch: Any) -> None:
            if (value := loss(model, batch)) is not None:
                value.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            model.zero_grad()  # also of what no optimizer has

        return run

    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    step = TrainingStep(
        model, optimizers, make_batch, bind, owners=[loss, make_batch], code=[loss], on_cuda=device.type == "cuda"
    )
    return find_largest(
        step, settings, memory_meter(device), ProbeRequest(upper, rounds=settings.round_to_power_of_two)
    )


@little_to_collect()
def find_largest(
    step: TrainingStep,
    config: AdaptiveBatchingConfig,
    meter: MemoryMeter,
    request: ProbeRequest,
    *,
    ranks: Ranks = ALONE,
    times: StepTimes | None = None,
    remedy: str = "",
    scratch: Path | None = None,
) -> ProbeResult:
    """Find the largest batch size of any step, as :func:`find_maximum_batch_size` does.

    Args:
        step: The step to run.
        config: Provides ``search``, ``memory_limit`` and ``headroom``.
        meter: Of the device.
        request: The sizes to consider.
        ranks: That run the step together, each on its own device; the answer fits on every one.
        times: Noted by the step; needed for a search that may stop early.
        remedy: What to do if a batch of one does not fit, such as "set ...".
        scratch: For saved weights and states if the folder for temporary files has no room.
    """
    upper = request.upper
    if upper < 1:
        raise ConfigError(f"upper={upper} must be at least 1, as the largest batch size to try")
    start = time.perf_counter()
    meter.release()
    require_room(config, meter, ranks)
    search = _Search(step, config, meter, ranks, request, times, scratch)
    candidates = candidate_sizes(
        upper,
        powers_of_two=request.rounds,
        include=request.include,
        coarse=request.coarse and config.search == "predict",  # the other searches walk through a list one by one
    )
    log.info(
        "looking for the largest batch size, up to %d, in %s of memory, of which %s are in use",
        candidates[-1], memory_size(search.own_budget), memory_size(meter.used_bytes())
    )  # fmt: skip
    if (advice := allocator_advice(meter.device)) is not None:
        log.info("more would fit if memory were less fragmented: set the environment variable %s", advice)
    search.run(candidates)
    sizes, traced, settled = search.sizes, search.traced, search.settled
    if sizes is None or sizes.largest is None:
        raise DoesNotFitError(search.why_nothing_fits(remedy))
    batch_size, reason = sizes.largest, "memory" if sizes.largest != candidates[-1] else request.upper_reason
    predicted, moment, kinds = search.predicted(sizes), "", dict[str, int]()
    if traced is not None and traced.is_uniform:
        moment, kinds = traced.record_at(settled or batch_size).at_peak()
    is_blind = traced is None and config.search == "predict"
    result = ProbeResult(
        batch_size, "larger forwards would gain little" if settled else reason, sizes.budget_bytes, meter.total_bytes,
        search="predict (measured, no trace)" if is_blind else config.search, seconds=time.perf_counter() - start,
        measurements=sizes.measurements, predicted=predicted, enough=settled, peak_moment=moment, peak_kinds=kinds,
        exact=None if settled else search.unrounded_maximum(sizes),
    )  # fmt: skip
    _log_result(result)
    return result


def _log_result(result: ProbeResult) -> None:
    batch_size, budget = result.batch_size, memory_size(result.budget_bytes)
    if result.enough is not None:
        peak = max((at for size, at in result.predicted if size <= result.enough), default=result.peak_bytes)
        log.info(
            "forwards of up to %d samples are large enough, and clearly fit (%s of %s predicted); found in %.1f s "
            "with %d training steps of up to %d samples",
            result.enough, memory_size(peak), budget, result.seconds, result.num_steps, batch_size
        )  # fmt: skip
        return
    log.info(
        "maximum batch size %d, bound by %s: it takes %s of %s; found in %.1f s with %d training steps, %d out of "
        "memory",
        batch_size, result.bound, memory_size(result.peak_bytes), budget,
        result.seconds, result.num_steps, result.num_out_of_memory
    )  # fmt: skip


def _largest(enough: Callable[[], int | None], ranks: Ranks) -> int | None:
    """Return the largest answer of all ranks, or None if one of them does not know."""
    here = enough()
    has_answer, wanted = ranks.all(here is not None), int(ranks.largest(here or 0))
    return wanted if has_answer else None


def _trace(step: TrainingStep, *, avoids_failures: bool = False) -> TracedStep | None:
    if not step.can_be_traced:
        return None
    start = time.perf_counter()
    log.info("tracing the training step twice to predict its memory")
    traced, left_before = None, num_left_behind()
    try:
        traced = trace_step(step)
        log.info("traced in %.1f s", time.perf_counter() - start)
    except TraceError as error:
        if avoids_failures and error.__cause__ is not None and is_out_of_memory(error.__cause__):
            raise error.__cause__ from None  # a real step takes more memory
        text = "memory is measured by real steps instead of predicted, because the training step cannot be traced (%s)"
        log.info(text, str(error), extra=ONLY_HERE)  # a record that somebody keeps would keep all of its frames
    if (number := num_left_behind() - left_before) > 0:  # now that no traceback keeps them
        raise ConfigError(
            f"the loss or a hook keeps what it has computed where the probe cannot put it back (tensors: {number}), "
            "such as in an attribute of a class or of a Python module, and what a prediction computes has no values; "
            "keep it in an attribute of an object, or set search='binary_search', which runs real steps alone"
        )
    return traced
