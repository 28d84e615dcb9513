"""Candidate sizes of a search, a measurement of one of them, and the result."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """Memory and time of consecutive training steps at ``batch_size``."""

    batch_size: int
    fits: bool  # all steps ran within the limit, and as far as they tell training can go on with them
    peak_bytes: int | None = None  # as the limit counts it; None if a step ran out of memory
    seconds: float = 0.0  # of the first step
    retries: int = 0  # times that the allocator emptied its cache to find room
    steps: int = 1  # that ran or started
    step_peaks: list[int | None] = field(default_factory=list)  # of each step, the first on an empty cache
    step_retries: list[int] = field(default_factory=list)  # in each step
    in_use_bytes: int | None = None  # most in use at once; less than the peak where freed memory is kept
    makes_states: bool = False  # the first step made the optimizer states, as training does, and took less by them

    def __post_init__(self) -> None:
        if self.in_use_bytes is None:
            object.__setattr__(self, "in_use_bytes", self.peak_bytes)
        if not self.step_peaks:  # a single step
            object.__setattr__(self, "step_peaks", [self.peak_bytes])
            object.__setattr__(self, "step_retries", [self.retries])

    def followed_by(self, second: Measurement) -> Measurement:
        """Return one measurement that covers another step as well, which ran on what these have left.

        Training that has the allocator empty its cache waits for the device each time. A first step that does so says
        little, as it meets memory as no other does.
        """
        ran = self.peak_bytes is not None and second.peak_bytes is not None
        return replace(
            self,
            fits=self.fits and second.fits and not second.retries,
            peak_bytes=max(self.peak_bytes or 0, second.peak_bytes or 0) if ran else None,
            in_use_bytes=max(self.in_use_bytes or 0, second.in_use_bytes or 0) if ran else None,
            retries=self.retries + second.retries, steps=self.steps + second.steps,
            step_peaks=[*self.step_peaks, *second.step_peaks], step_retries=[*self.step_retries, *second.step_retries],
        )  # fmt: skip


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
    sizes = {include or 1} if powers_of_two else {include or 1, upper}
    for zeros in range(upper.bit_length()):
        power = 1 << zeros
        sizes |= {power} if powers_of_two else {*range(power, 16 * power, power)}
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
    """(batch size, peak bytes) of two points of the line by which no larger size fits, or where there is an
    :attr:`enough`, of the bound by which that fits; empty if nothing above the answer was to be told."""
    enough: int | None = None
    """Batch size beyond which larger ones would be of little use, or not worth their trials, if that was asked. It has
    run, or fits by far by what ran; :attr:`batch_size` is then the largest that has run."""
    exact: int | None = None
    """Largest size that the line allows where :attr:`batch_size` is rounded down to a power of two; else None."""

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
