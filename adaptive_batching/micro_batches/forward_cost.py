"""The time that a forward and backward takes, fitted to measurements."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

# Of those older than that, less than 2 % would be left.
_MEASUREMENTS_KEPT = 200

# A forward that took this many times as long as it need have has waited for something else.
_OUTLIER = 4.0


class ForwardCost:
    """What a forward and backward takes: a fixed time, and a time for each padded token, fitted to what was measured.

    A least-squares line through (padded tokens, seconds), older measurements counting less. Measurements that paid for
    something else, such as compiling, are left out: those that took several times as long as another one shows to be
    possible, at no fewer tokens or at the same time for each of them.

    Args:
        decay: Weight that a measurement keeps with each new one.
        warm_up: First measurements to pass over; they pay for what is set up once.
    """

    def __init__(self, decay: float = 0.98, warm_up: int = 3) -> None:
        self._decay = decay
        self._to_skip = warm_up
        self._recent: deque[tuple[int, float]] = deque(maxlen=_MEASUREMENTS_KEPT)  # (padded tokens, seconds)

    def observe(self, tokens: int, seconds: float) -> None:
        """A micro-batch of ``tokens`` padded tokens took ``seconds``."""
        if self._to_skip > 0:
            self._to_skip -= 1
            return
        self._recent.append((tokens, seconds))

    def line(self) -> tuple[float, float] | None:
        """Seconds of a forward whatever its size, and seconds of a padded token; None while unknown."""
        if len(self._recent) < 2:
            return None
        tokens, seconds = np.array(self._recent, dtype=np.float64).T
        weights = self._decay ** np.arange(len(tokens) - 1, -1, -1)
        # The time of each measurement as every other one bounds it: [measurement, other]
        bounds = seconds[None, :] * np.maximum(tokens[:, None] / np.maximum(tokens[None, :], 1), 1)
        usual = seconds <= _OUTLIER * bounds.min(axis=1)
        weights, tokens, seconds = weights[usual], tokens[usual], seconds[usual]
        mean_tokens, mean_seconds = np.average(tokens, weights=weights), np.average(seconds, weights=weights)
        spread = np.average((tokens - mean_tokens) ** 2, weights=weights)
        if len(tokens) < 2 or spread <= 1e-6 * mean_tokens**2:  # all of one size: no slope to be seen
            return None
        covariance = np.average((tokens - mean_tokens) * (seconds - mean_seconds), weights=weights)
        per_token = float(covariance / spread)
        return (max(float(mean_seconds - per_token * mean_tokens), 0.0), per_token) if per_token > 0 else None

    def in_tokens(self, default: float) -> float:
        """The fixed time of a forward, in the number of tokens that take as long; ``default`` while unknown."""
        line = self.line()
        return default if line is None else line[0] / line[1]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is to hold."""
        return {"to_skip": self._to_skip, "recent": [list(measurement) for measurement in self._recent]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._to_skip = state["to_skip"]
        self._recent.extend((tokens, seconds) for tokens, seconds in state["recent"])
