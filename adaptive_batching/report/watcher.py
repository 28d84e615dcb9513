"""Events of a run that can be watched while it trains."""

from __future__ import annotations

from typing import Any

from adaptive_batching.growth.noise_scale import NoiseEstimate


class Watcher:
    """Is told what happens; nothing that it does changes training. Subclasses override what they want to know."""

    def epoch(self, **values: Any) -> None:
        """Take note of the batch size that an epoch starts with."""

    def change(self, **values: Any) -> None:
        """Take note of another batch size for the rest of an epoch."""

    def step(self, epoch: int, step: int, samples: int, loss: float, lr: float, recoveries: int = 0) -> None:
        """Take note of an optimizer step on ``samples`` samples, and of how many have had to run again so far."""

    def validation(self, epoch: int, step: int, loss: float) -> None:
        """Take note of the mean loss on the data that are held out, after optimizer step ``step``."""

    def noise(self, step: int, shown: NoiseEstimate, noise_scale: float | None) -> None:
        """Take note of an estimate of the gradient's noise, and of the noise scale so far, in samples."""
