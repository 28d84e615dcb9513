"""Batches that an optimizer step accumulates, as the batch size grows. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


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
