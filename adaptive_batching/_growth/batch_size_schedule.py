"""The schedule of a run whose batch grows: sizes, steps, and where the learning-rate schedule stands.

Everything here is arithmetic on samples and steps. The schedule is gone through once before training, as far as it
can be known then, and followed while training.

The learning rate is that of the *stock run*, the same run at the configured sizes, after as many samples. If the stock
run takes 100 steps of 8 samples in an epoch, a step of 16 uses up two of its steps; one of 12 uses up one and a half,
so that the schedule moves by one step and two in turn. At its end an epoch has used up all 100, whatever was dropped.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from adaptive_batching._growth.controller import BatchController, Decision
from adaptive_batching._growth.increase import GrowthState, IncreaseFunction, IncreaseFunctionError


@dataclass(frozen=True)
class RunShape:
    """The size of a run. Samples are those of one replica: a device that sees different samples from the others.

    Attributes:
        epochs: Epochs of the run; with ``run_samples`` those that it takes at the configured sizes.
        samples: Samples of an epoch.
        max_steps: Optimizer steps after which an epoch is cut short.
        decisions: How often the batch size is decided in an epoch, at equal distances.
        reference_steps: Optimizer steps of an epoch in the stock run, at the configured sizes; the schedule is laid out
            for these.
        reference_samples: Samples of each of them.
        run_samples: Samples after which the run ends, be it within an epoch or after more of them, as larger batches
            leave more of each epoch out; None to train on all epochs.

    Raises:
        ValueError: If a number that has to be at least 1 is less.
    """

    epochs: int
    samples: int
    replicas: int = 1
    max_steps: int | None = None
    decisions: int = 1
    reference_steps: int = 0
    reference_samples: int = 1
    run_samples: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "samples", "replicas", "decisions", "reference_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass
class PlannedEpoch:
    epoch: int
    batch_sizes: list[int]
    global_batch_sizes: list[int]
    steps: int
    samples: int  # of all replicas
    dropped_samples: int
    last_lr: float | None  # None if no function of the step gives it


class BatchSizeSchedule:
    """Batch sizes and schedule of a run: planned, then followed step by step.

    Args:
        controller: Decides.
        shape: The size of the run.
        rates: Learning rate of the stock run before each of its steps, and after the last.
        scale: Samples of an optimizer step on one replica -> factor of the learning rate.
        initial_batch_size: Size that a resumed run began with; None for the controller's.
        grows_in_warmup: Also ask for growth while the learning rate still rises to its peak.
    """

    def __init__(
        self,
        controller: BatchController,
        shape: RunShape,
        rates: Sequence[float] = (1.0,),
        scale: Callable[[int], float] = lambda window: 1.0,
        *,
        initial_batch_size: int | None = None,
        grows_in_warmup: bool = True,
    ) -> None:
        self.controller, self.shape = controller, shape
        self.initial_batch_size = initial_batch_size or controller.batch_size
        self.samples_seen = 0
        self.steps = 0
        self.history: list[tuple[float, int]] = []
        """Where the size changed, in epochs, and to what; the first size included."""

        self._rates, self._scale = rates, scale
        peak = max(rates)
        self._warmup = rates.index(peak) if rates[0] < peak and not grows_in_warmup else 0
        self._decisions: dict[float, Decision] = {}
        self._begin(0, shape.samples)

    def _begin(self, number: int, samples: int, seen: int = 0, steps: int = 0, used: Fraction = Fraction(0)) -> None:
        """Begin an epoch of ``samples``, or go on after ``steps`` in which it has ``seen`` some."""
        self._number, self._samples = number, samples
        self.seen_in_epoch = seen
        """Samples of this epoch that are behind, on one replica."""

        self.steps_in_epoch = steps
        """Optimizer steps of this epoch that are behind."""

        self._used_samples = used  # of the stock run's epoch
        self._used_steps = int(used / self.shape.reference_samples)
        self._used_per_sample = Fraction(1)  # samples of the stock run that a sample uses up
        self._num_decided = 1  # decisions of this epoch, the one at its start included

    @property
    def window(self) -> int:
        """Samples of an optimizer step on one replica."""
        return self.controller.accumulation.window(self.controller.batch_size)

    @property
    def accumulation(self) -> int:
        """Batches of an optimizer step."""
        return self.controller.accumulation.batches_at(self.controller.batch_size)

    @property
    def lr_scale(self) -> float:
        """Factor of the scheduled learning rate."""
        return self._scale(self.window)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of this epoch, if the size does not change any more."""
        return self.steps_in_epoch + self._steps_to_come

    @property
    def epoch_is_over(self) -> bool:
        return self._steps_to_come <= 0

    @property
    def run_is_over(self) -> bool:
        """True if the run may not take the samples of another step, whatever epochs are left."""
        left = self._run_samples_left
        return left < math.inf and min(left, self.shape.samples) < self.window

    @property
    def _run_samples_left(self) -> float:
        """Samples that the run may still take, on one replica; infinite for no limit."""
        if self.shape.run_samples is None:
            return math.inf
        return max(self.shape.run_samples - self.samples_seen // self.shape.replicas, 0)

    @property
    def _steps_to_come(self) -> int:
        left = (self._samples - self.seen_in_epoch) // self.window
        return left if self.shape.max_steps is None else min(left, self.shape.max_steps - self.steps_in_epoch)

    @property
    def _due(self) -> int:
        """Number of the latest decision of this epoch that is due."""
        number = self.shape.decisions * self.seen_in_epoch // self.shape.samples
        if self.shape.max_steps is not None:
            number = max(number, self.shape.decisions * self.steps_in_epoch // self.shape.max_steps)
        return number

    def start_epoch(self, number: int, observe: Callable[[], Mapping[str, Any]] = dict) -> Decision:
        """Decide on the size that an epoch starts with.

        Args:
            number: The epoch, from 0.
            observe: Gives values for the fields of :class:`GrowthState` that training alone can tell.
        """
        self._begin(number, int(min(self.shape.samples, self._run_samples_left)))
        return self._decide(number, observe)

    def progress(self) -> dict[str, Any] | None:
        """Return how far this epoch is, for :meth:`resume`; None at its end.

        A run may go on with another number of devices or another batch size.
        """
        if self.epoch_is_over:
            return None
        total = self.shape.reference_steps * self.shape.reference_samples
        used = min(self._used_samples / total, Fraction(1)) if total else Fraction(0)
        return {
            "samples": self.seen_in_epoch * self.shape.replicas,
            "steps": self.steps_in_epoch,
            "schedule": list(used.as_integer_ratio()),
        }

    def resume(self, number: int, progress: Mapping[str, Any]) -> int:
        """Go on within the epoch ``number``, at the present size; what was due up to there has been decided.

        Args:
            number: The epoch, from 0.
            progress: The :meth:`progress` of the run that is resumed.

        Returns:
            How many steps the schedule takes at once: all of the epoch's, if another size leaves no room for a step.
        """
        shape = self.shape
        seen = min(-(-progress["samples"] // shape.replicas), shape.samples)
        used = Fraction(*progress["schedule"]) * shape.reference_steps * shape.reference_samples
        self._begin(number, int(min(shape.samples, self._run_samples_left + seen)), seen, progress["steps"], used)
        self._num_decided = self._due + 1
        self._use_size(number + seen / shape.samples)
        return shape.reference_steps - self._used_steps if self.epoch_is_over else 0

    def take_step(self) -> int:
        """Record an optimizer step and return how many steps the schedule takes with it."""
        before, reference_steps, window = self._used_steps, self.shape.reference_steps, self.window
        self.samples_seen += window * self.shape.replicas
        self.steps += 1
        self.seen_in_epoch += window
        self.steps_in_epoch += 1
        self._used_samples += window * self._used_per_sample
        self._used_steps = min(int(self._used_samples / self.shape.reference_samples), reference_steps)
        if self.epoch_is_over:
            self._used_steps = reference_steps  # dropped remainders do not add up
        return self._used_steps - before

    def decide_if_due(self, observe: Callable[[], Mapping[str, Any]] = dict) -> Decision | None:
        """Decide on the size of the next steps if a decision is due; the end of an epoch is the start of the next."""
        due = self._due
        if due < self._num_decided or self.epoch_is_over:
            return None
        self._num_decided = due + 1
        return self._decide(self._number + due / self.shape.decisions, observe)

    def plan(self, first_epoch: int = 0) -> list[PlannedEpoch]:
        """Plan the rest of the run, with all decisions that can be made before training."""
        trial, planned = self._trial(), []
        resumed = self._number if self.seen_in_epoch else None
        for number in itertools.count(first_epoch):
            if number != resumed and trial.ends_before(number):
                break
            planned.append(trial._plan_epoch(number, is_resumed=number == resumed))
        return planned

    def expected(self) -> PlannedEpoch:
        """Return this epoch from its start, as far as it is decided."""
        return self._trial()._plan_epoch(self._number)

    def steps_left(self) -> int:
        """Count the optimizer steps left in the run, as far as it is decided."""
        trial = self._trial()
        left = trial._plan_epoch(self._number, is_resumed=True).steps - self.steps_in_epoch
        for number in itertools.count(self._number + 1):
            if trial.ends_before(number):
                break
            left += trial._plan_epoch(number).steps
        return left

    def ends_before(self, number: int) -> bool:
        """Return True if the run has no epoch of that number."""
        return self.run_is_over if self.shape.run_samples is not None else number >= self.shape.epochs

    def _trial(self) -> BatchSizeSchedule:
        """Return a copy to run ahead with; decisions that can be made early are made once, for both."""
        trial = copy.copy(self)
        trial.history = []
        if self.controller.decides_early:
            trial.controller = copy.copy(self.controller)
        else:
            trial.controller = self.controller.without_growth()
            trial._decisions = {}
        return trial

    def _plan_epoch(self, number: int, *, is_resumed: bool = False) -> PlannedEpoch:
        if not is_resumed:
            self.start_epoch(number)
        sizes = [self.controller.batch_size]
        while not self.epoch_is_over:
            self.take_step()
            if self.decide_if_due() is not None and sizes[-1] != self.controller.batch_size:
                sizes.append(self.controller.batch_size)
        replicas = self.shape.replicas
        global_sizes = [self.controller.accumulation.window(size) * replicas for size in sizes]
        seen, dropped = self.seen_in_epoch * replicas, (self._samples - self.seen_in_epoch) * replicas
        end = min((number + 1) * self.shape.reference_steps, len(self._rates) - 1)
        last_lr = self._rates[end] * self.lr_scale
        return PlannedEpoch(number, sizes, global_sizes, self.steps_in_epoch, seen, dropped, last_lr)

    def _decide(self, epoch: float, observe: Callable[[], Mapping[str, Any]]) -> Decision:
        observed = observe()
        if epoch not in self._decisions:
            self._decisions[epoch] = self._new_decision(epoch, observed)
        decision = self._decisions[epoch]
        self.controller.batch_size = decision.batch_size
        self._use_size(epoch)
        return decision

    def _use_size(self, epoch: float) -> None:
        """Take steps of the present size from ``epoch`` on."""
        shape, window, size = self.shape, self.window, self.controller.batch_size
        # If max_steps ends the epoch, the samples to come differ in number from those that the stock run's epoch has
        # left, so the rest of the epoch's learning-rate schedule is spread evenly over them. If the data end it, each
        # sample uses up at most one of the stock run's, and the last step the rest: larger batches drop more samples.
        left = max(shape.reference_steps * shape.reference_samples - self._used_samples, Fraction(0))
        self._used_per_sample = left / max(self._steps_to_come * window, 1)
        steps = math.inf if shape.max_steps is None else shape.max_steps - self.steps_in_epoch
        if shape.samples - self.seen_in_epoch < window * steps:
            self._used_per_sample = min(Fraction(1), self._used_per_sample)
        if not self.history or self.history[-1][1] != size:
            self.history.append((epoch, size))

    def _new_decision(self, epoch: float, observed: Mapping[str, Any]) -> Decision:
        size = self.controller.batch_size
        used = min(self._number * self.shape.reference_steps + self._used_steps, len(self._rates) - 1)
        if used < self._warmup:
            return Decision(epoch, size, size, "kept: the learning rate is warming up")
        peak = max(self._rates[: used + 1])
        state = GrowthState(
            epoch=epoch,
            total_epochs=self.shape.epochs,
            batch_size=size,
            initial_batch_size=self.initial_batch_size,
            maximum=self.controller.maximum,
            global_batch_size=self.window * self.shape.replicas,
            samples_seen=self.samples_seen,
            steps=self.steps,
            lr_decay=self._rates[used] / peak if peak > 0 else 1.0,
            history=tuple(self.history),
        )
        room = None
        if self.seen_in_epoch > 0 or self._samples < self.shape.samples:
            room = self.controller.accumulation.room(self._samples - self.seen_in_epoch)
        return self.controller.decide(dataclasses.replace(state, **observed), room)


def plan_batch_sizes(
    batch_size: int, increase: IncreaseFunction, *, epochs: int, samples: int, maximum: int | None = None
) -> list[int]:
    """Return the batch size of each epoch, for a loop that makes a data loader for every epoch.

    The function is asked at the start of each epoch, as in a recipe: what it adds is added where the sum stays within
    ``maximum``, and what it takes away leaves a batch of 1 or more. The learning rate is taken to be constant, so that
    ``growth.replace_lr_decay`` keeps the size.

    Args:
        batch_size: Samples of a batch in the first epoch.
        increase: ``(epoch, current_batch_size) -> samples to add``, such as ``growth.step()``.
        epochs: Epochs of the run.
        samples: Samples of an epoch.
        maximum: The largest size, such as one that a probe has found; None for ``samples``.

    Raises:
        ValueError: If a number is below 1, or ``batch_size`` above ``maximum``.
        IncreaseFunctionError: If ``increase`` is a factory that is still to be called, or cannot be called with an
            epoch and a batch size, or reads what is known only while training, such as losses, or returns
            something else than a whole number or None.
    """
    maximum = samples if maximum is None else maximum
    name = getattr(increase, "__qualname__", repr(increase))
    return [decision.batch_size for decision in plan_decisions(batch_size, increase, name, epochs, samples, maximum)]


def plan_decisions(
    batch_size: int,
    increase: IncreaseFunction,
    name: str,
    epochs: int,
    samples: int,
    maximum: int,
    ask: Callable[[Callable[[], int]], int] = lambda asked: asked(),
) -> list[Decision]:
    """Return the decision at the start of each epoch, as for :func:`plan_batch_sizes`.

    ``name`` is the function's in messages; ``ask`` is that of :class:`BatchController`.
    """
    for key, value in {"batch_size": batch_size, "epochs": epochs, "samples": samples, "maximum": maximum}.items():
        if not hasattr(value, "__index__") or value < 1:
            raise ValueError(f"{key}={value!r} must be a whole number of at least 1")
    if batch_size > maximum:
        raise ValueError(f"batch_size={batch_size} is above maximum={maximum}; start smaller")
    controller = BatchController(batch_size, maximum, f"maximum={maximum}", increase, name, ask=ask)
    if not controller.decides_early:
        raise IncreaseFunctionError(
            f"{name} needs values that are known only during training, but sizes are planned beforehand; use a "
            "function of (epoch, current_batch_size), or one of adaptive_batching.growth that needs no losses"
        )
    schedule = BatchSizeSchedule(controller, RunShape(epochs, samples))
    schedule.plan()
    return [schedule._decisions[epoch] for epoch in range(epochs)]
