"""Events of a run that can be watched while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adaptive_batching._growth.noise_scale import NoiseEstimate


@dataclass(frozen=True)
class StepCost:
    """The cost of an optimizer step on this rank."""

    seconds: float
    """From the end of the step before, so that waiting for data counts."""

    forwards: int
    """Micro-batches; those of a step that ran again count once."""

    tokens: int | None
    """Tokens of its samples; None where samples hold more than text."""

    padded_tokens: int | None
    """Tokens that were computed, padding included; None where ``tokens`` is."""

    peak_bytes: int | None
    """Most memory that counted against a limit at once; None on a device that does not tell."""


class Watcher:
    """Is told what happens; nothing that it does changes training. Subclasses override what they want to know."""

    def epoch(self, **values: Any) -> None:
        """Take note of the batch size that an epoch starts with."""

    def change(self, **values: Any) -> None:
        """Take note of another batch size for the rest of an epoch."""

    def cost(self, cost: StepCost) -> None:
        """Take note of what the step took that :meth:`step` tells of next; not called with all fields unset."""

    def step(self, epoch: int, step: int, samples: int, loss: float, lr: float, recoveries: int = 0) -> None:
        """Take note of an optimizer step on ``samples`` samples, and of how many have had to run again so far."""

    def validation(self, epoch: int, step: int, loss: float) -> None:
        """Take note of the mean loss on the data that are held out, after optimizer step ``step``."""

    def noise(self, step: int, shown: NoiseEstimate, noise_scale: float | None) -> None:
        """Take note of an estimate of the gradient's noise, and of the noise scale so far, in samples."""
