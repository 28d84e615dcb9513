"""Find the fastest of several ways to run the same work, and how certain that is: timings in, recommendation out.

Independent of torch. :func:`explore` gets ``measure``, which runs one round of the work in one way and times it.

The timings are described by a linear model: the logarithm of a time is that of the candidate, plus what the round added
for all candidates (different samples, a device that slows down), plus noise. Its posterior gives the probability that
no other candidate is faster by more than the noise. This is standard Bayesian linear regression (Gelman et al.,
Bayesian Data Analysis, 3rd ed., section 14.8: prior information on the coefficients), with the unknown size of the
noise averaged out over a grid.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Candidate = int | str

ENOUGH_CONFIDENCE = 0.97
MAX_ROUNDS = 20
# Probability of being the fastest below which a candidate is not measured again.
WORTH_MEASURING = 0.01
# Prior standard deviation of the difference between neighbouring candidates, in natural logarithms of time: twice the
# samples in a forward rarely take less than half or more than twice the time per sample.
NEIGHBOUR_SPREAD = 0.5
# Sizes of the noise, as a fraction of a time, with equal prior probability.
NOISE_GRID: NDArray[np.float64] = np.geomspace(0.001, 0.3, 40)
_NUM_DRAWS = 4000
_FLAT = 1e-4  # precision of a nearly flat prior


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
    fastest: float
    """Probability of being the fastest."""
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
    candidates: Sequence[Candidate],
    measure: Callable[[Candidate, int], float | None],
    max_rounds: int = MAX_ROUNDS,
) -> Exploration:
    """Find the fastest candidate; stop when that is right with ``ENOUGH_CONFIDENCE``, or at ``max_rounds``.

    Candidates run the same work, similar ones being adjacent; speed is relative to the first. ``measure`` takes one and
    the round, whose work is the same for all, and returns seconds, or None if it ran out of memory, which rules it out.
    After the first round, only those are measured that could still be the fastest, in alternating order.
    """
    timings = Timings(candidates)
    possible = list(range(len(candidates)))
    start = time.perf_counter()
    for round_ in range(max_rounds):
        order = possible if round_ == 0 else timings.rivals(possible)
        log.info(
            "round %d of at most %d: %d of %d sizes to time, %.0f s so far",
            round_ + 1, max_rounds, len(order), len(candidates), time.perf_counter() - start,
        )  # fmt: skip
        for index in list(order if round_ % 2 == 0 else reversed(order)):
            seconds = measure(candidates[index], round_)
            if seconds is None:
                possible.remove(index)
                continue
            timings.add(index, round_, seconds)
            best = timings.evaluate(possible).recommended
            log.info(
                "recommended micro_batch_size %s, %.2fx base, confidence %.0f of 100",
                best.candidate, best.speedup, math.floor(100 * best.confidence),
            )  # fmt: skip
        if not possible:
            raise NothingRanError(f"all candidates {list(candidates)} ran out of memory")
        result = timings.evaluate(possible)
        # A single timing could be an outlier, so the best candidate and its closest rivals must be measured twice.
        if len(possible) == 1 or (round_ > 0 and result.recommended.confidence >= ENOUGH_CONFIDENCE):
            break
    return result


class Timings:
    """Times measured so far, and the estimates that they give. Neighbouring candidates are expected to be similar."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        if not candidates:
            raise ValueError("explore needs at least one candidate")
        self._candidates = candidates
        self._measured: list[tuple[int, int, float]] = []  # candidate, round, logarithm of seconds

    def add(self, index: int, round_: int, seconds: float) -> None:
        self._measured.append((index, round_, math.log(seconds)))

    def rivals(self, possible: Sequence[int]) -> list[int]:
        """Return the members of ``possible`` that are worth another measurement, in ascending order."""
        draws, _ = self._draw()
        chances = _chances(draws, possible)
        order = sorted(possible, key=lambda index: -chances[index])
        return sorted(order[:2] + [index for index in order[2:] if chances[index] >= WORTH_MEASURING])

    def evaluate(self, possible: Sequence[int]) -> Exploration:
        """Return the fastest ``possible`` one that has run, and how certain that is; those that have not are rivals."""
        draws, noise = self._draw()
        runs = Counter(index for index, _, _ in self._measured)
        expected = draws.mean(axis=0)
        chances = _chances(draws, possible)
        fastest_rival = draws[:, possible].min(axis=1)
        # Logarithm of the speed relative to the first candidate.
        ratios = {index: np.quantile(draws[:, 0] - draws[:, index], (0.025, 0.975)) for index in possible}
        level = np.mean([seconds - expected[index] for index, _, seconds in self._measured])
        estimates = {
            index: Estimate(
                candidate=self._candidates[index],
                runs=runs[index],
                seconds=float(np.exp(expected[index] + level)),
                speedup=float(np.exp(expected[0] - expected[index])),
                confidence=float(np.mean(draws[:, index] <= fastest_rival + noise)),
                fastest=chances[index],
                speedup_low=float(np.exp(ratios[index][0])),
                speedup_high=float(np.exp(ratios[index][1])),
            )
            for index in possible
            if runs[index]
        }
        best = min(estimates, key=lambda index: expected[index])
        return Exploration(estimates[best], [*estimates.values()], float(np.exp(np.log(noise).mean())))

    def _draw(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Draw from the posterior: logarithmic times [draws, candidates], and sizes of the noise [draws]."""
        count = len(self._candidates)
        rounds = sorted({round_ for _, round_, _ in self._measured})
        design = np.zeros((len(self._measured), count + len(rounds)))
        for row, (index, round_, _) in enumerate(self._measured):
            design[row, index] = design[row, count + rounds.index(round_)] = 1
        # Centred, so that the nearly flat prior of the level has its mean there.
        seconds = np.array([seconds for _, _, seconds in self._measured])
        seconds = seconds - seconds.mean()

        prior = _FLAT * np.eye(design.shape[1])
        for index in range(count - 1):
            prior[index : index + 2, index : index + 2] += np.array([[1, -1], [-1, 1]]) / NEIGHBOUR_SPREAD**2

        means, roots, evidence = [], [], []
        for noise in NOISE_GRID:
            precision = prior + design.T @ design / noise**2
            projected = design.T @ seconds / noise**2
            root = np.linalg.cholesky(precision)
            half = np.linalg.solve(root, projected)
            means.append(np.linalg.solve(root.T, half))
            roots.append(root)
            log_likelihood = 0.5 * (half @ half - seconds @ seconds / noise**2) - len(seconds) * math.log(noise)
            evidence.append(log_likelihood - np.log(np.diag(root)).sum())
        weights = np.exp(np.array(evidence) - max(evidence))
        random = np.random.default_rng(0)  # the same timings give the same answer
        numbers = random.multinomial(_NUM_DRAWS, weights / weights.sum())
        draws = [
            mean[:count] + np.linalg.solve(root.T, random.standard_normal((len(mean), number)))[:count].T
            for mean, root, number in zip(means, roots, numbers, strict=True)
            if number
        ]
        return np.concatenate(draws), np.repeat(NOISE_GRID, numbers)


def _chances(draws: NDArray[np.float64], possible: Sequence[int]) -> dict[int, float]:
    """Return the fraction of draws in which each of the ``possible`` columns is the smallest of them."""
    counts = np.bincount(draws[:, possible].argmin(axis=1), minlength=len(possible))
    return dict(zip(possible, (counts / len(draws)).tolist(), strict=True))
