"""The gradient noise scale: how large a batch has to be for its gradient to be more signal than noise.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv:1812.06162), appendix A.1, for samples of
unequal weight: each is weighted by its target tokens.

Below, ``s_i`` is the gradient of the summed loss of a group of samples with ``n_i`` target tokens. All groups are drawn
at random in the same way, and targets are assumed independent, even within a sample. Then
``E|s_i|^2 = n_i^2 |G|^2 + n_i S``, where G is the true mean gradient and S the trace of the covariance of a token's
gradient. The same holds for all groups together, with ``N``, the sum of ``n_i``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIN_MEASUREMENTS = 5


@dataclass(frozen=True)
class NoiseEstimate:
    """Estimates from one optimizer step. They are unbiased but noisy, and can be negative."""

    variance: float  # of S
    norm_squared: float  # of |G|^2
    tokens: float  # N, the target tokens of the step
    samples: int  # of the step, on all devices

    @classmethod
    def of_groups(cls, groups: int, small: float, big: float, tokens: float, samples: int) -> NoiseEstimate:
        """Estimate from 2 groups or more: ``small`` is ``sum(|s_i|^2 / n_i) / N``, ``big`` ``|sum(s_i)|^2 / N^2``."""
        variance = tokens * (small - big) / (groups - 1)
        return cls(variance, (groups * big - small) / (groups - 1), tokens, samples)

    @classmethod
    def of_part(cls, part: float, part_tokens: float, big: float, tokens: float, samples: int) -> NoiseEstimate:
        """Estimate from one group of ``0 < n_1 < N``: less certain. ``part`` is ``|s_1|^2 / n_1^2``."""
        variance = (part - big) / (1 / part_tokens - 1 / tokens)
        return cls(variance, (tokens * big - part_tokens * part) / (tokens - part_tokens), tokens, samples)


class NoiseScale:
    """Exponential moving averages of the estimates, over ``window`` measurements, and their ratio, the noise scale.

    Numerator and denominator are averaged separately, because the mean of a ratio would be far too high.
    """

    def __init__(self, window: float = 20) -> None:
        self._keep = 1 - 1 / max(window, 1)
        self._count = 0
        self._means = {"variance": 0.0, "norm_squared": 0.0, "tokens": 0.0, "samples": 0.0}

    def add(self, step: NoiseEstimate) -> None:
        self._count += 1
        for name, mean in self._means.items():
            self._means[name] = self._keep * mean + (1 - self._keep) * getattr(step, name)

    @property
    def tokens(self) -> float | None:
        """Noise scale in target tokens; None if not known yet. Averages start at 0: their bias cancels in the ratio."""
        if self._count < MIN_MEASUREMENTS or self._means["norm_squared"] <= 0:
            return None
        return max(self._means["variance"], 0.0) / self._means["norm_squared"]

    @property
    def samples(self) -> float | None:
        """Noise scale in samples of mean length; None if not known yet."""
        return None if self.tokens is None else self.tokens * self._means["samples"] / self._means["tokens"]

    def state_dict(self) -> dict[str, float]:
        return {"count": self._count, **self._means}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._count = int(state["count"])
        self._means = {name: state[name] for name in self._means}
