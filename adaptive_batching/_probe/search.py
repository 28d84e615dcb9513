"""Searches for the largest batch size that fits: pure decisions over measured trial steps, independent of torch.

A size that did not run is never returned, and none is tried again once it is known to fit or not. What measurements
settle with a margin over their own error does not run: neither the candidate above the answer, nor that a second time.
What contradicts the curve or another measurement by more than noise runs once more before it is believed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Protocol

from adaptive_batching._probe.sizes import NOISE, Measurement, SizesRun

# Tolerate this many measurements that contradict the curve before falling back to plain bisection.
MAX_MISSES = 3
# If the curve puts the next candidate above the budget by this share of it and by twice what the curve was seen to be
# off, running that candidate could only cost an out-of-memory error.
CERTAIN_EXCESS = 0.01
# Share of the budget by which a curve may have been off, to be believed about a candidate that is not to run.
BELIEVED_ERROR = 0.05
# A step predicted to stay below this share of the budget fits by far, so it runs without calibration first.
CERTAIN_FIT = 0.8
# A size lies where the curve rises as it does at a larger one if it rises by this share of that from sample to sample.
ON_SLOPE = 0.99
# Without a prediction, a measured slope is extrapolated by at most this factor: floors make peak memory convex in b.
MAX_EXTRAPOLATION = 4
# The size for calibration is at least this share of the expected maximum. Libraries take their workspaces, some 5 MiB
# each, when a computation is first large enough for them: calibrated at a 16th, the curve was off by most of a sample.
CALIBRATING_SHARE = 1 / 8
# After a failed guess from a single measurement, the next one leaves this share of the predicted rise above it, and far
# more after each further failure: if the level was off by a little, that is enough.
CAUTIOUS_SHARE = 0.01
# If a step takes more than it has in use, by a varying amount, aim for this share of the room that the smallest
# measured step leaves: with glibc's malloc, peaks of equal steps were seen to differ by a fifth of it.
SHARE_OF_ROOM = 0.8
# ... and do not spend a step on a size at most this many times as large as one that has run.
NEAR_ENOUGH = 1.125

# Batch size -> bytes that count against the limit: of one step on an empty cache, of the first ones of training where
# nothing limits them, and the least limit in which training can repeat its steps. None decreases with the size.
Count = Callable[[int], tuple[float, float, float]]


class CorrectedCurve:
    """The memory curve as far as it is known: predicted, corrected by measurements, or only measured.

    ``predict_peak``, in bytes, never decreases with the batch size. ``count`` predicts what of that counts against the
    limit; None if the allocator's rules are not known. Then what it last held in reserve is taken to be so at any size.
    """

    def __init__(
        self, sizes: SizesRun, predict_peak: Callable[[int], float] | None = None, count: Count | None = None
    ) -> None:
        self.sizes = sizes
        self.is_predicted = predict_peak is not None
        self._predict = predict_peak
        self._count = count if predict_peak is not None else None
        self._is_refuted = False  # by a size that took more by far, twice

    @property
    def _measured(self) -> list[tuple[int, int]]:
        """(batch size, peak bytes) of the two largest sizes that were measured to fit, ascending."""
        # Those at which the allocator emptied its cache took what the limit left them.
        peaks = {m.batch_size: m.peak_bytes or 0 for m in self.sizes.measurements if m.fits and not m.retries}
        return sorted(peaks.items())[-2:]

    @property
    def _overhead(self) -> float:
        """Bytes that count against the limit per byte that is predicted, as last measured."""
        if self._count is not None:
            return 1.0
        return next((m.overhead for m in reversed(self.sizes.measurements) if m.fits), 1.0)

    @property
    def points(self) -> list[tuple[int, int]]:
        """(batch size, peak bytes) of up to two sizes that the curve passes through, ascending.

        They lie on both sides of the budget if a size above it could be measured, as when nothing enforces the limit,
        or when its steps ran because the allocator gave back what it would else have kept.
        """
        sizes = self.sizes
        beyond = sizes.candidates[sizes.high] if sizes.high < len(sizes.candidates) else None
        over = [
            (m.batch_size, m.peak_bytes + m.freed_bytes)
            for m in sizes.measurements
            if m.batch_size == beyond and m.peak_bytes and m.peak_bytes + m.freed_bytes > self.sizes.budget_bytes
        ]
        return [*self._measured[-1:], *over] if over else self._measured

    def run(self, index: int) -> bool:
        """Run a candidate, once more if it takes more than is known of it by more than noise; True if it fitted."""
        sizes, size = self.sizes, self.sizes.candidates[index]
        believes = self._predict is not None and not self._is_refuted
        in_use = believes and self._count is None and not self._measured  # is predicted, not what counts
        larger = [m.peak_bytes for m in sizes.measurements if m.fits and m.peak_bytes and m.batch_size > size]
        most = min([*larger, *([self.peak_bytes(size)] if believes else [])], default=math.inf)

        def is_doubtful(measured: Measurement) -> bool:
            if index == 0 and not believes and measured.peak_bytes is None:
                return True  # the search would end here
            return sizes.taken(measured) / (measured.overhead if in_use else 1) > most + NOISE * sizes.budget_bytes

        before = len(sizes.measurements)
        fitted = sizes.run(index, is_doubtful)
        if len(sizes.measurements) - before > 1 and is_doubtful(sizes.measurements[-1]):
            self._is_refuted = True
        return fitted

    def goal(self) -> int:
        """Return the index of the candidate to run next; the search checks whether it lies within the bracket."""
        sizes = self.sizes
        if sizes.trusts_prediction:
            return self.largest_that_fits()
        smallest = min((m.peak_bytes for m in sizes.measurements if m.peak_bytes and m.fits), default=0)
        share = (smallest + SHARE_OF_ROOM * (self.sizes.budget_bytes - smallest)) / max(self.sizes.budget_bytes, 1)
        goal, low = self.largest_that_fits(share), sizes.low
        is_near = 0 <= low < goal and sizes.candidates[goal] <= NEAR_ENOUGH * sizes.candidates[low]
        return low if is_near and len(self.points) > 1 else goal

    def within_reach(self, index: int) -> int:
        """Return ``index``, or that of half the size while fewer than two measurements back an untrusted prediction."""
        sizes = self.sizes
        if sizes.trusts_prediction or self._predict is None or len(self._measured) > 1:
            return index
        half = bisect_right(sizes.candidates, sizes.candidates[index] / 2) - 1
        return min(max(half, sizes.low + 1), index)

    def exceeds(self, index: int) -> bool:
        return self._predict is not None and self.peak_bytes(self.sizes.candidates[index]) > self.sizes.budget_bytes

    def surely_exceeds(self, index: int) -> bool:
        """Return True if a candidate certainly does not fit and need not run.

        The prediction, calibrated by one measurement, must have been right about another, and put this one above the
        budget by more than its error can be there, and than what the device's allocator holds in reserve.
        """
        size = self.sizes.candidates[index]
        answer = max((m for m in self.sizes.measurements if m.fits), key=lambda m: m.batch_size, default=None)
        if self._predict is None or answer is None:
            return False
        if answer.retries:
            needed, budget, at = self.peak_bytes(size), self.sizes.budget_bytes, answer.batch_size
            # Does training at the answer go on, by the curve, once the allocator has emptied its cache?
            is_known = self._count is not None and bool(self._measured) and self.peak_bytes(at) <= budget
            # Only what is in use is sure.
            if not is_known or self._correction(self._measured)(self._as_run(at)) <= budget:
                needed = (answer.peak_bytes or 0) / answer.overhead + self._predict(size) - self._predict(at)
            return needed > (1 + CERTAIN_EXCESS) * budget
        if len(self._measured) < 2:
            return False
        (b0, peak0), (b1, peak1) = self._measured
        error = abs(peak1 - (peak0 + self._overhead * (self._as_run(b1) - self._as_run(b0))))
        if error > BELIEVED_ERROR * self.sizes.budget_bytes:
            return False
        reach = (size - b1) / (b1 - b0)
        uncertain = (
            CERTAIN_EXCESS * self.sizes.budget_bytes + 2 * error * max(reach, 1.0) + (1 - 1 / self._overhead) * peak1
        )
        return self.peak_bytes(size) > self.sizes.budget_bytes + uncertain

    def first(self) -> int:
        """Return the index of the size to run first: the last one if it fits by far, otherwise one for calibration.

        There the curve must already rise as it does at the expected maximum. Below that the peak is a different one,
        such as the optimizer's, and says nothing about the level that matters.
        """
        candidates, predict = self.sizes.candidates, self._predict
        if predict is None:
            return 0
        by_far = CERTAIN_FIT * self.sizes.budget_bytes
        if predict(candidates[-1]) <= by_far and self._expected(candidates[-1]) <= by_far:
            return self.within_reach(len(candidates) - 1)
        expected = max(self.largest_that_fits(), 0)
        maximum = candidates[expected]
        on_slope = 2 + bisect_left(range(2, max(maximum // 2, 2)), ON_SLOPE * self._rise(maximum), key=self._rise)
        calibrating = max(on_slope, math.ceil(CALIBRATING_SHARE * maximum))
        return min(bisect_left(candidates, calibrating), self.within_reach(expected))

    def peak_bytes(self, size: int) -> float:
        """Return the expected peak in bytes at batch size ``size``, by the sizes that were measured to fit."""
        return self._correction(self._measured)(self._expected(size))

    def _correction(self, measured: list[tuple[int, int]]) -> Callable[[float], float]:
        """Return what makes of a predicted peak the expected one: the curve then passes through ``measured`` points."""
        if not measured:
            return lambda predicted: predicted
        b1, peak1 = measured[-1]
        predicted1, rise = self._as_run(b1), self._overhead
        if len(measured) > 1:
            b0, peak0 = measured[0]
            predicted_rise = predicted1 - self._as_run(b0)
            # Else the two peaks are of different moments of the step.
            if self._rise(b0) >= ON_SLOPE * self._rise(b1) and predicted_rise > 0 and peak1 > peak0:
                rise = (peak1 - peak0) / predicted_rise
        return lambda predicted: peak1 + rise * (predicted - predicted1)

    def _expected(self, size: int) -> float:
        """Return the predicted bytes of ``size``, as the limit counts them where that is known."""
        assert self._predict is not None
        return self._predict(size) if self._count is None else self._count(size)[2]

    def _as_run(self, size: int) -> float:
        """Return the peak in bytes that was predicted for the steps that have run at ``size``, without a limit."""
        assert self._predict is not None
        if self._count is None:
            return self._predict(size)
        repeats = any(len(m.step_peaks) > 1 for m in self.sizes.measurements if m.batch_size == size)
        return self._count(size)[1 if repeats else 0]

    def _rise(self, size: int) -> float:
        assert self._predict is not None
        return self._predict(size + 1) - self._predict(size)

    def largest_that_fits(self, share: float = 1.0) -> int:
        """Return the index, even off the bracket, of the largest candidate expected to fit ``share`` of the budget."""
        candidates, predict = self.sizes.candidates, self._predict
        if predict is None:
            return self._secant()
        expected, aim = self._correction(self.points), share * self.sizes.budget_bytes
        # Both rise with the size, so bisection is exact. Counting takes a replay, and counts no less than is in use.
        end = bisect_right(candidates, aim, key=lambda size: expected(predict(size)))
        if self._count is not None:
            end = bisect_right(candidates, aim, hi=end, key=lambda size: expected(self._expected(size)))
        return end - 1

    def _secant(self) -> int:
        sizes, measured = self.sizes, self._measured
        if not measured:
            return (sizes.low + sizes.high) // 2
        b1, peak1 = measured[-1]
        reach: float = MAX_EXTRAPOLATION * b1
        if len(measured) == 2 and peak1 > measured[0][1]:
            b0, peak0 = measured[0]
            reach = min(reach, b1 + (self.sizes.budget_bytes - peak1) * (b1 - b0) / (peak1 - peak0))
        elif sizes.high < len(sizes.candidates):
            # A flat curve says nothing about where it starts to rise.
            reach = min(reach, (b1 + sizes.candidates[sizes.high]) / 2)
        return bisect_right(sizes.candidates, reach) - 1


def power_of_two(curve: CorrectedCurve) -> None:
    """Double until a size fails, and keep the last one that fitted. Walk a sparse list of candidates one by one."""
    sizes = curve.sizes
    every = isinstance(sizes.candidates, list)  # else 1, 2, 3, ...
    powers = [2**k - 1 for k in range(sizes.candidates[-1].bit_length())]
    for index in range(len(sizes.candidates)) if every else powers:
        if sizes.low < index < sizes.high and not curve.run(index):
            return


def binary_search(curve: CorrectedCurve) -> None:
    """Double until a size fails, then bisect."""
    power_of_two(curve)
    _bisect(curve)


def predict(curve: CorrectedCurve) -> None:
    """Jump to the size that the predicted memory curve allows, and correct the curve by measurements.

    The curve comes from two traces of the training step. Its shape is exact and its level is off by a constant, so the
    first real step, at a small size, calibrates it. Repeated contradictions by measured steps end in bisection: a wrong
    curve costs steps, but never gives a wrong answer. Without one, guesses follow the secant through the two largest
    sizes that fitted.
    """
    sizes = curve.sizes
    if not sizes.measurements:
        first = curve.first()
        if sizes.avoids_failures and curve.exceeds(first):
            return
        curve.run(first)
    sizes.repeats = curve.is_predicted  # each may be the answer
    while sizes.open:
        misses = sizes.misses  # each widens the next correction
        guess = curve.goal()
        if guess <= sizes.low:
            # By the curve, this is the answer. Confirm it now, while it is the size that has just run.
            if sizes.largest is not None and not sizes.confirm():
                continue
            # Prove it by running the next candidate, unless that one certainly does not fit.
            if (sizes.avoids_failures and sizes.largest is not None) or curve.surely_exceeds(sizes.low + 1):
                return
            sizes.misses += curve.run(min(sizes.low + 2**misses, sizes.high - 1))
        elif guess >= sizes.high:
            back = sizes.high - 2 ** max(misses - 1, 0)
            if not curve.points:  # even the calibrating size did not fit
                back = (sizes.low + sizes.high) // 2
            elif len(curve.points) == 1:
                caution = min(CAUTIOUS_SHARE * 5 ** (misses - 1), 1.0)
                left = max(1 - curve.points[0][1] / sizes.budget_bytes, 0.0)
                back = min(back, curve.largest_that_fits(1 - caution * left))
            sizes.misses += not curve.run(max(back, sizes.low + 1))
        else:
            sizes.misses += not curve.run(curve.within_reach(guess))
        if sizes.misses > MAX_MISSES and sizes.high < len(sizes.candidates):
            _bisect(curve)


class StepTimes(Protocol):
    """Predicts from the times of steps that have run whether larger sizes are worth trying."""

    def enough(self) -> int | None:
        """Return the size from which on larger ones are of little use; None if that cannot be told."""

    def is_worth(self, small: int, large: int) -> bool:
        """Return False if a search for up to ``large`` costs more than the run gains by it over ``small``."""


def settle_for_enough(
    curve: CorrectedCurve,
    enough: Callable[[], int | None],
    is_worth: Callable[[int, int], bool] = lambda small, large: True,
    suffices: int | None = None,
) -> int | None:
    """Run the two smallest sizes, and leave out those that are larger than is of use, as ``enough`` then tells.

    Return the largest size that is predicted to fit by far, so that it need not run, if it is a third of what is enough
    or more: the time that larger ones save is then at most three times what is of no use. Else both run once more, as a
    first step often waits for something else. Return it then, or the largest that has run, also if what is enough is
    not worth its trials by ``is_worth``, which takes the two sizes. Else the search goes on.

    One run of the smallest size will do if ``suffices``, or the largest candidate, is predicted to fit by far.
    """
    sizes = curve.sizes

    def fits_by_far() -> int:
        return curve.largest_that_fits(CERTAIN_FIT) if curve.is_predicted else -1

    smallest = range(min(2, len(sizes.candidates)))
    for index in smallest:
        if sizes.avoids_failures and curve.exceeds(index):
            return None
        if not sizes.low < index < sizes.high or not curve.run(index):
            return None
        if index == 0 and suffices is not None and (by_far := fits_by_far()) >= 0:
            size = sizes.candidates[by_far]
            if size >= min(suffices, sizes.candidates[-1]):
                return size
    for is_sure in (False, True):
        if is_sure and not all(sizes.run_anew(index) for index in smallest):
            return None
        if (wanted := enough()) is None:
            continue
        last = max(min(bisect_left(sizes.candidates, wanted), len(sizes.candidates) - 1), sizes.low)
        by_far = min(fits_by_far(), last)
        if by_far >= 0 and 3 * sizes.candidates[by_far] >= sizes.candidates[last]:
            sizes.cap(sizes.candidates[last])
            return sizes.candidates[by_far]
        if is_sure:
            sizes.cap(sizes.candidates[last])
            size, largest = sizes.candidates[max(by_far, sizes.low)], sizes.candidates[last]
            return None if size == largest or is_worth(size, largest) else size
    return None


def _bisect(curve: CorrectedCurve) -> None:
    sizes = curve.sizes
    while sizes.open:
        curve.run((sizes.low + sizes.high) // 2)


SEARCHES = {"predict": predict, "binary_search": binary_search, "power_of_two": power_of_two}
