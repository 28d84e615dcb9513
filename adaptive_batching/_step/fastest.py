"""Find the fastest of several ways to run the same work, and how certain that is: timings in, recommendation out.

Rounds differ for all candidates alike (other samples, a device that slows down), so that times are compared within a
round: what counts is the median of a candidate's ratios to another, and by how much these ratios vary.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist, mean, median

log = logging.getLogger(__name__)

Candidate = int | str
_Times = dict[Candidate, dict[int, float]]  # candidate -> round -> natural logarithm of its seconds

ENOUGH_CONFIDENCE = 0.97
MAX_ROUNDS = 20
# Confidence below which a candidate is not measured again.
WORTH_MEASURING = 0.01
# Noise of a timing, as a fraction of it, that is expected before any is seen; it counts as much as one observation.
EXPECTED_NOISE = 0.05


class NothingRanError(ValueError):
    """Raised if every candidate ran out of memory."""


@dataclass(frozen=True)
class Estimate:
    candidate: Candidate
    runs: int
    seconds: float
    """Estimated time of an average round."""
    speedup: float
    """Speed relative to the first candidate."""
    confidence: float
    """Probability that no other candidate is faster by more than the noise."""
    speedup_low: float
    """With :attr:`speedup_high`, the interval that holds the speed with a probability of 95 %."""
    speedup_high: float


@dataclass(frozen=True)
class Exploration:
    recommended: Estimate
    estimates: list[Estimate]
    """All candidates that ran, in the given order."""
    noise: float
    """Standard deviation of one timing, as a fraction of it."""


def explore(
    candidates: Sequence[Candidate], measure: Callable[[Candidate, int], float | None], max_rounds: int = MAX_ROUNDS
) -> Exploration:
    """Find the fastest candidate; stop when that is right with ``ENOUGH_CONFIDENCE``, or at ``max_rounds``.

    ``measure`` takes a candidate and the round, whose work is the same for all, and returns seconds, or None if it ran
    out of memory, which rules it out. After the first round, only those are measured that could still be the fastest,
    in alternating order.
    """
    if not candidates:
        raise ValueError("explore needs at least one candidate")
    times: _Times = {}
    possible, order = list(candidates), list(candidates)
    start = time.perf_counter()
    for round_ in range(max_rounds):
        log.info(
            "round %d of at most %d: timing %d of %d sizes (%.0f s so far)",
            round_ + 1, max_rounds, len(order), len(candidates), time.perf_counter() - start
        )  # fmt: skip
        for candidate in order if round_ % 2 == 0 else order[::-1]:
            seconds = measure(candidate, round_)
            if seconds is None:
                possible.remove(candidate)
                times.pop(candidate, None)
                continue
            times.setdefault(candidate, {})[round_] = math.log(seconds)
            best = _evaluate(times, possible).recommended
            log.info(
                "recommended micro_batch_size %s, %.2fx base, confidence %.0f of 100",
                best.candidate, best.speedup, math.floor(100 * best.confidence)
            )  # fmt: skip
        if not possible:
            raise NothingRanError(f"all candidates {list(candidates)} ran out of memory")
        result = _evaluate(times, possible)
        # A single timing could be an outlier, so the best candidate and its closest rivals must be measured twice.
        if len(possible) == 1 or (round_ > 0 and result.recommended.confidence >= ENOUGH_CONFIDENCE):
            break
        first_two = sorted(result.estimates, key=lambda each: each.seconds)[:2]
        order = [e.candidate for e in result.estimates if e in first_two or e.confidence >= WORTH_MEASURING]
    return result


def _evaluate(times: _Times, possible: Sequence[Candidate]) -> Exploration:
    """Return the fastest of the ``possible`` candidates that have run; of the others nothing is known."""
    ran = [candidate for candidate in possible if candidate in times]
    best = max(ran, key=lambda candidate: len(times[candidate]))
    for _ in range(2):  # by one that has run in most rounds, and then by the best
        levels = {one: median(_ratios(times[one], times[best])) for one in ran}
        best = min(ran, key=levels.__getitem__)
    noise, base = _noise(times), ran[0]

    def error(one: Candidate, other: Candidate) -> float:
        return noise * math.sqrt(2 / min(len(times[one]), len(times[other])))

    estimates = {}
    for one in ran:
        others = [(levels[other] - levels[one] + noise) / error(one, other) for other in ran if other != one]
        speedup, spread = levels[base] - levels[one], 1.96 * error(one, base) if one != base else 0.0
        estimates[one] = Estimate(
            one,
            len(times[one]),
            seconds=math.exp(median(times[best].values()) + levels[one] - levels[best]),
            speedup=math.exp(speedup),
            confidence=math.prod(map(NormalDist().cdf, others)) * 0.5 ** (len(possible) - len(ran)),
            speedup_low=math.exp(speedup - spread),
            speedup_high=math.exp(speedup + spread),
        )
    return Exploration(estimates[best], list(estimates.values()), noise)


def _noise(times: _Times) -> float:
    """Return the standard deviation of one timing: of a ratio, which has two of them, half the variance."""
    found = [_ratios(one, other) for one, other in combinations(times.values(), 2)]
    squares = sum((ratio - mean(ratios)) ** 2 for ratios in found for ratio in ratios)
    variance = squares / max(2 * sum(len(ratios) - 1 for ratios in found), 1)
    # What the timings say counts by what is left of them once each candidate and each round has a level.
    freedom = sum(len(runs) - 1 for runs in times.values()) - max(map(len, times.values())) + 1
    return math.sqrt((EXPECTED_NOISE**2 + freedom * variance) / (1 + freedom))


def _ratios(one: dict[int, float], other: dict[int, float]) -> list[float]:
    return [one[round_] - other[round_] for round_ in one if round_ in other]
