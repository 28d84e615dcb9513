from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from adaptive_batching._growth.noise_scale import MIN_MEASUREMENTS, NoiseEstimate, NoiseScale


def estimate_of(rng: np.random.Generator, mean: Any, deviation: Any, tokens: list[int], *, part: bool) -> NoiseEstimate:
    """Estimate from the summed gradients of groups of these numbers of tokens, drawn independently."""
    sums = [(mean + deviation * rng.standard_normal((n, len(mean)))).sum(0) for n in tokens]
    total, whole = sum(tokens), np.sum(sums, axis=0)
    squares, big = [float(s @ s) for s in sums], float(whole @ whole) / total**2
    if part:
        return NoiseEstimate.of_part(squares[0] / tokens[0] ** 2, tokens[0], big, total, len(tokens))
    small = sum(square / n for square, n in zip(squares, tokens, strict=True)) / total
    return NoiseEstimate.of_groups(len(tokens), small, big, total, len(tokens))


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("tokens", [[50, 50], [10, 90, 40], [3, 200, 50, 7, 90]], ids=str)
def test_estimates_are_right_on_average_however_unequal_the_groups_in_tokens_and_in_samples(
    tokens: list[int], part: bool
) -> None:
    rng = np.random.default_rng(0)
    mean, deviation = rng.standard_normal(40) * 0.2, rng.uniform(0.5, 1.5, 40)
    shown = [estimate_of(rng, mean, deviation, tokens, part=part) for _ in range(4000)]
    variance, norm_squared = float(deviation @ deviation), float(mean @ mean)
    assert np.mean([each.variance for each in shown]) == pytest.approx(variance, rel=0.03)
    assert np.mean([each.norm_squared for each in shown]) == pytest.approx(norm_squared, rel=0.05)
    scale = NoiseScale(window=1000)
    for number, each in enumerate(shown):
        assert number >= MIN_MEASUREMENTS or scale.tokens is None
        scale.add(each)
        if number == 2000:
            before, scale = scale, NoiseScale(window=1000)
            scale.load_state_dict(before.state_dict())
    assert scale.tokens == pytest.approx(variance / norm_squared, rel=0.1)
    assert scale.tokens is not None
    assert scale.samples == pytest.approx(scale.tokens * len(tokens) / sum(tokens))


def test_it_is_not_known_while_noise_hides_the_gradient() -> None:
    scale = NoiseScale(window=10)
    for _ in range(10):
        scale.add(NoiseEstimate.of_groups(2, small=10.0, big=1.0, tokens=100, samples=8))  # |G|^2 = -8
    assert scale.tokens is None and scale.samples is None
