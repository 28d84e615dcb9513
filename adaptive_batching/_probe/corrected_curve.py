"""The memory curve that a search goes by: the predicted one, corrected by what has run."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable

from adaptive_batching._probe.sizes import SizesRun

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

PredictPeak = Callable[[int], float]
Count = Callable[[int], tuple[float, float, float]]
"""Batch size -> bytes that count against the limit: of one step on an empty cache, of the first ones of training where
nothing limits them, and the least limit in which training can repeat its steps. None decreases with the size."""


class CorrectedCurve:
    """The memory curve as far as it is known: predicted, corrected by measurements, or only measured."""

    def __init__(self, sizes: SizesRun, predict_peak: PredictPeak | None, count: Count | None = None) -> None:
        self._sizes = sizes
        self._predict = predict_peak
        self._count = count if predict_peak is not None else None

    @property
    def _budget(self) -> int:
        return self._sizes.budget_bytes

    @property
    def _measured(self) -> list[tuple[int, int]]:
        """(batch size, peak bytes) of the two largest sizes that were measured to fit, ascending.

        Those at which the allocator emptied its cache took what the limit left them, which is no point of the curve.
        """
        known = {m.batch_size: m.peak_bytes or 0 for m in self._sizes.measurements if m.fits and not m.retries}
        return sorted(known.items())[-2:]

    @property
    def _overhead(self) -> float:
        """Bytes that count against the limit per byte that is predicted, as last measured."""
        if self._count is not None:
            return 1.0
        return next((m.overhead for m in reversed(self._sizes.measurements) if m.fits), 1.0)

    @property
    def num_points(self) -> int:
        """Number of measurements that the curve passes through, at most two: one sets its level, a second its slope."""
        return len(self._closest)

    @property
    def _closest(self) -> list[tuple[int, int]]:
        """(batch size, peak bytes) of up to two sizes that the curve passes through, ascending.

        They lie on both sides of the budget if a size above it could be measured, as when nothing enforces the limit,
        or when its steps ran because the allocator gave back what it would else have kept.
        """
        beyond = self._sizes.candidates[self._sizes.high] if self._sizes.high < len(self._sizes.candidates) else None
        over = [
            (m.batch_size, m.peak_bytes + m.freed_bytes)
            for m in self._sizes.measurements
            if m.batch_size == beyond and m.peak_bytes and m.peak_bytes + m.freed_bytes > self._budget
        ]
        return [*self._measured[-1:], *over] if over else self._measured

    def goal(self) -> int:
        """Return the index of the candidate to run next; the search checks whether it lies within the bracket."""
        if self._sizes.trusts_prediction:
            return self.largest_that_fits()
        smallest = min((m.peak_bytes for m in self._sizes.measurements if m.peak_bytes and m.fits), default=0)
        share = (smallest + SHARE_OF_ROOM * (self._budget - smallest)) / max(self._budget, 1)
        goal, low = self.largest_that_fits(share), self._sizes.low
        is_near = 0 <= low < goal and self._sizes.candidates[goal] <= NEAR_ENOUGH * self._sizes.candidates[low]
        return low if is_near and self.num_points > 1 else goal

    def within_reach(self, index: int) -> int:
        """Return ``index``, or that of half the size while fewer than two measurements back an untrusted prediction."""
        sizes = self._sizes
        if sizes.trusts_prediction or self._predict is None or len(self._measured) > 1:
            return index
        half = bisect_right(sizes.candidates, sizes.candidates[index] / 2) - 1
        return min(max(half, sizes.low + 1), index)

    def cautious_share(self, failures: int) -> float:
        """Return the share of the budget to aim for after guesses from one measurement have failed."""
        if not self._measured:
            return 1.0
        peak = self._measured[-1][1]
        caution = min(CAUTIOUS_SHARE * 5 ** (failures - 1), 1.0)
        return float(1 - caution * (1 - peak / self._budget))

    def exceeds(self, index: int) -> bool:
        return self._predict is not None and self._peak(self._sizes.candidates[index], self._measured) > self._budget

    def surely_exceeds(self, index: int) -> bool:
        """Return True if a candidate certainly does not fit and need not run.

        The prediction, calibrated by one measurement, must have been right about another one. It must put this
        candidate above the budget by more than its error there can be, and than the memory that the device's allocator
        holds in reserve.
        """
        size = self._sizes.candidates[index]
        answer = max((m for m in self._sizes.measurements if m.fits), key=lambda m: m.batch_size, default=None)
        if self._predict is None or answer is None:
            return False
        if answer.retries:
            needed = self.peak_bytes(size)
            if not self._foresees(answer.batch_size):  # then nothing is sure but what is in use
                of_answer = (answer.peak_bytes or 0) / answer.overhead
                needed = of_answer + self._predict(size) - self._predict(answer.batch_size)
            return needed > (1 + CERTAIN_EXCESS) * self._budget
        if len(self._measured) < 2:
            return False
        (b0, peak0), (b1, peak1) = self._measured
        error = abs(peak1 - (peak0 + self._overhead * (self._as_run(b1) - self._as_run(b0))))
        if error > BELIEVED_ERROR * self._budget:
            return False
        reach = (size - b1) / (b1 - b0)
        uncertain = CERTAIN_EXCESS * self._budget + 2 * error * max(reach, 1.0) + (1 - 1 / self._overhead) * peak1
        return self.peak_bytes(size) > self._budget + uncertain

    def _foresees(self, size: int) -> bool:
        """Return True if, by the curve, training at ``size`` goes on once the allocator has emptied its cache."""
        if self._count is None or not self._measured:
            return False
        return self.peak_bytes(size) <= self._budget < self._correction(self._measured)(self._as_run(size))

    def first(self) -> int:
        """Return the index of the size to run first: the last one if it fits by far, otherwise one for calibration.

        The size for calibration is at least an eighth of the expected maximum, and one at which the curve already rises
        as it does there. Below that the peak is a different one, such as the optimizer's, and says nothing about the
        level that matters.
        """
        candidates, predict = self._sizes.candidates, self._predict
        if predict is None:
            return 0
        by_far = CERTAIN_FIT * self._budget
        if predict(candidates[-1]) <= by_far and self._expected(candidates[-1]) <= by_far:
            return self.within_reach(len(candidates) - 1)
        expected = max(self.largest_that_fits(), 0)
        maximum = candidates[expected]
        sizes = range(2, max(maximum // 2, 2))
        on_slope = 2 + bisect_left(sizes, ON_SLOPE * self._rise(maximum), key=self._rise)
        calibrating = max(on_slope, math.ceil(CALIBRATING_SHARE * maximum))
        return min(bisect_left(candidates, calibrating), self.within_reach(expected))

    def peak_bytes(self, size: int) -> float:
        """Return the expected peak in bytes at batch size ``size``, by the sizes that were measured to fit."""
        return self._peak(size, self._measured)

    def _peak(self, size: int, measured: list[tuple[int, int]]) -> float:
        return self._correction(measured)(self._expected(size))

    def _correction(self, measured: list[tuple[int, int]]) -> Callable[[float], float]:
        """Return what makes of a predicted peak the expected one, so that the curve passes through measured points."""
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
        """Return the bytes that ``size`` is predicted to need, as the limit counts them where that is known."""
        assert self._predict is not None
        return self._predict(size) if self._count is None else self._count(size)[2]

    def _as_run(self, size: int) -> float:
        """Return the peak in bytes that was predicted for the steps that have run at ``size``, without a limit."""
        assert self._predict is not None
        if self._count is None:
            return self._predict(size)
        repeats = any(len(m.step_peaks) > 1 for m in self._sizes.measurements if m.batch_size == size)
        return self._count(size)[1 if repeats else 0]

    def _rise(self, size: int) -> float:
        """Return the predicted rise of the peak from ``size`` to one sample more."""
        assert self._predict is not None
        return self._predict(size + 1) - self._predict(size)

    def largest_that_fits(self, share: float = 1.0) -> int:
        """Return the index, even off the bracket, of the largest candidate expected to fit ``share`` of the budget."""
        candidates = self._sizes.candidates
        if self._predict is None:
            return self._secant()
        expected = self._correction(self._closest)

        def in_use(index: int) -> float:
            assert self._predict is not None
            return expected(self._predict(candidates[index]))

        def peak(index: int) -> float:
            return expected(self._expected(candidates[index]))

        # Both rise with the index, so bisection is exact. Counting takes a replay, and counts no less than is in use.
        end = bisect_right(range(len(candidates)), share * self._budget, key=in_use)
        return (end if self._count is None else bisect_right(range(end), share * self._budget, key=peak)) - 1

    def _secant(self) -> int:
        sizes, measured = self._sizes, self._measured
        if not measured:
            return (sizes.low + sizes.high) // 2
        b1, peak1 = measured[-1]
        reach: float = MAX_EXTRAPOLATION * b1
        if len(measured) == 2 and peak1 > measured[0][1]:
            b0, peak0 = measured[0]
            reach = min(reach, b1 + (self._budget - peak1) * (b1 - b0) / (peak1 - peak0))
        elif sizes.high < len(sizes.candidates):
            # A flat curve says nothing about where it starts to rise.
            reach = min(reach, (b1 + sizes.candidates[sizes.high]) / 2)
        return bisect_right(sizes.candidates, reach) - 1
