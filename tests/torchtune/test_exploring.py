"""A synthetic device with known times and known noise: what is recommended, and whether the confidence is earned."""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from adaptive_batching._torchtune.train.exploring import Exploration, fastest

SIZES = [1, 2, 4, 8, 16, 32, 64]


def found_by(*given: Any, **options: Any) -> Exploration:
    found = fastest(*given, **options)
    assert found is not None
    return found


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


def standing_out(seed: int, noise: float) -> Device:
    """One is ahead of the next by two of the noise at least: no other answer is right."""
    generator = random.Random(seed)
    times = [generator.uniform(max(0.1, 2 * noise), 1.0) for _ in SIZES]
    times[generator.randrange(len(SIZES))] = 0.0
    return Device(times, noise, generator)


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("make", [saturating, standing_out])
def test_the_fastest_is_found_in_at_least_95_of_100_seeds(
    make: Callable[[int, float], Device], noise: float, caplog: pytest.LogCaptureFixture
) -> None:
    """And of the answers given along the way with 85 to 97 of 100, as many are right or more."""
    caplog.set_level(logging.INFO)
    right, runs, said = 0, 0, list[tuple[int, bool]]()
    for seed in range(100):
        caplog.clear()
        device = make(seed, noise)
        found = found_by(SIZES, device.measure).recommended.candidate
        right += device.none_is_faster_by_more_than_the_noise(found)
        runs += device.runs
        answers = re.findall(r"recommended micro_batch_size (\d+), .*, confidence (\d+) of 100", caplog.text)
        said += [(int(c), device.none_is_faster_by_more_than_the_noise(int(size))) for size, c in answers]
    assert right >= 95
    assert runs < 3 * len(SIZES) * 100, "it stops early"
    sure = [(confidence, is_right) for confidence, is_right in said if 85 <= confidence < 97]
    assert sum(is_right for _, is_right in sure) >= (sum(c for c, _ in sure) / 100 - 0.07 * len(sure)), len(sure)


def test_every_measurement_is_followed_by_a_recommendation(caplog: pytest.LogCaptureFixture) -> None:
    devices = [Device([1.0, 0.5, 0.0, 0.3, 0.6, 1.0, 2.0], 0.02) for _ in range(2)]
    with caplog.at_level(logging.INFO):
        result = found_by(SIZES, devices[0].measure)
    lines = [record.message for record in caplog.records if "recommended" in record.message]
    assert len(lines) == devices[0].runs
    assert lines[0] == f"recommended micro_batch_size 1, 1.00x base, confidence {lines[0].split()[-3]} of 100"
    best = result.recommended
    confidence = math.floor(100 * best.confidence)
    assert lines[-1] == f"recommended micro_batch_size 4, {best.speedup:.2f}x base, confidence {confidence} of 100"
    assert best.speedup == pytest.approx(math.e, rel=0.1)
    assert [estimate.candidate for estimate in result.estimates] == SIZES
    assert best.runs >= 2, "no answer hangs on one timing"
    assert 0.005 < result.noise < 0.08
    assert found_by(SIZES, devices[1].measure) == result, "the same timings give the same answer"


def test_only_what_could_be_the_fastest_is_measured_again_and_more_often_where_timings_vary() -> None:
    device = Device([3.0, 2.0, 1.0, 0.0, 0.01, 1.0, 2.0], 0.02)
    runs = {estimate.candidate: estimate.runs for estimate in found_by(SIZES, device.measure).estimates}
    assert [runs[size] for size in (1, 2, 4, 32, 64)] == [1] * 5 and runs[8] > 1
    quiet, noisy = ([saturating(seed, noise) for seed in range(30)] for noise in (0.01, 0.2))
    for each in (*quiet, *noisy):
        found_by(SIZES, each.measure)
    assert sum(each.runs for each in noisy) > 1.2 * sum(each.runs for each in quiet)
    equal = Device([0.0] * 7, 0.05)
    result = found_by(SIZES, equal.measure, max_rounds=5)
    assert equal.runs <= 5 * len(SIZES), "equals end after the rounds allowed, or are called equal"
    assert result.recommended.confidence > 0.5


def test_what_runs_out_of_memory_is_ruled_out() -> None:
    device = Device([1.0, 0.5, 0.2, 0.1, 0.05, -1.0, -2.0], 0.01)
    late = Device([1.0, 0.5, 0.2, 0.1, 0.05, -1.0, -2.0], 0.01)
    for first_round, each in enumerate((device, late)):

        def measure(size: int | str, round_: int, first_round: int = first_round, each: Device = each) -> float | None:
            return None if size in (32, 64) and round_ >= first_round else each.measure(size, round_)

        result = found_by(SIZES, measure)
        assert result.recommended.candidate == 16 and [e.candidate for e in result.estimates] == SIZES[:5]
    assert fastest(SIZES, lambda size, round_: None) is None


def test_a_single_candidate_is_the_answer() -> None:
    result = found_by([3], lambda size, round_: 1.0)
    assert (result.recommended.candidate, result.recommended.runs, result.recommended.confidence) == (3, 1, 0.99), (
        "never 100"
    )
