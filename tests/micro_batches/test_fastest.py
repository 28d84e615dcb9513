"""A synthetic device with known times and known noise: what is recommended, and whether the confidence is earned."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from adaptive_batching._micro_batches.fastest import Exploration, NothingRanError, explore

SIZES = [1, 2, 4, 8, 16, 32, 64]


class Device:
    """Times that are known up to noise; every round has other samples, which are as slow for all."""

    def __init__(self, log_seconds: list[float], noise: float, generator: random.Random | None = None) -> None:
        self.log_seconds: dict[int | str, float] = dict(zip(SIZES, log_seconds, strict=True))
        self.noise = noise
        self.random = generator or random.Random(0)
        self.rounds: dict[int, float] = {}
        self.runs = 0

    def measure(self, candidate: int | str, round_: int) -> float:
        self.runs += 1
        drift = self.rounds.setdefault(round_, self.random.gauss(0, 0.2))
        return math.exp(self.log_seconds[candidate] + drift + self.random.gauss(0, self.noise))

    def none_is_faster_by_more_than_the_noise(self, candidate: int | str) -> bool:
        return self.log_seconds[candidate] <= min(self.log_seconds.values()) + self.noise


def saturating(seed: int, noise: float) -> Device:
    """A fixed time for each forward and one for each sample, which grows again with the size: there is a best size."""
    generator = random.Random(seed)
    fixed, growth = generator.uniform(0.5, 5), generator.uniform(0.005, 0.05)
    return Device([math.log(fixed / size + 1 + growth * size) for size in SIZES], noise, generator)


def wandering(seed: int, noise: float) -> Device:
    """Anything goes."""
    generator = random.Random(seed)
    steps = [0.0, *(generator.gauss(0, 0.4) for _ in SIZES[1:])]
    return Device(list(itertools.accumulate(steps)), noise, generator)


def standing_out(seed: int, noise: float) -> Device:
    """One is ahead of the next by two of the noise at least: no other answer is right."""
    generator = random.Random(seed)
    times = [generator.uniform(0.1, 1.0) for _ in SIZES]
    times[generator.randrange(len(SIZES))] = 0.0
    return Device(times, noise, generator)


@pytest.mark.parametrize("noise", [0.01, 0.05])
@pytest.mark.parametrize("make", [saturating, wandering, standing_out])
def test_the_fastest_is_found_in_at_least_95_of_100_seeds(make: Callable[[int, float], Device], noise: float) -> None:
    devices = [make(seed, noise) for seed in range(100)]
    found = [explore(SIZES, device.measure).recommended.candidate for device in devices]
    right = sum(map(Device.none_is_faster_by_more_than_the_noise, devices, found))
    assert right >= 95
    assert sum(device.runs for device in devices) / 100 < 3 * len(SIZES), "it stops early"


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
        said, right = (sum(values) / len(within) for values in zip(*within, strict=True))
        assert len(within) > 80
        assert right == pytest.approx(said, abs=tolerance), (low, high, said, right, len(within))


def test_every_measurement_is_followed_by_a_recommendation(caplog: pytest.LogCaptureFixture) -> None:
    device = Device([1.0, 0.5, 0.0, 0.3, 0.6, 1.0, 2.0], 0.02)
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
    device = Device([3.0, 2.0, 1.0, 0.0, 0.01, 1.0, 2.0], 0.05)
    runs = {estimate.candidate: estimate.runs for estimate in explore(SIZES, device.measure).estimates}
    assert [runs[size] for size in (1, 2, 4, 32, 64)] == [1] * 5
    assert runs[8] > 1


def test_equals_end_after_the_rounds_allowed_or_are_called_equal() -> None:
    device = Device([0.0] * 7, 0.05)
    result = explore(SIZES, device.measure, max_rounds=5)
    assert device.runs <= 5 * len(SIZES)
    assert result.recommended.confidence > 0.5


def test_what_runs_out_of_memory_is_ruled_out() -> None:
    device = Device([1.0, 0.5, 0.2, 0.1, 0.05, -1.0, -2.0], 0.01)
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
