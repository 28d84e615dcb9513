"""The cost of attention is found from the times of forwards, and steps that are shared out by it take less time."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator

import pytest

from adaptive_batching._step.attention_cost import AttentionCost, size_of_part
from adaptive_batching._step.share import SampleCost, share_out

HIDDEN_SIZE, RANKS, SAMPLES = 768, 4, 8
EXPECTED = SampleCost.of_model(HIDDEN_SIZE).per_token_squared


def draws(generator: random.Random, number: int) -> Iterator[list[list[int]]]:
    for _ in range(number):
        lengths = [[math.ceil(generator.lognormvariate(5.3, 0.9)) for _ in range(SAMPLES)] for _ in range(RANKS)]
        yield [[min(length, 2048) for length in own] for own in lengths]


def train(off: float, noise: float, *, waits: bool, steps: int = 150) -> tuple[float, float, list[AttentionCost]]:
    """Share out steps on a device whose attention costs ``off`` times what is expected, with times as noisy as that.

    Return the time of the later steps by what is expected, and by what is fitted, over that by the true cost.
    """
    generator = random.Random(0)
    true, fits = SampleCost(300.0, 1.0, off * EXPECTED), [AttentionCost(EXPECTED) for _ in range(RANKS)]
    sums = [0.0, 0.0, 0.0]
    for step, lengths in enumerate(draws(generator, steps)):
        fitted = statistics.fmean(fit.per_token_squared for fit in fits)
        for way, squares in enumerate((true.per_token_squared, EXPECTED, fitted)):
            parts = [own for [own] in share_out(lengths, SampleCost(300.0, 1.0, squares)).parts]
            computed = [[lengths[home][index] for home, index in own] for own in parts]
            times = [true.of_part(own) for own in computed]
            sums[way] += max(times) if step >= steps // 3 else 0
        sizes = [size_of_part(own, pads=False) for own in computed]
        for fit, size, time in zip(fits, sizes, times, strict=True):
            measured = (max(times) if waits else time) * max(generator.gauss(1, noise), 0.3)
            fit.observe(sizes if waits else [size], 1e-4 * measured)
    return sums[1] / sums[0], sums[2] / sums[0], fits


@pytest.mark.parametrize("waits", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("off", [0.5, 1, 8])
def test_exact_times_give_the_exact_cost_and_noisy_ones_make_no_step_slower(off: float, waits: bool) -> None:
    by_expected, by_fitted, fits = train(off, 0, waits=waits)
    for fit in fits:
        assert fit.per_token_squared == pytest.approx(off * EXPECTED, rel=0.05)
    assert by_fitted <= 1.005 and (off == 1 or by_expected > 1.01)
    by_expected, by_fitted, _ = train(off, 0.2, waits=waits)
    assert by_fitted <= max(1.02, 1 + 0.6 * (by_expected - 1))


def test_samples_too_short_to_tell_leave_the_cost_about_as_expected() -> None:
    generator, fit = random.Random(0), AttentionCost(EXPECTED)
    for _ in range(300):
        size = size_of_part([generator.randint(10, 30) for _ in range(generator.randint(20, 60))], pads=False)
        fit.observe([size], (300 + size[0]) * max(generator.gauss(1, 0.2), 0.3))
    assert 1 / 3 < fit.per_token_squared / EXPECTED < 3


def test_forwards_that_wait_for_something_else_are_noise() -> None:
    generator, fit = random.Random(0), AttentionCost(EXPECTED)
    for number, lengths in enumerate(draws(generator, 300)):
        time = SampleCost(300.0, 1.0, 3 * EXPECTED).of_part(lengths[0])
        fit.observe([size_of_part(lengths[0], pads=False)], 20 * time if number % 16 == 5 else time)
    assert fit.per_token_squared == pytest.approx(3 * EXPECTED, rel=0.25)


def test_padding_counts() -> None:
    assert size_of_part([5, 2], pads=True) == (10, 50)
    assert size_of_part([5, 2], pads=False) == (7, 29)
    assert size_of_part([], pads=True) == (0, 0)
