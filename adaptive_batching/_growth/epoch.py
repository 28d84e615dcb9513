"""The size of a run, the batches of its optimizer steps, and how far one of its epochs is. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True)
class FixedAccumulation:
    """Every optimizer step takes ``batches`` batches; the global batch grows with the batch size."""

    batches: int = 1

    def __post_init__(self) -> None:
        if self.batches < 1:
            raise ValueError(f"batches={self.batches} must be at least 1")

    def batches_at(self, batch_size: int) -> int:
        """Return the batches of an optimizer step."""
        return self.batches

    def window(self, batch_size: int) -> int:
        """Return the samples of an optimizer step on one replica."""
        return batch_size * self.batches

    def allowed(self, batch_size: int) -> int:
        """Return the largest possible size that is at most ``batch_size``."""
        return batch_size

    def room(self, samples: int) -> int | None:
        """Return the largest size for which ``samples`` fill an optimizer step; None for no limit."""
        return samples // self.batches


@dataclass(frozen=True)
class KeepGlobal:
    """Every optimizer step takes ``samples`` samples on one replica; larger batches need fewer of them."""

    samples: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples={self.samples} must be at least 1")

    def batches_at(self, batch_size: int) -> int:
        """Return the batches of an optimizer step."""
        return self.samples // batch_size

    def window(self, batch_size: int) -> int:
        """Return the samples of an optimizer step on one replica."""
        return self.samples

    def allowed(self, batch_size: int) -> int:
        """Return the largest possible size that is at most ``batch_size``: a divisor of the samples of a step."""
        return next(size for size in range(min(batch_size, self.samples), 0, -1) if self.samples % size == 0)

    def room(self, samples: int) -> int | None:
        """Return the largest size for which ``samples`` fill an optimizer step; None for no limit."""
        return None


@dataclass(frozen=True)
class InParts:
    """Every step takes one batch, which is divided into ``parts`` of equal size."""

    parts: int = 1

    def batches_at(self, batch_size: int) -> int:
        return 1

    def window(self, batch_size: int) -> int:
        return batch_size

    def allowed(self, batch_size: int) -> int:
        return batch_size // self.parts * self.parts

    def room(self, samples: int) -> int | None:
        return self.allowed(samples)


Accumulation = FixedAccumulation | KeepGlobal | InParts


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
    """How far an epoch is, in samples, optimizer steps and steps of the schedule."""

    shape: RunShape
    samples: int
    """Of this epoch, on one replica."""

    seen: int = 0
    """Samples on one replica."""

    steps: int = 0
    decided: int = 1
    """Decisions made, the one at the epoch's start included."""

    reference: int = 0
    """Steps of the stock run that are used up."""

    exact: Fraction = field(default_factory=Fraction)
    """Samples of the stock run that are used up."""

    _rate: Fraction = field(default_factory=lambda: Fraction(1))

    def steps_left(self, window: int) -> int:
        """Return how many optimizer steps of ``window`` samples are still to come."""
        left = (self.samples - self.seen) // window
        return left if self.shape.max_steps is None else min(left, self.shape.max_steps - self.steps)

    def set_window(self, window: int) -> None:
        """Set the samples of a step from here on, until the next change or the end of the epoch."""
        # Where max_steps ends the epoch, more or fewer samples are to come than the stock run's epoch has left: what is
        # left of its share in the schedule is spread evenly over them.
        left = max(self.shape.reference_steps * self.shape.reference_samples - self.exact, Fraction(0))
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
        self.exact += window * self._rate
        if self.steps_left(window) <= 0:
            self.reference = self.shape.reference_steps  # dropped remainders do not add up
        else:
            self.reference = min(int(self.exact / self.shape.reference_samples), self.shape.reference_steps)
        return self.reference - before

    @property
    def due(self) -> int:
        """Number of the latest decision that is due."""
        number = self.shape.decisions * self.seen // self.shape.samples
        if self.shape.max_steps is not None:
            number = max(number, self.shape.decisions * self.steps // self.shape.max_steps)
        return number
