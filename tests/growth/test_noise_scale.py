from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from adaptive_batching._growth.noise_scale import MIN_MEASUREMENTS, NoiseEstimate, NoiseScale


def gradients(rng: np.random.Generator, mean: np.ndarray, deviation: np.ndarray, tokens: list[int]) -> list[np.ndarray]:
    """The summed gradients, [dimensions] each, of groups of these numbers of tokens, drawn independently."""
    return [(mean + deviation * rng.standard_normal((n, len(mean)))).sum(0) for n in tokens]


def of_groups(sums: list[np.ndarray], tokens: list[int]) -> NoiseEstimate:
    total, whole = sum(tokens), np.sum(sums, axis=0)
    small = sum(float(s @ s) / n for s, n in zip(sums, tokens, strict=True)) / total
    return NoiseEstimate.of_groups(len(tokens), small, float(whole @ whole) / total**2, total, len(tokens))


def of_part(sums: list[np.ndarray], tokens: list[int]) -> NoiseEstimate:
    total, whole, part = sum(tokens), np.sum(sums, axis=0), float(sums[0] @ sums[0]) / tokens[0] ** 2
    return NoiseEstimate.of_part(part, tokens[0], float(whole @ whole) / total**2, total, len(tokens))


@pytest.mark.parametrize("estimate", [of_groups, of_part])
@pytest.mark.parametrize("tokens", [[50, 50], [10, 90, 40], [3, 200, 50, 7, 90]], ids=str)
def test_the_estimates_are_right_on_average_however_unequal_the_groups(
    tokens: list[int], estimate: Callable[[list[np.ndarray], list[int]], NoiseEstimate]
) -> None:
    rng = np.random.default_rng(0)
    mean, deviation = rng.standard_normal(40) * 0.2, rng.uniform(0.5, 1.5, 40)
    shown = [estimate(gradients(rng, mean, deviation, tokens), tokens) for _ in range(4000)]
    assert np.mean([each.variance for each in shown]) == pytest.approx(float(deviation @ deviation), rel=0.03)
    assert np.mean([each.norm_squared for each in shown]) == pytest.approx(float(mean @ mean), rel=0.05)


def test_the_noise_scale_comes_out_in_tokens_and_in_samples_and_survives_a_checkpoint() -> None:
    rng = np.random.default_rng(1)
    mean, deviation = rng.standard_normal(40) * 0.2, rng.uniform(0.5, 1.5, 40)
    truth = float(deviation @ deviation) / float(mean @ mean)
    scale = NoiseScale(window=1000)
    for i in range(3000):
        assert i >= MIN_MEASUREMENTS or scale.tokens is None
        scale.add(of_groups(gradients(rng, mean, deviation, [10, 90, 40]), [10, 90, 40]))
        if i == 1500:
            restored = NoiseScale(window=1000)
            restored.load_state_dict(scale.state_dict())
            scale = restored
    assert scale.tokens == pytest.approx(truth, rel=0.1)
    assert scale.tokens is not None
    assert scale.samples == pytest.approx(scale.tokens * 3 / 140)


def test_it_is_not_known_while_noise_hides_the_gradient() -> None:
    scale = NoiseScale(window=10)
    for _ in range(10):
        scale.add(NoiseEstimate.of_groups(2, small=10.0, big=1.0, tokens=100, samples=8))  # |G|^2 = -8
    assert scale.tokens is None and scale.samples is None
