"""Times of forwards and backwards in a probe, and what they say of larger ones."""

from __future__ import annotations

import logging
import math

log = logging.getLogger(__name__)

# Share of a step's time that is not worth a larger forward; share of a forward's time that a measurement can be off by;
# rise of the time from one sample to two from which on a device is taken to be filled.
_GAIN = 0.02
_UNCERTAINTY = 0.1
_FILLED = 1.5
# Forwards and backwards of a search for the largest size: three steps, each with those of two parts.
_OF_A_SEARCH = 6


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
            "a forward and backward pass takes about %.0f ms plus %.0f ms per sample: more than %d samples would gain "
            "less than %.0f %%", 1000 * fixed, 1000 * per_sample, enough, 100 * _GAIN
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
                "forward passes of up to %d samples suffice: to try larger ones would take about %.0f s, and gain at "
                "most %.0f s in the rest of the run", small, cost, gain
            )  # fmt: skip
        return cost <= gain

    def _line(self) -> tuple[float, float] | None:
        """Return the fixed seconds of a forward and the seconds per sample; None if a device has room for more."""
        if len(self._seconds) < 2:
            return None
        (few, less), *_, (more, longer) = sorted(self._seconds.items())
        if longer < _FILLED * less:  # the device has room to compute more at once
            return None
        per_sample = (longer - less) / (more - few)
        return max(less - few * per_sample, 0.0) + _UNCERTAINTY * less, per_sample
