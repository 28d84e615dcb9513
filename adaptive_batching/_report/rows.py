"""Rows of the table of decisions: the optimizer steps from one decision on the batch size to the next."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaptive_batching._report.events import Events


@dataclass
class Row:
    """A decision, and sums over the steps that it was made for."""

    epoch: float
    """Time of the decision, in epochs."""

    batch_size: int
    reason: str
    global_batch_size: int = 0
    steps: int = 0
    samples: int = 0
    loss: float = 0.0
    """Loss summed over samples."""

    last_lr: float = 0.0
    timed_samples: int = 0
    """Samples of the steps whose cost is known. The fields below count these alone."""

    seconds: float = 0.0
    tokens: int = 0
    padded_tokens: int = 0

    @classmethod
    def of(cls, decision: Mapping[str, Any]) -> Row:
        """Return the row of an ``epoch`` or a ``change``, without steps."""
        return cls(decision["epoch"], decision["batch_size"], decision["reason"], decision.get("global_batch_size", 0))

    @property
    def mean_loss(self) -> float:
        """Mean over samples; 0 without any."""
        return self.loss / max(self.samples, 1)

    def add(self, step: Mapping[str, Any]) -> None:
        self.steps += 1
        self.samples += step["samples"]
        self.loss += step["loss"] * step["samples"]
        self.last_lr = step["lr"]
        if step.get("seconds") is not None:
            self.timed_samples += step["samples"]
            self.seconds += step["seconds"]
        if step.get("padded_tokens") is not None:
            self.tokens += step["tokens"]
            self.padded_tokens += step["padded_tokens"]

    def __str__(self) -> str:
        return (
            f"  {self.epoch:>5g} {self.batch_size:>10} {self.steps:>6} {self.samples:>8} {self.mean_loss:>7.3f} "
            f"{self.last_lr:>9.2e}  {self.reason}"
        )


def rows_of(events: Events) -> list[Row]:
    decisions = sorted([*events["epoch"], *events["change"]], key=lambda each: (each["step"], each["epoch"]))
    rows = [Row.of(each) for each in decisions]
    starts = [each["step"] for each in decisions]
    for step in events["step"]:
        row = bisect.bisect_left(starts, step["step"]) - 1  # the last decision before the step
        if row >= 0:
            rows[row].add(step)
    return rows
