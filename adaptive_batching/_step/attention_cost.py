"""Cost of attention on a device, fitted to the times of its forward passes. Pure: it sees sizes and seconds alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

Size = tuple[int, int]  # of a part: its tokens, and the sum over samples of their squares

_KEPT = 256  # measurements
_TO_FIT = 16  # measurements from one fit to the next
_STEP = math.log(2) / 8  # between values that are tried
_MOST_STEPS = 40  # away from what is expected: a factor of 32
_EXPECTED = math.log(2)  # a factor by which a device is not unlikely to be off
_LEAST_NOISE = 0.01  # share of a forward's time that measurements are off by at least


def size_of_part(lengths: Sequence[int], *, pads: bool) -> Size:
    """Return the size of samples of these lengths, end to end or padded."""
    if pads and lengths:
        lengths = [max(lengths)] * len(lengths)
    return sum(lengths), sum(length * length for length in lengths)


class AttentionCost:
    """Time per token squared, in that of a token, fitted to forwards and backwards of a device.

    A forward takes ``fixed + per_token * (tokens + cost * squares)``. For each cost, least squares of relative errors
    give the other two, and the errors that are left say how likely it is: in proportion to ``left ** (-n / 2)``, for
    ``n`` measurements with noise of unknown size. That counts against what is expected, from which a factor of two is
    one standard deviation. So the cost stays about there while times are noisy or samples short, and moves where they
    clearly say so. A forward that waited for something else weighs no more than others.
    """

    def __init__(self, expected: float) -> None:
        self._expected, self._steps, self._num_new = expected, 0, 0
        self._recent: deque[tuple[list[Size], float]] = deque(maxlen=_KEPT)

    @property
    def per_token_squared(self) -> float:
        return self._at(self._steps)

    def observe(self, sizes: Sequence[Size], seconds: float) -> None:
        """Take in the time of a forward and backward: of one part, or of the slowest of several at the same time."""
        if seconds <= 0:  # of a clock that is too coarse
            return
        self._recent.append((_not_less_than_others(sizes), seconds))
        self._num_new += 1
        if self._num_new == _TO_FIT:
            self._num_new = 0
            self._fit()

    def _fit(self) -> None:
        least = self._unlikeliness(self._steps)
        while True:
            near = [steps for steps in (self._steps - 1, self._steps + 1) if abs(steps) <= _MOST_STEPS]
            value, steps = min((self._unlikeliness(steps), steps) for steps in near)
            if value >= least:
                return
            least, self._steps = value, steps

    def _at(self, steps: int) -> float:
        return self._expected * math.exp(_STEP * steps)

    def _unlikeliness(self, steps: int) -> float:
        """Return minus twice the logarithm of how likely a cost is, up to a constant."""
        left = self._errors_left(self._at(steps)) + _LEAST_NOISE**2
        return len(self._recent) * math.log(left) + (_STEP * steps / _EXPECTED) ** 2

    def _errors_left(self, cost: float) -> float:
        """Return the mean square of relative errors, with the best time of a forward and of a token."""
        rows = [
            (1 / seconds, max(tokens + cost * squares for tokens, squares in sizes) / seconds)
            for sizes, seconds in self._recent
        ]
        # The normal equations of fixed * a + per_token * b = 1
        aa, ab, bb = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
        sum_a, sum_b = sum(a for a, _ in rows), sum(b for _, b in rows)
        determinant = aa * bb - ab * ab
        fixed = (sum_a * bb - sum_b * ab) / determinant if determinant > 1e-9 * aa * bb else 0.0
        fixed = max(fixed, 0.0)
        per_token = (sum_b - fixed * ab) / bb
        return sum((1 - fixed * a - per_token * b) ** 2 for a, b in rows) / len(rows)


def _not_less_than_others(sizes: Sequence[Size]) -> list[Size]:
    """Return those sizes of which no other has as many tokens and as large squares: one of them takes longest."""
    largest: list[Size] = []
    for size in sorted(sizes, reverse=True):
        if not largest or size[1] > largest[-1][1]:
            largest.append(size)
    return largest
