"""``micro_batch_size: explore``: time the ways to run a step on the user's data, and recommend the fastest.

A round is the same samples for every candidate. Rounds differ for all of them alike (other samples, a device that slows
down), so times are compared within a round: what counts is the median of a candidate's ratios to another, and by how
much these ratios vary.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist, median
from typing import Any

import torch

from adaptive_batching._device import unchanged_random_state
from adaptive_batching._growth.controller import BatchController
from adaptive_batching._memory.meter import memory_meter
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._report.record import Report
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._torchtune.stock.data import Sample, is_packed
from adaptive_batching._torchtune.stock.host import Host, StockRun
from adaptive_batching._torchtune.stock.less_memory import remedy
from adaptive_batching._torchtune.train.recipe_work import SplitPolicy, Splitter, TrainingWork, parallel_of
from adaptive_batching._values import ByLength, Fixed

log = logging.getLogger(__name__)

Candidate = int | str  # samples of a forward, or "auto"
Times = dict[Candidate, dict[int, float]]  # candidate -> round -> natural logarithm of its seconds

MIN_RATIO = 1.4  # between neighbouring candidates: closer ones hardly differ in speed
ENOUGH_CONFIDENCE, MOST_CONFIDENCE = 0.97, 0.99  # to stop, and to claim
MAX_ROUNDS = 20
WORTH_MEASURING = 0.01  # confidence below which a candidate is not measured again
EXPECTED_NOISE = 0.05  # of a timing, as a fraction of it; counts as much as one observation


@dataclass(frozen=True)
class Estimate:
    """What is known of a candidate."""

    candidate: Candidate
    runs: int
    seconds: float  # of an average round
    speedup: float  # relative to the first candidate, the base
    confidence: float  # probability that no other candidate is faster by more than the noise


@dataclass(frozen=True)
class Exploration:
    """The fastest candidate, all that ran, and the standard deviation of one timing, as a fraction of it."""

    recommended: Estimate
    estimates: list[Estimate]
    noise: float


def explore_micro_batch_size(
    host: Host, run: StockRun, controller: BatchController, split_policy: SplitPolicy, stored: Mapping[str, Any],
    report: Report,
) -> Fixed | ByLength:  # fmt: skip
    """Return the ``micro_batch_size`` to train with: that of the run that is resumed, or the fastest.

    Weights, gradients, random state and data order are left as they were.
    """
    most, chosen = split_policy.most_samples, stored.get("explored")
    assert most is not None, "explored without a probe"
    fits = not isinstance(chosen, int) or chosen <= most  # else the device is not that of the run that is resumed
    if chosen is not None and fits and stored.get("configured_batch_size") == run.batch_size:
        log.info("micro_batch_size %s, found by the run being resumed", chosen)
        return _split_size(chosen)
    # A batch that grows is explored at the size that fills memory, as far as it can grow.
    batch_size = controller.accumulation.allowed(max(controller.batch_size, min(controller.maximum, most)))
    batches, dataset = controller.accumulation.batches_at(batch_size), host.loader.dataset
    candidates: list[Candidate] = [*sizes_to_time(batch_size, most)]
    same_lengths = is_packed(dataset) or not host.objective.is_text(dataset[0])  # a split by length is one by number
    if not same_lengths and batch_size * batches > 1:
        candidates.append(str(ByLength()))
    log.info("exploring micro_batch_size %s at batch size %d; base is %s", candidates, batch_size, candidates[0])
    with unchanged_random_state(host.device):
        result = fastest(candidates, _timer_of_steps(host, split_policy, candidates, batch_size, batches))
    if result is None:
        raise DoesNotFitError(
            f"all of micro_batch_size {candidates} ran out of memory, although {most} samples per forward pass fit in "
            "the probe: something else has taken memory since, or there are longer samples. Free the device, or set "
            f"{remedy(host)}"
        )
    report.exploration(**asdict(result))
    chosen = result.recommended.candidate
    log.info("using micro_batch_size=%s; with that in the config, the next run need not explore", chosen)
    return _split_size(chosen)


def sizes_to_time(batch_size: int, largest: int) -> list[int]:
    """Return divisors of ``batch_size`` that are at most ``largest``, ascending, thinned where they lie close."""
    chosen: list[int] = []
    for size in range(min(batch_size, largest), 0, -1):
        if batch_size % size == 0 and (not chosen or size * MIN_RATIO <= chosen[-1]):
            chosen.append(size)
    return chosen[::-1]


def _split_size(candidate: Candidate) -> Fixed | ByLength:
    return Fixed(candidate) if isinstance(candidate, int) else ByLength()


def _timer_of_steps(
    host: Host, split_policy: SplitPolicy, candidates: Sequence[Candidate], batch_size: int, batches: int
) -> Callable[[Candidate, int], float | None]:
    """Return what measures a candidate in a round, for steps of so many ``batches`` of ``batch_size``.

    It gives the seconds of forward and backward on the slowest rank; None if one ran out of memory.
    """
    meter, windows = memory_meter(host.device), _windows(host.loader.dataset, batch_size, batches, host.ranks.rank)
    works: dict[Candidate, TrainingWork] = {}
    for candidate in candidates:
        policy = replace(split_policy, size=_split_size(candidate), limit=TokenLimit(split_policy.limit.bound))
        works[candidate] = TrainingWork(host, Splitter(host, policy))
    runners = {each: StepRunner(work, parallel_of(host), recovers=False) for each, work in works.items()}
    seen: list[list[list[Sample]]] = []
    warm: set[Candidate] = set()

    def seconds_of(candidate: Candidate, parts: Sequence[Any]) -> float | None:
        meter.synchronize()
        start = time.perf_counter()
        optimizers = host.backward_optimizers  # which update nothing here
        with contextlib.nullcontext() if optimizers is None else optimizers.closed():
            failed = runners[candidate].run_once(works[candidate].runs(parts)).failed
        meter.synchronize()
        seconds = time.perf_counter() - start
        for parameter in host.model.parameters():
            parameter.grad = None
        if failed:
            works[candidate].splitter.timer.forget()
            return None
        works[candidate].splitter.timer.read()  # rows learn their size
        return host.ranks.largest(seconds)

    def measure(candidate: Candidate, round_: int) -> float | None:
        if round_ == len(seen):
            seen.append(next(windows))
        window, work = seen[round_], works[candidate]
        work.begin_step()
        if isinstance(candidate, str):  # by length
            window = [[sample for batch in window for sample in batch]]
        parts = runners[candidate].filled_up([part for group in work.split(window) for part in group])
        if candidate not in warm:  # allocating memory and choosing kernels are paid for once
            warm.add(candidate)
            if seconds_of(candidate, parts if host.is_compiled else parts[:1]) is None:  # shapes may be compiled each
                return None
        return seconds_of(candidate, parts)

    return measure


def _windows(dataset: Any, batch_size: int, batches: int, rank: int) -> Iterator[list[list[Sample]]]:
    """Yield the batches of one optimizer step after another, drawn from the data by a separate generator."""
    window = batch_size * batches
    assert window <= len(dataset), (batch_size, batches, len(dataset))
    generator = torch.Generator().manual_seed(rank)
    while True:
        order = torch.randperm(len(dataset), generator=generator).tolist()
        for first in range(0, len(order) - window + 1, window):
            samples = [dataset[index] for index in order[first : first + window]]
            yield [samples[start : start + batch_size] for start in range(0, window, batch_size)]


def fastest(
    candidates: Sequence[Candidate], measure: Callable[[Candidate, int], float | None], max_rounds: int = MAX_ROUNDS
) -> Exploration | None:
    """Find the fastest candidate; stop when that is right with ``ENOUGH_CONFIDENCE``, or at ``max_rounds``.

    ``measure`` takes a candidate and the round, and returns seconds, or None if it ran out of memory, which rules it
    out; the result is None if all did. After the first round, only those are measured that could still be the fastest,
    in alternating order.
    """
    times: Times = {}
    possible, order, start = list(candidates), list(candidates), time.perf_counter()
    for round_ in range(max_rounds):
        log.info(
            "round %d of at most %d: timing %d of %d sizes (%.0f s so far)",
            round_ + 1, max_rounds, len(order), len(candidates), time.perf_counter() - start,
        )  # fmt: skip
        for candidate in order if round_ % 2 == 0 else order[::-1]:
            seconds = measure(candidate, round_)
            if seconds is None:
                possible.remove(candidate)
                times.pop(candidate, None)
                continue
            times.setdefault(candidate, {})[round_] = math.log(seconds)
            best = _evaluate(times, len(possible)).recommended
            log.info(
                "recommended micro_batch_size %s, %.2fx base, confidence %.0f of 100",
                best.candidate, best.speedup, math.floor(100 * best.confidence),
            )  # fmt: skip
        if not possible:
            return None
        times = {candidate: times[candidate] for candidate in possible}  # in the given order
        result = _evaluate(times, len(possible))
        # A single timing could be an outlier, so the best candidate and its closest rivals must be measured twice.
        if len(possible) == 1 or (round_ > 0 and result.recommended.confidence >= ENOUGH_CONFIDENCE):
            break
        first_two = sorted(result.estimates, key=lambda each: each.seconds)[:2]
        order = [e.candidate for e in result.estimates if e in first_two or e.confidence >= WORTH_MEASURING]
    return result


def _evaluate(times: Times, num_possible: int) -> Exploration:
    """Return the fastest of the candidates that have run; of the other possible ones nothing is known."""
    base, best = next(iter(times)), max(times, key=lambda candidate: len(times[candidate]))
    for _ in range(2):  # by one that has run in most rounds, and then by the best
        ratios = {one: [times[one][r] - times[best][r] for r in times[one] if r in times[best]] for one in times}
        levels = {one: median(ratios[one]) for one in times}
        best = min(times, key=levels.__getitem__)
    # A ratio has two timings, and so twice the variance of one.
    left = [(ratio - levels[one]) ** 2 / 2 for one in times for ratio in ratios[one] if len(ratios[one]) > 1]
    freedom = sum(max(len(ratios[one]) - 1, 0) for one in times if one != best)
    noise = math.sqrt((EXPECTED_NOISE**2 + sum(left)) / (1 + freedom))

    def is_slower(other: Candidate, one: Candidate) -> float:
        """Return the probability that ``other`` is slower than ``one``, or faster by no more than the noise."""
        error = noise * math.sqrt(2 / min(len(times[one]), len(times[other])))
        return NormalDist().cdf((levels[other] - levels[one] + noise) / error)

    estimates = {}
    for one in times:
        confidence = math.prod(is_slower(other, one) for other in times if other != one)
        confidence = min(confidence * 0.5 ** (num_possible - len(times)), MOST_CONFIDENCE)
        seconds = math.exp(median(times[best].values()) + levels[one] - levels[best])
        speedup = math.exp(levels[base] - levels[one])
        estimates[one] = Estimate(one, len(times[one]), seconds, speedup, confidence)
    return Exploration(estimates[best], list(estimates.values()), noise)
