"""The gradient noise scale: how large a batch has to be for its gradient to be more signal than noise.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv:1812.06162), appendix A.1, with groups of
samples that need not be equal: each is weighted by its target tokens. Plain Python, for numbers measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIN_MEASUREMENTS = 5


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of the gradients in one optimizer step, whose samples were cut into groups at random.

    A group is what one device ran in one forward and backward: ``n_i`` target tokens, with the gradient ``s_i`` of
    their summed loss; ``N`` is the sum of ``n_i``.
    """

    groups: int
    """How many groups there are; at least 2."""

    small: float
    """``sum(|s_i|^2 / n_i) / N``."""

    big: float
    """``|sum(s_i)|^2 / N^2``: the squared norm of the step's mean gradient, before clipping."""

    tokens: float
    """``N``."""

    samples: int
    """Of the step, on all devices."""

    @property
    def norm_squared(self) -> float:
        """Unbiased estimate of the true mean gradient's squared norm."""
        return (self.groups * self.big - self.small) / (self.groups - 1)

    @property
    def variance(self) -> float:
        """Unbiased estimate of the trace of a token's gradient covariance."""
        return self.tokens * (self.small - self.big) / (self.groups - 1)


class NoiseScale:
    """Exponential moving averages of what steps have shown, and the ratio that is the noise scale.

    Numerator and denominator are averaged separately: the mean of a ratio would be far too high.

    Args:
        window: Measurements over which to average.
    """

    def __init__(self, window: float = 20) -> None:
        self._keep = 1 - 1 / max(window, 1)
        self._count = 0
        self._variance = 0.0
        self._norm_squared = 0.0
        self._tokens = 0.0
        self._samples = 0.0

    def add(self, norms: GradientNorms) -> None:
        """Take a measurement in."""
        keep, new = self._keep, 1 - self._keep
        self._count += 1
        self._variance = keep * self._variance + new * norms.variance
        self._norm_squared = keep * self._norm_squared + new * norms.norm_squared
        self._tokens = keep * self._tokens + new * norms.tokens
        self._samples = keep * self._samples + new * norms.samples

    @property
    def tokens(self) -> float | None:
        """The noise scale in target tokens; None until it is known.

        All averages start at 0, so that their bias cancels in the ratio.
        """
        if self._count < MIN_MEASUREMENTS or self._norm_squared <= 0:
            return None
        return max(self._variance, 0.0) / self._norm_squared

    @property
    def samples(self) -> float | None:
        """The noise scale in samples of the mean length; None until it is known."""
        return None if self.tokens is None else self.tokens * self._samples / self._tokens

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint is to hold."""
        return {
            "count": self._count,
            "variance": self._variance,
            "norm_squared": self._norm_squared,
            "tokens": self._tokens,
            "samples": self._samples,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._count = int(state["count"])
        self._variance, self._norm_squared = state["variance"], state["norm_squared"]
        self._tokens, self._samples = state["tokens"], state["samples"]
