"""A synthetic device with known times and known noise: what is recommended, and whether the confidence is earned."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from adaptive_batching._micro_batches.fastest import Exploration, NothingRanError, Timings, explore

EVALUATE = Timings.evaluate
SIZES = [1, 2, 4, 8, 16, 32, 64]


@dataclass
class Device:
    """Times that are known up to noise; every round has other samples, which are as slow for all."""

    log_seconds: list[float]
    noise: float
    random: random.Random
    rounds: dict[int, float] = field(default_factory=dict)
    runs: int = 0

    def measure(self, candidate: int | str, round_: int) -> float:
        self.runs += 1
        drift = self.rounds.setdefault(round_, self.random.gauss(0, 0.2))
        index = SIZES.index(candidate)  # type: ignore[arg-type]
        return math.exp(self.log_seconds[index] + drift + self.random.gauss(0, self.noise))

    def none_is_faster_by_more_than_the_noise(self, candidate: int | str) -> bool:
        return self.log_seconds[SIZES.index(candidate)] <= min(self.log_seconds) + self.noise  # type: ignore[arg-type]


def saturating(seed: int, noise: float) -> Device:
    """A fixed time for each forward and one for each sample, which grows again with the size: there is a best size."""
    generator = random.Random(seed)
    fixed, growth = generator.uniform(0.5, 5), generator.uniform(0.005, 0.05)
    seconds = [fixed / size + 1 + growth * size for size in SIZES]
    return Device([math.log(value) for value in seconds], noise, generator)


def wandering(seed: int, noise: float) -> Device:
    """Anything goes."""
    generator = random.Random(seed)
    times = [0.0]
    while len(times) < len(SIZES):
        times.append(times[-1] + generator.gauss(0, 0.4))
    return Device(times, noise, generator)


@pytest.mark.parametrize("noise", [0.01, 0.05])
@pytest.mark.parametrize("make", [saturating, wandering])
def test_the_fastest_is_found_in_at_least_95_of_100_seeds(make: Callable[[int, float], Device], noise: float) -> None:
    right, runs = 0, 0
    for seed in range(100):
        device = make(seed, noise)
        found = explore(SIZES, device.measure).recommended.candidate
        right += device.none_is_faster_by_more_than_the_noise(found)
        runs += device.runs
    assert right >= 95
    assert runs / 100 < 3 * len(SIZES), "it stops early"


def test_the_very_fastest_is_found_where_it_stands_out() -> None:
    """Ahead of the next by two of the noise: no other answer is right."""
    right = 0
    for seed in range(100):
        generator = random.Random(seed)
        times = [generator.uniform(0.1, 1.0) for _ in SIZES]
        fastest = generator.randrange(len(SIZES))
        times[fastest] = 0.0
        device = Device(times, 0.05, generator)
        right += explore(SIZES, device.measure).recommended.candidate == SIZES[fastest]
    assert right >= 95


@pytest.mark.parametrize("noise", [0.01, 0.1])
@pytest.mark.parametrize("make", [saturating, wandering])
def test_confidence_is_as_often_right_as_it_says(
    make: Callable[[int, float], Device], noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the answers given along the way with about 50, 70 or 90 of 100, about as many are right.

    Devices with a best size are likelier than the prior takes them to be; lower confidences are too low for them.
    """
    answers: list[tuple[float, bool]] = []
    for seed in range(150):
        device = make(seed, noise)

        def noted(self: Timings, *arguments: Any, device: Device = device) -> Exploration:
            result = EVALUATE(self, *arguments)
            best = result.recommended
            answers.append((best.confidence, device.none_is_faster_by_more_than_the_noise(best.candidate)))
            return result

        with monkeypatch.context() as patch:
            patch.setattr(Timings, "evaluate", noted)
            explore(SIZES, device.measure)
    bins = [(0.85, 0.95, 0.07), (0.8, 0.97, 0.07)] + [(0.4, 0.6, 0.12), (0.6, 0.8, 0.12)] * (make is wandering)
    for low, high, tolerance in bins:
        within = [(said, right) for said, right in answers if low <= said < high]
        said = sum(said for said, _ in within) / len(within)
        right = sum(right for _, right in within) / len(within)
        assert len(within) > 80
        assert right == pytest.approx(said, abs=tolerance), (low, high, said, right, len(within))


def test_every_measurement_is_followed_by_a_recommendation(caplog: pytest.LogCaptureFixture) -> None:
    device = Device([1.0, 0.5, 0.0, 0.3, 0.6, 1.0, 2.0], 0.02, random.Random(0))
    with caplog.at_level(logging.INFO):
        result = explore(SIZES, device.measure)
    lines = [record.message for record in caplog.records if "recommended" in record.message]
    assert len(lines) == device.runs
    assert lines[0] == f"recommended micro_batch_size 1, 1.00x base, confidence {lines[0].split()[-3]} of 100"
    confidence = math.floor(100 * result.recommended.confidence)
    assert lines[-1] == (
        f"recommended micro_batch_size 4, {result.recommended.speedup:.2f}x base, confidence {confidence} of 100"
    )
    assert result.recommended.speedup == pytest.approx(math.e, rel=0.1)
    assert [estimate.candidate for estimate in result.estimates] == SIZES
    assert result.recommended.runs >= 2, "no answer hangs on one timing"
    assert 0.005 < result.noise < 0.08


def test_what_cannot_be_the_fastest_is_measured_once() -> None:
    device = Device([3.0, 2.0, 1.0, 0.0, 0.01, 1.0, 2.0], 0.05, random.Random(0))
    runs = {estimate.candidate: estimate.runs for estimate in explore(SIZES, device.measure).estimates}
    assert [runs[size] for size in (1, 2, 4, 32, 64)] == [1] * 5
    assert runs[8] > 1


def test_equals_end_after_the_rounds_allowed_or_are_called_equal() -> None:
    device = Device([0.0] * 7, 0.05, random.Random(0))
    result = explore(SIZES, device.measure, max_rounds=5)
    assert device.runs <= 5 * len(SIZES)
    assert result.recommended.confidence > 0.5


def test_what_runs_out_of_memory_is_ruled_out() -> None:
    device = Device([1.0, 0.5, 0.2, 0.1, 0.05, -1.0, -2.0], 0.01, random.Random(0))
    result = explore(SIZES, lambda size, round_: None if size in (32, 64) else device.measure(size, round_))
    assert result.recommended.candidate == 16
    with pytest.raises(NothingRanError, match="ran out of memory"):
        explore(SIZES, lambda size, round_: None)


def test_a_single_candidate_is_the_answer() -> None:
    result = explore([3], lambda size, round_: 1.0)
    assert (result.recommended.candidate, result.recommended.runs, result.recommended.confidence) == (3, 1, 1.0)
    with pytest.raises(ValueError, match="at least one candidate"):
        explore([], lambda size, round_: 1.0)


def test_the_same_timings_give_the_same_answer() -> None:
    results = [explore(SIZES, saturating(3, 0.05).measure) for _ in range(2)]
    assert results[0] == results[1]
