"""Find the largest batch size of a training step before training starts.

:func:`find_largest` begins and ends a probe; what is in between, and in which order, is :meth:`_Search.run`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory.caching_allocator import allocator_advice
from adaptive_batching._memory.meter import MemoryMeter, memory_meter
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._memory.unused_memory import keep_freed_memory_on_the_host, little_to_collect
from adaptive_batching._probe.does_not_fit import (
    DoesNotFitError,
    explain,
    memory_available,
    memory_budget,
    require_room,
)
from adaptive_batching._probe.probed_step import TrainingStep
from adaptive_batching._probe.search import SEARCHES, SizeSearch, StepTimes, find_enough
from adaptive_batching._probe.sizes import Measurement, ProbeResult, candidate_sizes
from adaptive_batching._probe.sizing import ProbeRequest
from adaptive_batching._probe.trial import Trial
from adaptive_batching._ranks.agree import ALONE, Ranks
from adaptive_batching._state import State
from adaptive_batching._values import ConfigError, memory_size, plural

log = logging.getLogger(__name__)

LARGEST_TRIED = 4096
"""Batch size that a search ends at if nothing else bounds it."""

# Steps as training begins with them, until which it is known if training goes on: the first meets memory as no other
# does, the second what that has left, and the third what all later ones meet.
_STEPS_OF_TRAINING = 3
# Share by which the rises of equal steps were seen to differ: on a device, or where the host is told to keep no freed
# memory; and where glibc keeps it.
_NOISE, _NOISE_OF_GLIBC = 0.01, 0.2
# Share of the budget by which consecutive steps at one size were seen to differ where freed memory goes back at once.
_REPEAT_ERROR = 0.001


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
        self._num_steps = 0
        self.own_budget = self._budget_bytes = memory_budget(config, meter)
        self.sizes: SizeSearch | None = None
        self.enough: int | None = None  # what is enough, and fits by far

    def run(self, candidates: Sequence[int]) -> None:
        """Run sizes among ``candidates`` as the search asks for them, and confirm its answer.

        All state is as before when this ends. :attr:`sizes` stays None if memory runs out before the first step.
        """
        config, meter, ranks = self._config, self._meter, self._ranks
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
                keeps_freed = ranks.any(meter.keeps_freed_memory)
                is_steady = ranks.all(meter.keeps_freed_memory or meter.is_predictable)
                # Where freed memory goes back at once, all steps meet the same: one more tells chance from size.
                as_measured = partial(self._on_all_ranks, trial.measure)
                noise = _NOISE if is_steady else _NOISE_OF_GLIBC
                self.sizes = sizes = SizeSearch(
                    as_measured,
                    candidates,
                    self._budget_bytes,
                    ranks.largest(meter.used_bytes() - self._spare_bytes),
                    as_measured if is_steady and not keeps_freed else self._as_training,
                    noise,
                    tells_up_to=0.0 if keeps_freed else 1 - (_REPEAT_ERROR if is_steady else noise),
                )
                search = SEARCHES[config.search]
                if self._times is not None and config.search == "predict":
                    self.enough = self._find_enough(sizes, self._times)
                if self.enough is None:
                    search(sizes)
                    while sizes.largest is not None and not sizes.confirm():
                        search(sizes)  # among smaller sizes, as its answer could not be repeated
        except Exception as error:
            if self.sizes is not None or not is_out_of_memory(error):
                raise
            ranks.all(False)
        if self.enough is not None and meter.device.type == "cpu":  # as a rule, what runs leaves a fifth of the budget
            keep_freed_memory_on_the_host()

    def _find_enough(self, sizes: SizeSearch, times: StepTimes) -> int | None:
        ranks = self._ranks
        return find_enough(
            sizes, self._request.suffices, partial(_largest, times.enough, ranks),
            lambda small, large: ranks.any(times.is_worth(small, large)),
        )  # fmt: skip

    def _agree_on_budget(self) -> None:
        trial = self._trial
        self._budget_bytes = int(self._ranks.smallest(trial.budget_bytes))
        self._spare_bytes = trial.budget_bytes - self._budget_bytes

    def _as_training(self, batch_size: int) -> Measurement:
        """Run the first steps of training at a size, up to one that shows that it does not fit."""
        measured = self._on_all_ranks(self._trial.begin, batch_size)
        while measured.fits and measured.steps < _STEPS_OF_TRAINING:
            measured = measured.followed_by(self._on_all_ranks(self._trial.go_on, batch_size))
        return measured

    def _on_all_ranks(self, run: Callable[[int], Measurement], batch_size: int) -> Measurement:
        """Run a step, and combine the measurements of all ranks."""
        self._num_steps += 1
        log.info("trial %d: batch size %d (%.0f s)", self._num_steps, batch_size, time.perf_counter() - self._started)
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
            ranks.largest(here.seconds), int(ranks.largest(here.retries)),
            in_use_bytes=int(ranks.largest((here.in_use_bytes or 0) - self._spare_bytes)) if ran else None,
            makes_states=here.makes_states,
        )  # fmt: skip

    def why_nothing_fits(self, remedy: str) -> str:
        """Explain that the optimizer states, or a single sample, do not fit."""
        limit, measured = (
            (self.own_budget, []) if self.sizes is None else (self.sizes.budget_bytes, self.sizes.measurements)
        )
        return explain(self._meter.device, int(limit), measured, self._trial.failure, remedy)


def find_maximum_batch_size(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss: Callable[[nn.Module, Any], torch.Tensor | None],
    make_batch: Callable[[int], Any],
    *,
    upper: int = LARGEST_TRIED,
    settings: AdaptiveBatchingConfig = AdaptiveBatchingConfig(),  # noqa: B008 (immutable)
    state: Sequence[Any] = (),
) -> ProbeResult:
    """Find the largest batch size whose full training step fits, and restore all state afterwards.

    Args:
        model: The model that is trained, on its device.
        optimizer: One optimizer, or several that step one after another.
        loss: ``(model, batch)`` -> the loss, to run backward on. A function that runs backward itself, as in parts or
            with its gradients clipped, returns None.
        make_batch: Batch size -> a batch of that many worst-case samples, such as the longest, on the device.
        upper: Largest size to try, such as the number of samples in the data; at least 1.
        settings: Provides ``search``, ``round_to_power_of_two``, ``memory_limit`` and ``headroom``.
        state: Whatever else ``loss`` changes that has to be as before: objects with ``state_dict`` and
            ``load_state_dict``. Weights, buffers, gradients, optimizer states and random numbers are, in any case.

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

    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)

    def run(batch: Any) -> None:
        if (value := loss(model, batch)) is not None:
            value.backward()  # type: ignore[no-untyped-call]
        for each in optimizers:
            each.step()
            each.zero_grad()
        model.zero_grad()  # also of what no optimizer has

    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    declared = State([model], losses={"loss": loss}, draws=[make_batch], listed=state)
    step = TrainingStep(model, optimizers, make_batch, run, state=declared)
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
    if meter.keeps_freed_memory and (advice := allocator_advice(meter.device)) is not None:
        log.info("more would fit if memory were less fragmented: set the environment variable %s", advice)
    search.run(candidates)
    sizes, enough = search.sizes, search.enough
    if sizes is None or sizes.largest is None:
        raise DoesNotFitError(search.why_nothing_fits(remedy))
    batch_size, reason = sizes.largest, "memory" if sizes.largest != candidates[-1] else request.upper_reason
    result = ProbeResult(
        batch_size, "larger forward passes would gain little" if enough else reason, int(sizes.budget_bytes),
        meter.total_bytes, config.search, time.perf_counter() - start, sizes.measurements,
        predicted=_predicted(sizes, enough), enough=enough,
        exact=_unrounded(sizes) if request.rounds and not enough else None,
    )  # fmt: skip
    _log_result(result)
    return result


def _log_result(result: ProbeResult) -> None:
    batch_size, budget = result.batch_size, memory_size(result.budget_bytes)
    if result.enough is not None:
        peak = max((at for size, at in result.predicted if size <= result.enough), default=result.peak_bytes)
        log.info(
            "forward passes of up to %d samples are large enough, and clearly fit (%s of %s predicted); found in "
            "%.1f s with %s of up to %s",
            result.enough, memory_size(peak), budget, result.seconds, plural(result.num_steps, "training step"),
            plural(batch_size, "sample"),
        )  # fmt: skip
        return
    log.info(
        "maximum batch size %d, bound by %s: it takes %s of %s; found in %.1f s with %s, %d out of memory",
        batch_size, result.bound, memory_size(result.peak_bytes), budget,
        result.seconds, plural(result.num_steps, "training step"), result.num_out_of_memory,
    )  # fmt: skip


def _largest(enough: Callable[[], int | None], ranks: Ranks) -> int | None:
    """Return the largest answer of all ranks, or None if one of them does not know."""
    here = enough()
    has_answer, wanted = ranks.all(here is not None), int(ranks.largest(here or 0))
    return wanted if has_answer else None


def _predicted(sizes: SizeSearch, enough: int | None) -> list[tuple[int, int]]:
    """Return two points of the bound by which a size is enough, or of the line by which no larger one fits."""
    largest = sizes.largest
    assert largest is not None
    if enough is not None:
        return [(size, int(sizes.at_most(size))) for size in sorted({largest, enough})]
    if (line := sizes.line()) is None or sizes.low + 1 >= len(sizes.candidates):
        return []
    ran = sorted({m.batch_size for m in sizes.measurements if m.peak_bytes is not None and not m.retries})
    ends = sorted({*ran[-2:], sizes.candidates[sizes.low + 1]})
    return [(size, int(line.at(size))) for size in (ends[0], ends[-1])]


def _unrounded(sizes: SizeSearch) -> int | None:
    """Return the largest size that the line allows above an answer that memory bounds; None if there is none."""
    if sizes.low + 1 == len(sizes.candidates) or (line := sizes.line()) is None or line.slope <= 0:
        return None
    most = min(int(line.reach(sizes.budget_bytes)), sizes.candidates[sizes.low + 1] - 1)
    return most if most > sizes.candidates[sizes.low] else None
