"""The size of a run, and how far one of its epochs is, in samples, optimizer steps and steps of the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from adaptive_batching._growth.accumulation import Accumulation, FixedAccumulation


@dataclass(frozen=True)
class RunShape:
    """The size of a run. Samples are those of one replica: a device that sees different samples from the others.

    Raises:
        ValueError: If a number that has to be at least 1 is less.
    """

    epochs: int
    samples: int
    """Of an epoch, on one replica."""

    accumulation: Accumulation = field(default_factory=FixedAccumulation)
    """Batches of an optimizer step, as the batch size grows."""

    replicas: int = 1
    max_steps: int | None = None
    """Optimizer steps after which an epoch is cut short."""

    decisions: int = 1
    """How often the batch size is decided in an epoch, at equal distances."""

    reference_steps: int = 0
    """Optimizer steps of an epoch in the stock run, at the configured sizes; the schedule is laid out for these."""

    reference_samples: int = 1
    """Samples of each of them, on one replica."""

    run_samples: int | None = None
    """Samples after which the run ends, on one replica, be it within an epoch; None to train on all epochs."""

    def __post_init__(self) -> None:
        for name in ("epochs", "samples", "replicas", "decisions", "reference_samples"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")


@dataclass
class EpochProgress:
    shape: RunShape
    run_samples_left: int | None = None
    """Samples that the run may still take when the epoch begins, on one replica; None for no limit."""

    seen: int = 0
    """Samples on one replica."""

    steps: int = 0
    decided: int = 1
    """Decisions made, the one at the epoch's start included."""

    reference: int = 0
    """Steps of the stock run that are used up."""

    _exact: Fraction = field(default_factory=Fraction)
    """Samples of the stock run that are used up."""

    _rate: Fraction = field(default_factory=lambda: Fraction(1))

    @classmethod
    def resumed(cls, shape: RunShape, progress: Mapping[str, Any], left: int | None) -> EpochProgress:
        """Return the epoch where :meth:`to_resume` of another was read; the run may still take ``left`` samples."""
        used = Fraction(*progress["schedule"]) * shape.reference_steps
        seen = min(-(-progress["samples"] // shape.replicas), shape.samples)
        epoch = cls(
            shape, None if left is None else left + seen, seen, progress["steps"], reference=int(used),
            _exact=used * shape.reference_samples,
        )  # fmt: skip
        epoch.decided = epoch.due + 1
        return epoch

    def to_resume(self) -> dict[str, Any]:
        """Return how far the epoch is: samples of all replicas, steps, and the part of its schedule, a fraction.

        A run may so go on with another number of devices or another batch size.
        """
        return {
            "samples": self.seen * self.shape.replicas,
            "steps": self.steps,
            "schedule": list(self.schedule.as_integer_ratio()),
        }

    @property
    def schedule(self) -> Fraction:
        """Part of the epoch's schedule that is used up; 0 without one."""
        if self.shape.reference_steps == 0:
            return Fraction(0)
        return min(self._exact / (self.shape.reference_steps * self.shape.reference_samples), Fraction(1))

    @property
    def samples(self) -> int:
        """Samples of this epoch on one replica."""
        return self.shape.samples if self.run_samples_left is None else min(self.shape.samples, self.run_samples_left)

    def steps_left(self, window: int) -> int:
        """Return the optimizer steps of ``window`` samples on one replica that are still to come."""
        left = (self.samples - self.seen) // window
        return left if self.shape.max_steps is None else min(left, self.shape.max_steps - self.steps)

    def set_window(self, window: int) -> None:
        """Set the samples of a step from here on, until the next change or the end of the epoch."""
        # Where max_steps ends the epoch, more or fewer samples are to come than the stock run's epoch has left: what is
        # left of its share in the schedule is spread evenly over them.
        left = max(self.shape.reference_steps * self.shape.reference_samples - self._exact, Fraction(0))
        rate = left / max(self.steps_left(window) * window, 1)
        ends_early = self.shape.max_steps is not None and self.shape.samples - self.seen >= window * (
            self.shape.max_steps - self.steps
        )
        self._rate = rate if ends_early else min(Fraction(1), rate)

    def advance(self, window: int) -> int:
        """Record an optimizer step and return how many steps the schedule takes with it."""
        before = self.reference
        self.seen += window
        self.steps += 1
        self._exact += window * self._rate
        if self.steps_left(window) <= 0:
            self.reference = self.shape.reference_steps  # dropped remainders do not add up
        else:
            self.reference = min(int(self._exact / self.shape.reference_samples), self.shape.reference_steps)
        return self.reference - before

    @property
    def due(self) -> int:
        """Number of the latest decision that is due."""
        number = self.shape.decisions * self.seen // self.shape.samples
        if self.shape.max_steps is not None:
            number = max(number, self.shape.decisions * self.steps // self.shape.max_steps)
        return number
