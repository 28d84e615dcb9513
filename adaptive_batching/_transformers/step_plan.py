"""Where each step of a Trainer's run lies: in which epoch, how much of it is over, and of the learning-rate schedule.

:mod:`adaptive_batching._growth.batch_size_schedule` decides on the sizes of epochs. Trainer asks of any step in any
order, and its epochs end with a smaller batch. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adaptive_batching._growth.batch_size_schedule import PlannedEpoch, plan_decisions
from adaptive_batching._growth.controller import Decision
from adaptive_batching._growth.increase import IncreaseFunction


@dataclass(frozen=True)
class Length:
    """How long a run is: ``max_steps`` optimizer steps, or ``epochs`` if that is not positive."""

    epochs: float
    max_steps: int = -1


@dataclass(frozen=True)
class StepPlan:
    """The steps of a run, epoch by epoch, of as many epochs as it takes."""

    decisions: Sequence[Decision]
    """The size of each epoch, with its reason."""

    batches: Sequence[int]
    """Batches of each epoch, the smaller one at its end included."""

    accumulated: int
    """Batches of an optimizer step."""

    max_steps: int
    """Optimizer steps of the run."""

    reference_steps: int
    """Steps of an epoch at the configured size, which the learning-rate schedule is laid out for."""

    reference_size: int
    """The configured size."""

    @property
    def sizes(self) -> list[int]:
        """Batch size of each epoch."""
        return [decision.batch_size for decision in self.decisions]

    @property
    def steps(self) -> list[int]:
        """Optimizer steps of each epoch, taken as a whole."""
        return [-(-batches // self.accumulated) for batches in self.batches]

    @property
    def is_as_configured(self) -> bool:
        """True if the batch stays at the configured size."""
        return set(self.sizes) == {self.reference_size}

    @property
    def scheduled_steps(self) -> int:
        """Steps that a run of the configured size takes for as many samples."""
        return self.max_steps if self.is_as_configured else math.ceil(self.scheduled(self.max_steps))

    def place_of(self, step: int) -> tuple[int, int]:
        """Return how many whole epochs are over after ``step`` steps of the run, and how many steps of the next."""
        for epoch, steps in enumerate(self.steps):
            if step < steps:
                return epoch, step
            step -= steps
        return len(self.steps), 0

    def epochs_after(self, step: int) -> float:
        """Return how many epochs are over after ``step`` steps of the run."""
        epoch, steps = self.place_of(step)
        return epoch + self.part_of(epoch, steps) if steps else float(epoch)

    def part_of(self, epoch: int, steps: int) -> float:
        """Return how much of an epoch is over after its first ``steps`` steps; later ones are like the last."""
        batches = self.batches[min(epoch, len(self.batches) - 1)]
        return min(steps * self.accumulated, batches) / batches

    def size_at(self, step: int) -> int:
        """Return the batch size of the step that follows ``step`` others."""
        return self.sizes[min(self.place_of(step)[0], len(self.sizes) - 1)]

    def scheduled(self, step: int) -> float:
        """Return how many steps of the configured size have seen as many samples as the first ``step`` of this run."""
        return step if self.is_as_configured else self.epochs_after(step) * self.reference_steps

    def planned(
        self, samples: int, devices: int, rate: Callable[[int], float] | None = None, after: int = 0
    ) -> list[PlannedEpoch]:
        """Return what is left of each epoch after ``after`` steps of the run, on ``samples`` samples.

        ``rate`` is the learning rate of the step that follows a number of others; None if that is not known.
        """
        epochs, start = [], 0
        for epoch, (size, batches, steps) in enumerate(zip(self.sizes, self.batches, self.steps, strict=True)):
            first, last = max(start, after), min(start + steps, self.max_steps)
            if first < last:
                window, padded = size * self.accumulated * devices, batches * size * devices
                # On several devices Accelerate repeats samples, so that the last batch is full on each.
                of_epoch = padded if devices > 1 else min(padded, samples)
                seen = [min((at - start) * window, of_epoch) for at in (first, last)]
                dropped = max(samples - padded, 0) if last == start + steps else 0
                last_lr = None if rate is None else rate(last - 1)
                epochs.append(PlannedEpoch(epoch, [size], [window], last - first, seen[1] - seen[0], dropped, last_lr))
            start += steps
        return epochs


def plan_steps(
    decide: Callable[[int], list[Decision]],
    batches_of: Callable[[int], int],
    accumulated: int,
    length: Length,
    configured: int,
) -> StepPlan:
    """Return the steps of a run whose first ``n`` epochs have the batch sizes of ``decide(n)``.

    ``batches_of`` returns the batches of an epoch at a size, of which each step takes ``accumulated``; ``configured``
    is the size that the run was laid out for.
    """
    epochs = math.ceil(length.epochs) if length.max_steps <= 0 else max(math.ceil(length.epochs), 1)
    while True:
        decisions = decide(epochs)
        batches = [batches_of(decision.batch_size) for decision in decisions]
        steps = [-(-count // accumulated) for count in batches]
        if length.max_steps <= sum(steps):
            break
        epochs += math.ceil((length.max_steps - sum(steps)) / steps[-1])
    full_epochs = sum(steps[:-1])
    part = math.ceil((length.epochs - len(steps) + 1) * steps[-1])
    max_steps = length.max_steps if length.max_steps > 0 else full_epochs + part
    reference_steps = -(-batches_of(configured) // accumulated)
    return StepPlan(decisions, batches, accumulated, max_steps, reference_steps, configured)


def growing(
    start: int,
    maximum: int,
    name: str,
    increase: IncreaseFunction | None,
    samples: int,
    ask: Callable[[Callable[[], int]], int],
) -> Callable[[int], list[Decision]]:
    """Return a function of a number of epochs that gives the decision at the start of each.

    ``ask`` is that of ``BatchController``.
    """

    def decide(epochs: int) -> list[Decision]:
        if increase is None:
            return [Decision(epoch, start, start, "kept") for epoch in range(epochs)]
        return plan_decisions(start, increase, name, epochs, samples, maximum, ask)

    return decide
