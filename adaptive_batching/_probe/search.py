"""Search for the largest batch size that fits: decisions over real training steps, independent of torch.

A step's peak above what rests between steps is the largest of several amounts, one for each moment of the step. Each is
a constant that is not negative, and a number of bytes for every sample. So sizes that have run bound all others:

- From above: ``k`` times the samples take at most ``k`` times the rise. What fits by this bound fits for certain.
- From below: a line through two sizes, extended. What it puts above the budget does not fit, and never runs.

The search runs one sample and two, and follows the line through the two largest sizes that fitted, at most
:data:`LEAP` times as far as the last of them unless three lie on one line or the bound from above allows more. Where
the curve bends upwards beyond what has run, a step can still run out of memory. A size that did not run is never the
answer.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from adaptive_batching._probe.sizes import Measurement

LEAP = 4
"""Times the largest size that fitted, up to which the line through it and another is believed."""

WORTH = 0.02
"""Share of a size by which another must be larger to be worth a step."""

BY_FAR = 0.8
"""Share of the budget up to which a size may be used by the bound from above alone, without a run."""


@dataclass(frozen=True)
class Line:
    """A line through the peaks of two sizes."""

    other_size: int
    size: int
    peak_bytes: float  # at that size
    slope: float  # bytes for each sample
    doubt: float  # by which noise may have changed the slope

    def at(self, size: float) -> float:
        return self.peak_bytes + (size - self.size) * self.slope

    def reach(self, budget_bytes: float) -> float:
        """Return the largest size, maybe a fraction, that the line puts within the budget; infinite if it is flat."""
        return self.size + (budget_bytes - self.peak_bytes) / self.slope if self.slope > 0 else math.inf


class SizeSearch:
    """The candidates of a search, what has run of them, and what that says of the others.

    Args:
        measure: Batch size -> a step at that size, on memory that nothing has used before.
        candidates: Sizes to choose from, ascending.
        budget_bytes: Bytes that a step may take.
        resting_bytes: Bytes in use between steps.
        repeat: Batch size -> several steps as training begins with them.
        noise: Share by which the rises of equal steps may differ.
        tells_up_to: Share of the budget up to which one step tells that training goes on at a size.
    """

    def __init__(
        self,
        measure: Callable[[int], Measurement],
        candidates: Sequence[int],
        budget_bytes: float,
        resting_bytes: float,
        repeat: Callable[[int], Measurement],
        noise: float,
        tells_up_to: float,
    ) -> None:
        assert candidates and list(candidates) == sorted(set(candidates)) and candidates[0] >= 1, candidates
        self.candidates, self.budget_bytes, self.resting_bytes = candidates, budget_bytes, resting_bytes
        self._measure, self._repeat, self._noise, self._tells_up_to = measure, repeat, noise, tells_up_to
        self.measurements: list[Measurement] = []
        self.low = -1  # index of the largest candidate that fitted; -1 if none has yet
        self.high = len(candidates)  # index of the smallest that did not; one past the end if none has failed yet
        self._misses = 0  # sizes that fitted in one step, and not in several

    @property
    def is_open(self) -> bool:
        """True if a candidate that has not run could still be the answer."""
        return self.high - self.low > 1

    @property
    def largest(self) -> int | None:
        """Largest batch size that ran and fitted, or None if no candidate has."""
        return self.candidates[self.low] if self.low >= 0 else None

    def run(self, index: int) -> bool:
        """Run a candidate within the bracket; return True if it fitted.

        One that should have fitted for certain, or without which the search would end, runs once more before that is
        believed: a step can be disturbed so that it takes more, and not so that it takes less.
        """
        assert self.low < index < self.high, (self.low, index, self.high)
        size = self.candidates[index]
        measured = self._run_once(size)
        if not measured.fits and (index == 0 or self.at_most(size) <= self.budget_bytes):
            measured = self._run_once(size)
        if measured.fits:
            self.low = index
        else:
            self.high = index
        return measured.fits

    def _run_once(self, size: int) -> Measurement:
        measured = self._repeat(size) if self._misses else self._measure(size)
        self.measurements.append(measured)
        if measured.fits and measured.retries and not self._misses:
            measured = self._repeat(size)  # the allocator had to start over, and training may have to in each step
            self.measurements.append(measured)
        self._misses += self._misses > 0 and not measured.fits
        return measured

    def confirm(self) -> bool:
        """Run the answer as training begins with it, unless one step tells all; False if it does not fit then."""
        size = self.candidates[self.low]
        ran = [m for m in self.measurements if m.batch_size == size and m.fits][-1]
        if ran.steps > 1 or (ran.peak_bytes or 0) <= self._tells_up_to * self.budget_bytes:
            return True
        measured = self._repeat(size)
        self.measurements.append(measured)
        if measured.fits:
            return True
        self._misses += 1
        fitted = {m.batch_size for m in self.measurements if m.fits}
        self.high, self.low = self.low, max((i for i in range(self.low) if self.candidates[i] in fitted), default=-1)
        return False

    def at_most(self, size: int) -> float:
        """Return a bound from above on the peak at ``size`` in bytes, by the largest size that ran."""
        if not (points := self._points()):
            return math.inf
        return self.resting_bytes + self._most_of_sample(points) * max(size, points[-1][0])

    def fits_by_far(self) -> int:
        """Return the index of the largest candidate that fits by far, by the bound from above; -1 if none is known."""
        end = bisect_right(self.candidates, BY_FAR * self.budget_bytes, hi=self.high, key=self.at_most)
        return end - 1 if self._points() else -1

    def cap(self, largest: int) -> None:
        """Drop the candidates above the first one of at least ``largest``, other than those that have run."""
        end = max(bisect_left(self.candidates, largest), self.low) + 1
        self.candidates, self.high = self.candidates[:end], min(self.high, end)

    def line(self) -> Line | None:
        """Return the line that tells of sizes beyond the largest that fitted; None if it is not known.

        It is through two sizes that fitted, or the largest that did and a larger one that ran all the same.
        """
        points = self._points()
        if points and (above := self._above()) is not None:
            return self._through(points[-1], above)
        return self._line_up_to(points)

    def goal(self) -> int | None:
        """Return the index of the candidate to run next; None if the largest that fitted is the answer."""
        low, high, candidates = self.low, self.high, self.candidates
        if not self.is_open:
            return None
        if low < 0:
            return 0 if not self._misses else max(high - 2 ** (self._misses - 1), 0)
        b, line, has_failed = candidates[low], self.line(), high < len(candidates)
        reach = math.inf if line is None else line.reach(self.budget_bytes)
        most = bisect_right(candidates, self._allowed(), low + 1, high) - 1  # index of the largest that can fit
        if most == low or (has_failed and candidates[most] <= (1 + WORTH) * b):
            return None
        if self._misses:  # what trains lies just below what fitted in one step
            has_trained = any(m.batch_size == b and m.fits and m.steps > 1 for m in self.measurements)
            return (low + high) // 2 if has_trained else max(min(most, high - 2 ** (self._misses - 1)), low + 1)
        if has_failed and self._above() is not None:
            goal = reach  # between two sizes that ran, the line is a bound from above
        else:
            goal = max(min(self._expected(), reach), self._surely())
            if has_failed and reach >= candidates[high]:  # the line did not tell: the curve bends upwards
                goal = min(goal, math.sqrt(b * candidates[high]))
        index = bisect_right(candidates, goal, low + 1, high) - 1
        if index == low or candidates[index] <= (1 + WORTH) * b:  # too little to be worth a step
            likely = bisect_right(candidates, min(reach, LEAP * b), low + 1, most + 1) - 1
            index = (low + most + 1) // 2 if has_failed else max(likely, low + 1)
        return index if candidates[index] > (1 + WORTH) * b else None

    def _points(self, *, in_use: bool = False) -> list[tuple[int, int]]:
        """(batch size, peak bytes) of the sizes that fitted, ascending, other than those that the limit held down."""
        points: dict[int, int] = {}
        for m in self.measurements:
            if m.fits and not m.retries:  # of several steps at a size, the one that took most
                peak = (m.in_use_bytes if in_use else m.peak_bytes) or 0
                points[m.batch_size] = max(points.get(m.batch_size, 0), peak)
        return sorted(points.items())

    def _through(self, first: tuple[int, int], second: tuple[int, int]) -> Line:
        (b0, peak0), (b, peak) = first, second
        doubt = 2 * self._noise * (peak - self.resting_bytes) / (b - b0)
        return Line(b0, b, peak, (peak - peak0) / (b - b0), doubt)

    def _line_up_to(self, points: list[tuple[int, int]]) -> Line | None:
        """Return the line through the last point and the nearest one that noise cannot have raised or lowered to it."""
        line = None  # that through the farthest point, if none will do
        for point in reversed(points[:-1]):
            line = self._through(point, points[-1])
            if line.slope > 4 * line.doubt:
                break
        return line

    def _above(self) -> tuple[int, int] | None:
        """(batch size, peak bytes) of the smallest size beyond those that fitted which took more than the budget."""
        above, points = list[tuple[int, int]](), self._points()
        most = points[-1][0] if points else 0
        for m in self.measurements:
            if m.batch_size > most and m.peak_bytes is not None and m.peak_bytes > self.budget_bytes:
                above.append((m.batch_size, m.peak_bytes))
        return min(above, default=None)

    def _surely(self) -> float:
        """Return the size that fits for certain by the bound from above."""
        if not (points := self._points()):
            return 0.0
        return (self.budget_bytes - self.resting_bytes) / max(self._most_of_sample(points), 1e-9)

    def _most_of_sample(self, points: list[tuple[int, int]]) -> float:
        """Return the bytes that each sample of a larger size takes at most, noise included."""
        b, peak = points[-1]
        return (1 + 2 * self._noise) * (peak - self.resting_bytes) / b

    def _allowed(self) -> float:
        """Return the size above which none fits by the line of what is in use, even if noise has made it too steep."""
        line = self._line_up_to(self._points(in_use=True))
        if line is None or line.slope <= line.doubt:
            return math.inf
        return line.size + (self.budget_bytes - line.peak_bytes) / (line.slope - line.doubt)

    def _expected(self) -> float:
        """Return the size that the line allows even if noise has made it too flat, and that is not too far off."""
        points = self._points()
        if (line := self._line_up_to(points)) is None:
            return 2.0 * self.candidates[self.low]
        if line.slope <= line.doubt:  # flat, as far as noise tells
            return LEAP * line.size
        within = line.size + (self.budget_bytes - line.peak_bytes) / (line.slope + line.doubt)
        before = self._line_up_to([point for point in points if point[0] <= line.other_size])
        is_straight = before is not None and abs(before.slope - line.slope) <= line.doubt + before.doubt
        return within if is_straight else min((within + max(self._surely(), line.size)) / 2, LEAP * line.size)


def predict(sizes: SizeSearch) -> None:
    """Follow the line through the two largest sizes that fitted; see the module."""
    while (index := sizes.goal()) is not None:
        sizes.run(index)


def power_of_two(sizes: SizeSearch) -> None:
    """Double until a size fails, and keep the last one that fitted. Walk a sparse list of candidates one by one."""
    every = isinstance(sizes.candidates, list)  # else 1, 2, 3, ...
    powers = [2**k - 1 for k in range(sizes.candidates[-1].bit_length())]
    for index in range(len(sizes.candidates)) if every else powers:
        if sizes.low < index < sizes.high and not sizes.run(index):
            return


def binary_search(sizes: SizeSearch) -> None:
    """Double until a size fails, then bisect."""
    power_of_two(sizes)
    while sizes.is_open:
        sizes.run((sizes.low + sizes.high) // 2)


SEARCHES = {"predict": predict, "binary_search": binary_search, "power_of_two": power_of_two}


class StepTimes(Protocol):
    """Predicts from the times of steps that have run whether larger sizes are worth trying."""

    def enough(self) -> int | None:
        """Return the size from which on larger ones are of little use; None if that cannot be told."""

    def is_worth(self, small: int, large: int) -> bool:
        """Return False if a search for up to ``large`` costs more than the run gains by it over ``small``."""


def find_enough(
    sizes: SizeSearch,
    suffices: int | None,
    enough: Callable[[], int | None] = lambda: None,
    is_worth: Callable[[int, int], bool] = lambda small, large: True,
) -> int | None:
    """Run no more than shows that a size fits by far from which on larger ones are of little use, and return it.

    That size is ``suffices``; if None, ``enough`` tells it from the times of the two smallest. Return a smaller one if
    larger ones are not worth their trials by ``is_worth``, which takes both sizes; and None if memory may not be
    enough, which the search has to tell.
    """
    if not sizes.run(0):
        return None
    if suffices is None and len(sizes.candidates) > 1:
        if not sizes.run(1):
            return None
        if (wanted := enough()) is None:
            return None
        sizes.cap(wanted)
    last = len(sizes.candidates) - 1
    while (largest := max(sizes.fits_by_far(), sizes.low)) < last:
        size, by_far = sizes.candidates[largest], sizes.fits_by_far() >= sizes.low
        if suffices is not None and by_far and (sizes.largest or 0) >= suffices:
            return size
        if suffices is None and not is_worth(size, sizes.candidates[last]):
            return size
        if (index := sizes.goal()) is None:
            return None
        if suffices is not None:
            index = max(min(index, bisect_left(sizes.candidates, suffices)), sizes.low + 1)
        if not sizes.run(index):
            return None
    return sizes.candidates[last] if sizes.fits_by_far() == last else None
