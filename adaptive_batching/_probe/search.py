"""Searches for the largest batch size that fits: pure decisions over measured trial steps, independent of torch.

A search runs real training steps through :class:`~adaptive_batching._probe.sizes.SizesRun`, which records what each
took, until the largest candidate that fits is known. All searches obey two rules: a size that did not run is never
returned, and no size is tried again once it is known to fit or not. What measurements settle with a margin over their
own error does not run: neither the candidate above the answer, nor the answer a second time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

from adaptive_batching._probe.corrected_curve import CERTAIN_FIT, CorrectedCurve, Count, PredictPeak
from adaptive_batching._probe.sizes import SizesRun

# Tolerate this many measurements that contradict the curve before falling back to plain bisection.
MAX_MISSES = 3


def power_of_two(sizes: SizesRun, predict_peak: PredictPeak | None = None, count: Count | None = None) -> None:
    """Double until a size fails, and keep the last one that fitted. Walk a sparse list of candidates one by one."""
    every = isinstance(sizes.candidates, list)
    for index in range(len(sizes.candidates)) if every else _powers(sizes.candidates):
        if sizes.low < index < sizes.high and not sizes.run(index):
            return


def binary_search(sizes: SizesRun, predict_peak: PredictPeak | None = None, count: Count | None = None) -> None:
    """Double until it fails, then bisect between the last size that fitted and the first that did not."""
    power_of_two(sizes)
    _bisect(sizes)


def predict(sizes: SizesRun, predict_peak: PredictPeak | None = None, count: Count | None = None) -> None:
    """Jump to the size that the predicted memory curve allows, and correct the curve by measurements.

    The curve comes from two traces of the training step (:mod:`adaptive_batching._trace.trace`). Its shape is exact and
    its level is off by a constant, so the first real step, at a small size, calibrates it. If a measured step
    contradicts the curve, the next guess uses the corrected one; repeated contradictions end in bisection. A wrong
    curve costs steps, but never gives a wrong answer. Without a curve, guesses follow the secant through the two
    largest sizes that fitted.

    ``predict_peak``, in bytes, never decreases with the batch size. ``count`` predicts what of that counts against the
    limit; None if the allocator's rules are not known. Then what was last measured to be reserved beyond what is in use
    is taken to be reserved at any size.
    """
    curve = CorrectedCurve(sizes, predict_peak, count)
    if not sizes.measurements:
        first = curve.first()
        if sizes.avoids_failures and curve.exceeds(first):
            return
        sizes.run(first)
    sizes.repeats = predict_peak is not None  # each may be the answer
    while sizes.open:
        misses = sizes.misses  # each widens the next correction
        guess = curve.goal()
        if guess <= sizes.low:
            # By the curve, this is the answer. Confirm it now, while it is the size that has just run.
            if sizes.found is not None and not sizes.confirm():
                continue
            # Prove it by running the next candidate, unless that one certainly does not fit.
            if (sizes.avoids_failures and sizes.found is not None) or curve.surely_exceeds(sizes.low + 1):
                return
            sizes.misses += sizes.run(min(sizes.low + 2**misses, sizes.high - 1))
        elif guess >= sizes.high:
            back = sizes.high - 2 ** max(misses - 1, 0)
            if curve.num_points == 0:  # even the calibrating size did not fit
                back = (sizes.low + sizes.high) // 2
            elif curve.num_points == 1:
                back = min(back, curve.largest_that_fits(curve.cautious_share(misses)))
            sizes.misses += not sizes.run(max(back, sizes.low + 1))
        else:
            sizes.misses += not sizes.run(curve.within_reach(guess))
        if sizes.misses > MAX_MISSES and sizes.high < len(sizes.candidates):
            _bisect(sizes)


def settle_for_enough(
    sizes: SizesRun,
    predict_peak: PredictPeak | None,
    enough: Callable[[], int | None],
    count: Count | None = None,
) -> int | None:
    """Run the two smallest sizes, and leave out those that are larger than is of use.

    From the size that ``enough`` returns on, larger ones are of no use, as far as measurements tell. Return the largest
    up to that one which is predicted to fit by far, so that it need not run, if it is at least a third of it: the time
    that larger sizes save is then at most three times what is of no use. Else return None: the search goes on, up to
    what is enough.
    """
    curve = CorrectedCurve(sizes, predict_peak, count)
    for index in range(min(2, len(sizes.candidates))):
        if sizes.avoids_failures and curve.exceeds(index):
            return None
        if not sizes.low < index < sizes.high or not sizes.run(index):
            return None
    wanted = enough()
    if wanted is None:
        return None
    sizes.cap(sizes.candidates[min(bisect_left(sizes.candidates, wanted), len(sizes.candidates) - 1)])
    if predict_peak is None:
        return None
    by_far = min(curve.largest_that_fits(CERTAIN_FIT), len(sizes.candidates) - 1)
    return sizes.candidates[by_far] if by_far >= 0 and 3 * sizes.candidates[by_far] >= sizes.candidates[-1] else None


def _powers(candidates: Sequence[int]) -> list[int]:
    """Return the indices of the powers of two among the consecutive sizes 1, 2, 3, ..."""
    assert candidates[0] == 1, candidates[0]
    return [2**k - 1 for k in range(candidates[-1].bit_length())]


def _bisect(sizes: SizesRun) -> None:
    while sizes.open:
        sizes.run((sizes.low + sizes.high) // 2)


class Search(Protocol):
    """A search; see :func:`predict` for its arguments, of which those by measurement alone use but the first."""

    def __call__(
        self, sizes: SizesRun, predict_peak: PredictPeak | None = None, count: Count | None = None
    ) -> None: ...


SEARCHES: dict[str, Search] = {
    "predict": predict,
    "binary_search": binary_search,
    "power_of_two": power_of_two,
}
