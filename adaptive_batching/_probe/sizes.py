"""Candidate sizes of a search, the measurements taken, what they prove, and the result that is made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from adaptive_batching._trace.reserved import can_repeat

# Share of the limit by which consecutive steps at one size were seen to differ, five times over, where freed memory
# goes back at once.
REPEAT_ERROR = 0.001
# Share of the limit by which equal steps were seen to differ where freed memory is kept: by glibc, or in blocks by a
# GPU's allocator. What differs by more is measured again.
NOISE = 0.2


@dataclass(frozen=True)
class Measurement:
    """Memory and time of consecutive training steps at ``batch_size``."""

    batch_size: int
    fits: bool  # all steps ran within the limit, and training can repeat them: see can_repeat
    peak_bytes: int | None = None  # as the limit counts it; None if a step ran out of memory
    seconds: float = 0.0  # of the first step
    overhead: float = 1.0  # bytes that counted per byte in use; above 1 with an allocator that keeps freed memory
    retries: int = 0  # times that the allocator emptied its cache to find room
    steps: int = 1  # that ran or started
    freed_bytes: int = 0  # most that the allocator gave back in a step: without a limit, it would take up to that more
    step_peaks: list[int | None] = field(
        default_factory=list
    )  # of the last steps in a row, the first on an empty cache
    step_retries: list[int] = field(default_factory=list)  # in each of these
    makes_states: bool = False  # the first of these made the optimizer states, as training does, and took less by them

    def __post_init__(self) -> None:
        if not self.step_peaks:  # a single step
            object.__setattr__(self, "step_peaks", [self.peak_bytes])
            object.__setattr__(self, "step_retries", [self.retries])

    @property
    def is_settled(self) -> bool:
        """True if no further step in a row could change whether the size fits."""
        return not self.fits or can_repeat(self.step_retries, makes_states=self.makes_states) is not None

    def followed_by(self, second: Measurement) -> Measurement:
        """Return one measurement that covers another step as well, which ran on what these have left."""
        ran = self.peak_bytes is not None and second.peak_bytes is not None
        step_retries = [*self.step_retries, *second.step_retries]
        return replace(
            self,
            fits=self.fits and second.fits and can_repeat(step_retries, makes_states=self.makes_states) is not False,
            peak_bytes=max(self.peak_bytes or 0, second.peak_bytes or 0) if ran else None,
            overhead=max(self.overhead, second.overhead), freed_bytes=max(self.freed_bytes, second.freed_bytes),
            retries=self.retries + second.retries, steps=self.steps + second.steps,
            step_peaks=[*self.step_peaks, *second.step_peaks], step_retries=step_retries,
        )  # fmt: skip


Measure = Callable[[int], Measurement]


class SizesRun:
    """All measurements of one search, and the bracket that they prove.

    ``measure`` runs a step at a size, on memory that nothing has used before; ``measure_again`` another at the size
    that ran last, on the cache that it left, None for a search whose answer need not run again; ``begin`` the first
    step of training, which meets and leaves memory as no other does, None where freed memory goes back at once.

    With ``avoids_failures``, for a device where a failed allocation can end the process, what is known to be too large
    never runs. ``trusts_prediction`` is False where kernels convert their inputs or freed memory is kept, which no
    trace sees: then half of the size that the first measurement allows runs before that size.
    """

    def __init__(
        self,
        measure: Measure,
        candidates: Sequence[int],
        budget_bytes: int,
        measure_again: Measure | None = None,
        begin: Measure | None = None,
        *,
        avoids_failures: bool = False,
        trusts_prediction: bool = True,
    ) -> None:
        assert candidates and list(candidates) == sorted(set(candidates)) and candidates[0] >= 1, candidates
        self._measure, self._measure_again, self._begin = measure, measure_again, begin
        self.candidates, self.budget_bytes = candidates, budget_bytes
        self.avoids_failures, self.trusts_prediction = avoids_failures, trusts_prediction
        self.measurements: list[Measurement] = []
        self.repeats = False  # True to run sizes as training does, and as often as the answer, rather than once
        self.misses = 0  # runs that contradicted the curve, and answers that failed when they ran again
        self.low = -1  # index of the largest candidate that fitted; -1 if none has yet
        self.high = len(candidates)  # index of the smallest that did not; one past the end if none has failed yet

    @property
    def _peaks(self) -> dict[int, int | None]:
        """Peak bytes of the sizes that fitted."""
        return {m.batch_size: m.peak_bytes for m in self.measurements if m.fits}

    def run(self, index: int, is_doubtful: Callable[[Measurement], bool] = lambda measured: False) -> bool:
        """Run a candidate within the bracket, unless it is not to fail and surely would; return True if it fitted.

        If what was measured is doubtful, it runs once more, and the better of the two counts: a step can be disturbed
        so that it takes more, and not so that it takes less.
        """
        assert self.low < index < self.high, (self.low, index, self.high)
        size = self.candidates[index]
        if self.avoids_failures and self._least_peak(size) > self.budget_bytes:
            self.high = index
            return False
        measurement = self._run_once(size)
        if is_doubtful(measurement):
            both = [measurement, self._run_once(size)]
            worse, measurement = sorted(both, key=lambda one: (not one.fits, self.taken(one)), reverse=True)
            self.measurements.append(worse)
        self.measurements.append(measurement)
        if measurement.fits:
            self.low = index
        else:
            self.high = index
        return measurement.fits

    def run_anew(self, index: int) -> bool:
        """Run a candidate that has fitted from the start, to see what else it measures; return True if it fits again.

        If it does not, it still counts as fitting, until it is the answer and is confirmed.
        """
        measured = self._measure(self.candidates[index])
        self.measurements.append(measured)
        return measured.fits

    def _run_once(self, size: int) -> Measurement:
        if self.repeats and self._begin is not None:
            return self._as_training(size)
        measurement = self._measure(size)
        if measurement.fits and measurement.retries:
            return self._as_training(size, measurement.steps)
        return measurement

    def taken(self, measurement: Measurement) -> int:
        """Return the bytes that a measurement took, or at least needed if it ran out of memory."""
        return self.budget_bytes if measurement.peak_bytes is None else measurement.peak_bytes

    def _least_peak(self, size: int) -> float:
        """Bound the peak from below: it is convex, so it lies above the line through the two largest that fitted."""
        peaks = sorted((at, peak) for at, peak in self._peaks.items() if peak)
        if len(peaks) < 2:
            return 0.0
        (b0, peak0), (b1, peak1) = peaks[-2:]
        return peak1 + (size - b1) * (peak1 - peak0) / (b1 - b0)

    def confirm(self) -> bool:
        """Run the answer as training repeats it, unless it has, or has left room; if it fails now, narrow the bracket.

        An allocator that keeps freed memory can need far more in a second step, which finds memory as training leaves
        it. Where freed memory goes back at once, only the noise of a measurement is left. If it fails by more than
        noise, it runs once more, from the start.
        """
        if self._measure_again is None:
            return True
        size = self.candidates[self.low]
        at = max(i for i, m in enumerate(self.measurements) if m.fits and m.batch_size == size)
        before = self.measurements[at]
        has_run_again = before.is_settled if self._begin is not None else before.steps > 1
        keeps_nothing = self.trusts_prediction and before.overhead == 1.0
        leaves_room = self.budget_bytes - (before.peak_bytes or 0) > REPEAT_ERROR * self.budget_bytes
        if has_run_again or (keeps_nothing and leaves_room):
            return True
        if self._begin is not None:
            self.measurements[at] = self._as_training(size, before.steps)
        else:
            if at + 1 < len(self.measurements):  # another size has run since
                before = before.followed_by(self._measure(size))
            self.measurements[at] = before.followed_by(self._measure_again(size)) if before.fits else before
        repeated = self.measurements[at]
        if not repeated.fits and self.taken(repeated) > (before.peak_bytes or 0) + NOISE * self.budget_bytes:
            repeated = self._repeated(size)
            self.measurements.append(repeated)
        if repeated.fits:
            return True
        self.misses += 1
        self.repeats = True  # what a single step says is not enough here
        fitted, self.high = self._peaks, self.low
        self.low = max((i for i in range(self.high) if self.candidates[i] in fitted), default=-1)
        return False

    def _repeated(self, size: int) -> Measurement:
        """Run a size as if it had not run before, and again."""
        assert self._measure_again is not None
        if self._begin is not None:
            return self._as_training(size)
        first = self._measure(size)
        return first.followed_by(self._measure_again(size)) if first.fits else first

    def _as_training(self, size: int, steps_before: int = 0) -> Measurement:
        """Run a size as training begins with it, until it is known whether training can repeat it."""
        assert self._begin is not None and self._measure_again is not None
        measured = self._begin(size)
        while not measured.is_settled:
            measured = measured.followed_by(self._measure_again(size))
        return replace(measured, steps=steps_before + measured.steps)

    def cap(self, largest: int) -> None:
        """Drop the candidates above ``largest``, other than those that have run."""
        largest = max([largest, *self._peaks])
        kept = [size for size in self.candidates if size <= largest]
        if 0 < len(kept) < len(self.candidates):
            self.high = min(self.high, len(kept))
            self.candidates = kept

    @property
    def open(self) -> bool:
        """True if an untested candidate could still be the answer."""
        return self.high - self.low > 1

    @property
    def largest(self) -> int | None:
        """Largest batch size that ran and fitted, or None if no candidate has."""
        largest = self.candidates[self.low] if self.low >= 0 else None
        assert largest is None or largest in self._peaks
        return largest


def candidate_sizes(
    upper: int, *, powers_of_two: bool, include: int | None = None, coarse: bool = False
) -> list[int] | range:
    """Return the batch sizes that a search may answer with, ascending, none above ``upper``.

    With ``powers_of_two`` only these; with ``coarse`` only those with at most four significant binary digits, each at
    most an eighth above the one before, and ``upper``. Either also has ``include``, such as where growth starts.
    """
    assert upper >= 1, upper
    if not (powers_of_two or coarse):
        return range(1, upper + 1)
    digits = range(1, 2) if powers_of_two else range(1, 16)
    sizes = {digit << zeros for zeros in range(upper.bit_length()) for digit in digits}
    sizes |= {include or 1} if powers_of_two else {include or 1, upper}
    return sorted(size for size in sizes if size <= upper)


def rounded_down(exact: int) -> str:
    """Return what bounds a size where about ``exact`` samples fit, in words."""
    return f"memory: about {exact} fit, rounded down (round_to_power_of_two)"


@dataclass(frozen=True)
class ProbeResult:
    """The largest batch size, and the evidence for it. Plain values only, so that it can be stored."""

    batch_size: int
    reason: str
    """The binding constraint: memory, or the upper bound given to :func:`find_maximum_batch_size`."""
    budget_bytes: int
    total_bytes: int
    search: str
    seconds: float
    measurements: list[Measurement]
    """Every size that ran, in order."""
    predicted: list[tuple[int, int]] = field(default_factory=list)
    """(batch size, predicted peak bytes), calibrated; empty if no trace was possible."""
    enough: int | None = None
    """Batch size beyond which larger ones would be of little use, or not worth their trials, if that was asked. It has
    run, or is predicted to fit by far; :attr:`batch_size` is then the largest that has run."""
    peak_moment: str = ""
    """Part of the step that the peak falls into, as traced; empty if no trace says."""
    peak_kinds: dict[str, int] = field(default_factory=dict)
    """Bytes of each kind (:data:`adaptive_batching._trace.traced_step.MEMORY_KINDS`) that are alive then."""
    exact: int | None = None
    """Largest size that is predicted to fit where :attr:`batch_size` is rounded down to a power of two; else None."""

    @property
    def bound(self) -> str:
        """The limit on :attr:`batch_size`, in words."""
        return self.reason if self.exact is None else rounded_down(self.exact)

    @property
    def peak_bytes(self) -> int:
        """Measured peak at :attr:`batch_size`."""
        peak = next(m.peak_bytes for m in reversed(self.measurements) if m.fits and m.batch_size == self.batch_size)
        assert peak is not None
        return peak

    @property
    def num_steps(self) -> int:
        """Number of training steps that ran or started."""
        return sum(m.steps for m in self.measurements)

    @property
    def num_out_of_memory(self) -> int:
        return sum(m.peak_bytes is None for m in self.measurements)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ProbeResult:
        """Rebuild a result from :meth:`to_dict`.

        Raises:
            TypeError, KeyError: If ``values`` is not a stored result.
        """
        measurements = [Measurement(**m) for m in values["measurements"]]
        predicted = [(int(b), int(peak)) for b, peak in values["predicted"]]
        return cls(**{**values, "measurements": measurements, "predicted": predicted})
