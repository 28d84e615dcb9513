"""The largest batch size that fits, found by dry runs. Pure."""

from __future__ import annotations

from collections.abc import Callable

MOST = 8192
"""Largest size that is tried."""


def largest_that_fits(fits: Callable[[int], bool], most: int = MOST) -> int:
    """Return the largest size that fits, up to ``most``, or 0 if not even 1 does.

    Sizes double from 1 until one does not fit; between that and the last one that did, each further size halves what is
    left. ``fits`` is asked about a size once, and the answer has been asked about.
    """
    low, high = 0, most + 1  # fits, and does not
    size = 1
    while low + 1 < high:
        if fits(size):
            low = size
        else:
            high = size
        size = min(2 * size, most) if high > most else (low + high) // 2
    return low
