"""Which of several ways to run the same work is the fastest, and how sure that is: timings in, recommendation out.

Knows no torch. :func:`explore` gets ``measure``, which runs one round of the work in one way and says how long it took.

The statistic is a linear model of what was measured so far: the logarithm of a time is that of the candidate, plus
what the round added for all candidates (other samples, a device that slows down), plus noise. Its posterior gives the
probability that no other candidate is faster by more than the noise. It is the usual Bayesian linear regression
(Gelman et al., Bayesian Data Analysis, 3rd ed., section 14.8: prior information on the coefficients), with the unknown
size of the noise averaged out over a grid.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Candidate = int | str
MeasureSeconds = Callable[[Candidate, int], float | None]

ENOUGH_CONFIDENCE = 0.97
MAX_ROUNDS = 20
# Chance of being the fastest below which a candidate is not measured again.
WORTH_MEASURING = 0.01
# Before it is measured, a candidate's time is expected to differ from its neighbour's by this much (natural logarithm,
# standard deviation): twice the samples in a forward rarely take less than half or more than twice the time per sample.
NEIGHBOUR_SPREAD = 0.5
# Sizes of the noise, as a share of a time, that are thought equally likely beforehand.
NOISE_GRID: NDArray[np.float64] = np.geomspace(0.001, 0.3, 40)
_NUM_DRAWS = 4000
_FLAT = 1e-4  # precision of a prior that says next to nothing


class NothingRanError(ValueError):
    """Every candidate ran out of memory."""


@dataclass(frozen=True)
class Estimate:
    """What is known of one candidate."""

    candidate: Candidate
    runs: int
    seconds: float
    """Estimated time of an average round."""
    speedup: float
    """How many times as fast as the first candidate."""
    confidence: float
    """Probability that no other candidate is faster by more than the noise."""
    fastest: float
    """Probability of being the fastest."""


@dataclass(frozen=True)
class Exploration:
    """The answer of :func:`explore`, and the evidence for it."""

    recommended: Estimate
    estimates: list[Estimate]
    """All candidates that ran, in the order given."""
    noise: float
    """Standard deviation of one timing, as a share of it."""


def explore(
    candidates: Sequence[Candidate],
    measure: MeasureSeconds,
    *,
    confidence: float = ENOUGH_CONFIDENCE,
    max_rounds: int = MAX_ROUNDS,
) -> Exploration:
    """Find the fastest candidate; stop as soon as more measurements are unlikely to change the answer.

    The first round measures all candidates in order. Later ones measure those that could still be the fastest, in
    alternating order. After each measurement the recommendation so far is logged.

    Args:
        candidates: Ways to run the same work, neighbours alike; speed is told relative to the first.
        measure: (candidate, round) -> seconds that the round's work took, or None if the candidate ran out of memory,
            which rules it out. A round is the same work for every candidate.
        confidence: Stop when the recommendation is right with this probability.
        max_rounds: Stop after so many rounds anyway.

    Raises:
        ValueError: If there is no candidate.
        NothingRanError: If all of them run out of memory.
    """
    timings = Timings(len(candidates))
    possible = list(range(len(candidates)))
    for round_ in range(max_rounds):
        order = possible if round_ == 0 else timings.rivals(possible)
        for index in list(order if round_ % 2 == 0 else reversed(order)):
            seconds = measure(candidates[index], round_)
            if seconds is None:
                possible.remove(index)
                continue
            timings.add(index, round_, seconds)
            best = timings.evaluate(candidates, possible).recommended
            log.info(
                "recommended micro_batch_size %s, %.2fx base, confidence %.0f of 100",
                best.candidate, best.speedup, math.floor(100 * best.confidence),
            )  # fmt: skip
        if not possible:
            raise NothingRanError(f"every one of the candidates {list(candidates)} ran out of memory")
        result = timings.evaluate(candidates, possible)
        # A single timing could be a hiccup, so the best and its closest rivals are to have been seen twice.
        if len(possible) == 1 or (round_ > 0 and result.recommended.confidence >= confidence):
            break
    return result


class Timings:
    """Times measured so far, and what they say.

    Args:
        num_candidates: Candidates are numbered; neighbouring numbers are expected to be alike.
    """

    def __init__(self, num_candidates: int) -> None:
        if num_candidates < 1:
            raise ValueError("explore needs at least one candidate")
        self._num_candidates = num_candidates
        self._measured: list[tuple[int, int, float]] = []  # candidate, round, logarithm of seconds

    def add(self, index: int, round_: int, seconds: float) -> None:
        """Candidate number ``index`` took ``seconds`` for the work of ``round_``."""
        self._measured.append((index, round_, math.log(seconds)))

    def rivals(self, possible: Sequence[int]) -> list[int]:
        """Those of ``possible`` that are worth another measurement, in ascending order."""
        draws, _ = self._draw()
        chances = self._chances(draws[:, possible])
        order = sorted(range(len(possible)), key=lambda i: -chances[i])
        chosen = [i for rank, i in enumerate(order) if rank < 2 or chances[i] >= WORTH_MEASURING]
        return sorted(possible[i] for i in chosen)

    def evaluate(self, candidates: Sequence[Candidate], possible: Sequence[int]) -> Exploration:
        """The fastest of the candidates that have been measured, and how sure that is.

        Args:
            candidates: What the numbers stand for.
            possible: Numbers of the candidates to consider; those not measured yet are rivals all the same.
        """
        draws, noise = self._draw()
        runs = [sum(index == i for i, _, _ in self._measured) for index in range(self._num_candidates)]
        expected = draws.mean(axis=0)
        chances = dict(zip(possible, self._chances(draws[:, possible]), strict=True))
        fastest_rival = draws[:, possible].min(axis=1)
        level = np.mean([seconds - expected[index] for index, _, seconds in self._measured])
        estimates = {
            index: Estimate(
                candidate=candidates[index],
                runs=runs[index],
                seconds=float(np.exp(expected[index] + level)),
                speedup=float(np.exp(expected[0] - expected[index])),
                confidence=float(np.mean(draws[:, index] <= fastest_rival + noise)),
                fastest=float(chances[index]),
            )
            for index in possible
            if runs[index]
        }
        best = min(estimates, key=lambda index: expected[index])
        return Exploration(estimates[best], [*estimates.values()], float(np.exp(np.log(noise).mean())))

    @staticmethod
    def _chances(draws: NDArray[np.float64]) -> NDArray[np.float64]:
        """How often each column is the least."""
        return np.bincount(draws.argmin(axis=1), minlength=draws.shape[1]) / len(draws)

    def _draw(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Draws from the posterior: logarithmic times [draws, candidates], and sizes of the noise [draws]."""
        count = self._num_candidates
        rounds = sorted({round_ for _, round_, _ in self._measured})
        design = np.zeros((len(self._measured), count + len(rounds)))
        for row, (index, round_, _) in enumerate(self._measured):
            design[row, index] = design[row, count + rounds.index(round_)] = 1
        # Centred, so that the nearly flat prior of the level is centred on it.
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
