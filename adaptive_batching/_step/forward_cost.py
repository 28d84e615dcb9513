"""Time of a forward and backward, fitted to measurements."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

# Share of a step's time that is not worth a larger forward; share of a forward's time that a measurement can be off by;
# rise of the time from one sample to two from which on a device is taken to be filled.
_GAIN = 0.02
_UNCERTAINTY = 0.1
_FILLED = 1.5
# Forwards and backwards of a search for the largest size: three steps, each with those of two parts.
_OF_A_SEARCH = 6
_MEASUREMENTS_KEPT = 200  # the weight of older ones would be less than 2 %
_OUTLIER = 4.0  # a forward that took this many times as long as necessary was waiting for something else


class ForwardCost:
    """Time of a forward and backward: a fixed part and a part per padded token, fitted to measurements.

    The fit is a least-squares line through (padded tokens, seconds), in which each measurement multiplies the weight of
    those before it by ``decay``. The first ``warm_up`` ones, which include one-time setup, are left out, as are those
    that include something else, such as compiling: another one shows that a fraction of the time was enough, either for
    at least as many tokens or at the same time per token.
    """

    def __init__(self, decay: float = 0.98, warm_up: int = 3) -> None:
        self._decay = decay
        self._to_skip = warm_up
        self._recent: deque[tuple[int, float]] = deque(maxlen=_MEASUREMENTS_KEPT)  # (padded tokens, seconds)

    def observe(self, tokens: int, seconds: float) -> None:
        if self._to_skip > 0:
            self._to_skip -= 1
            return
        self._recent.append((tokens, seconds))

    def line(self) -> tuple[float, float] | None:
        """Return the fixed seconds of a forward and the seconds per padded token, or None if not known yet.

        Where larger forwards took no longer, as those that a device computes faster than they are launched, a token
        takes nothing.
        """
        if len(self._recent) < 2:
            return None
        tokens, seconds = np.array(self._recent, dtype=np.float64).T
        weights = self._decay ** np.arange(len(tokens) - 1, -1, -1)
        # Upper bounds on the time of each measurement, one from every other: [measurement, other]
        bounds = seconds[None, :] * np.maximum(tokens[:, None] / np.maximum(tokens[None, :], 1), 1)
        usual = seconds <= _OUTLIER * bounds.min(axis=1)
        weights, tokens, seconds = weights[usual], tokens[usual], seconds[usual]
        mean_tokens, mean_seconds = np.average(tokens, weights=weights), np.average(seconds, weights=weights)
        spread = np.average((tokens - mean_tokens) ** 2, weights=weights)
        if len(tokens) < 2 or spread <= 1e-6 * mean_tokens**2:  # all of one size: the slope cannot be fitted
            return None
        covariance = np.average((tokens - mean_tokens) * (seconds - mean_seconds), weights=weights)
        per_token = float(covariance / spread)
        if per_token <= 0:
            return float(mean_seconds), 0.0
        return max(float(mean_seconds - per_token * mean_tokens), 0.0), per_token

    def in_tokens(self, default: float) -> float:
        """Return the fixed time of a forward as the number of tokens that take as long; ``default`` if not known.

        It is infinite if tokens take nothing.
        """
        if (line := self.line()) is None:
            return default
        fixed, per_token = line
        return fixed / per_token if per_token else math.inf

    def state_dict(self) -> dict[str, Any]:
        return {"to_skip": self._to_skip, "recent": [list(measurement) for measurement in self._recent]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._to_skip = state["to_skip"]
        self._recent.extend((tokens, seconds) for tokens, seconds in state["recent"])


class ForwardTimes:
    """Seconds of forwards and backwards by their number of samples, and what they say of larger ones."""

    def __init__(self, samples_left: float | None = None) -> None:
        self.samples_left = samples_left
        """Samples that the run has left on a device, in such as are measured; None if that is not known."""

        self._seconds: dict[int, float] = {}

    def note(self, samples: int, seconds: float) -> None:
        """Take a measurement in; of several at one size the fastest counts."""
        self._seconds[samples] = min(seconds, self._seconds.get(samples, seconds))

    def enough(self) -> int | None:
        """Return the samples from which on larger forwards gain less than ``_GAIN``; None if that cannot be told."""
        if (line := self._line()) is None:
            return None
        fixed, per_sample = line
        enough = max(math.ceil(fixed / (_GAIN * per_sample)), max(self._seconds))
        log.info(
            "a forward and backward takes about %.0f ms plus %.0f ms per sample: more than %d samples would gain less "
            "than %.0f %%", 1000 * fixed, 1000 * per_sample, enough, 100 * _GAIN
        )  # fmt: skip
        return enough

    def is_worth(self, small: int, large: int) -> bool:
        """Return False if a search for up to ``large`` samples costs more than the run gains by them over ``small``."""
        line = self._line()
        if line is None or self.samples_left is None:
            return True
        fixed, per_sample = line
        cost = _OF_A_SEARCH * (fixed + large * per_sample)
        gain = self.samples_left * fixed * (1 / small - 1 / large)
        if cost > gain:
            log.info(
                "forwards of up to %d samples will do: trials of larger ones would take about %.0f s, and gain %.0f s "
                "in the rest of the run at the most", small, cost, gain
            )  # fmt: skip
        return cost <= gain

    def in_samples(self) -> float | None:
        """Return the fixed time of a forward as the number of samples that take as long; None if it cannot be told."""
        line = self._line()
        return None if line is None else line[0] / line[1]

    def _line(self) -> tuple[float, float] | None:
        """Return the fixed seconds of a forward and the seconds per sample; None if a device has room for more."""
        if len(self._seconds) < 2:
            return None
        (few, less), *_, (more, longer) = sorted(self._seconds.items())
        if longer < _FILLED * less:  # the device has room to compute more at once
            return None
        per_sample = (longer - less) / (more - few)
        return max(less - few * per_sample, 0.0) + _UNCERTAINTY * less, per_sample
