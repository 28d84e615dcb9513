from __future__ import annotations

import numpy as np
import pytest

from adaptive_batching.noise_scale import MIN_MEASUREMENTS, GradientNorms, NoiseScale


def measure(rng: np.random.Generator, mean: np.ndarray, deviation: np.ndarray, tokens: list[int]) -> GradientNorms:
    """The norms of a step whose groups have these numbers of tokens, each with a gradient drawn independently."""
    sums = [(mean + deviation * rng.standard_normal((n, len(mean)))).sum(0) for n in tokens]  # [dimensions] each
    total = sum(tokens)
    return GradientNorms(
        groups=len(tokens),
        small=sum(float(s @ s) / n for s, n in zip(sums, tokens, strict=True)) / total,
        big=float(sum(sums) @ sum(sums)) / total**2,
        tokens=total,
        samples=len(tokens),
    )


@pytest.mark.parametrize("tokens", [[50, 50], [10, 90, 40], [3, 200, 50, 7, 90]], ids=str)
def test_the_estimates_are_right_on_average_however_unequal_the_groups(tokens: list[int]) -> None:
    rng = np.random.default_rng(0)
    mean, deviation = rng.standard_normal(40) * 0.2, rng.uniform(0.5, 1.5, 40)
    norms = [measure(rng, mean, deviation, tokens) for _ in range(4000)]
    assert np.mean([n.variance for n in norms]) == pytest.approx(float(deviation @ deviation), rel=0.02)
    assert np.mean([n.norm_squared for n in norms]) == pytest.approx(float(mean @ mean), rel=0.05)


def test_the_noise_scale_comes_out_in_tokens_and_in_samples_and_survives_a_checkpoint() -> None:
    rng = np.random.default_rng(1)
    mean, deviation = rng.standard_normal(40) * 0.2, rng.uniform(0.5, 1.5, 40)
    truth = float(deviation @ deviation) / float(mean @ mean)
    scale = NoiseScale(window=1000)
    for i in range(3000):
        assert i >= MIN_MEASUREMENTS or scale.tokens is None
        scale.add(measure(rng, mean, deviation, [10, 90, 40]))
        if i == 1500:
            restored = NoiseScale(window=1000)
            restored.load_state_dict(scale.state_dict())
            scale = restored
    assert scale.tokens == pytest.approx(truth, rel=0.1)
    assert scale.samples == pytest.approx(scale.tokens * 3 / 140)


def test_it_is_not_known_while_noise_hides_the_gradient() -> None:
    scale = NoiseScale(window=10)
    for _ in range(10):
        scale.add(GradientNorms(groups=2, small=10.0, big=1.0, tokens=100, samples=8))  # |G|^2 = -8
    assert scale.tokens is None and scale.samples is None
