"""The course of a run whose batch grows: sizes, steps, and where the learning-rate schedule stands.

Everything here is arithmetic on samples and steps. The course is gone through once before training, as far as it can be
known then, and followed while training. It imports nothing but the standard library.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from adaptive_batching._growth.accumulation import Accumulation, FixedAccumulation
from adaptive_batching._growth.controller import BatchController, Decision
from adaptive_batching._growth.increase import GrowthState


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
class _Epoch:
    """Progress of an epoch in samples, optimizer steps and steps of the schedule."""

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
    def resumed(cls, shape: RunShape, progress: Mapping[str, Any], left: int | None) -> _Epoch:
        used = Fraction(*progress["schedule"]) * shape.reference_steps
        seen = min(-(-progress["samples"] // shape.replicas), shape.samples)
        epoch = cls(
            shape, None if left is None else left + seen, seen, progress["steps"], reference=int(used),
            _exact=used * shape.reference_samples,
        )  # fmt: skip
        epoch.decided = epoch.due + 1
        return epoch

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


@dataclass
class PlannedEpoch:
    """The expected course of an epoch."""

    epoch: int
    batch_sizes: list[int]
    """One after the other."""

    global_batch_sizes: list[int]
    steps: int
    samples: int
    """Of all replicas."""

    dropped_samples: int
    last_lr: float
    """At its end."""


class Course:
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
        self.controller = controller
        self.shape = shape
        self.initial_batch_size = initial_batch_size or controller.batch_size
        self.samples_seen = 0
        self.steps = 0
        self.history: list[tuple[float, int]] = []
        """Where the size changed, in epochs, and to what; the first size included."""

        self._rates = rates
        self._scale = scale
        peak = max(rates)
        self._warmup = rates.index(peak) if rates[0] < peak and not grows_in_warmup else 0
        self._number = 0
        self._epoch = _Epoch(shape)
        self._decisions: dict[float, Decision] = {}

    @property
    def window(self) -> int:
        """Samples of an optimizer step on one replica."""
        return self.shape.accumulation.window(self.controller.batch_size)

    @property
    def accumulation(self) -> int:
        """Batches of an optimizer step."""
        return self.shape.accumulation.batches_at(self.controller.batch_size)

    @property
    def lr_scale(self) -> float:
        """Factor of the scheduled learning rate."""
        return self._scale(self.window)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of this epoch, if the size does not change any more."""
        return self._epoch.steps + self._epoch.steps_left(self.window)

    @property
    def epoch_is_over(self) -> bool:
        return self._epoch.steps_left(self.window) <= 0

    @property
    def seen_in_epoch(self) -> int:
        """Samples of this epoch that are behind, on one replica."""
        return self._epoch.seen

    @property
    def steps_in_epoch(self) -> int:
        """Optimizer steps of this epoch that are behind."""
        return self._epoch.steps

    @property
    def run_is_over(self) -> bool:
        """True if the run may not take the samples of another step, whatever epochs are left."""
        left = self._run_samples_left
        return left is not None and left < self.window

    @property
    def _run_samples_left(self) -> int | None:
        of_run = self.shape.run_samples
        return None if of_run is None else max(of_run - self.samples_seen // self.shape.replicas, 0)

    def start_epoch(self, number: int, observe: Callable[[], Mapping[str, Any]] = dict) -> Decision:
        """Decide on the size that an epoch starts with.

        Args:
            number: The epoch, from 0.
            observe: Gives values for the fields of :class:`GrowthState` that training alone can tell.
        """
        self._number = number
        self._epoch = _Epoch(self.shape, self._run_samples_left)
        return self._decide(number, observe)

    def progress(self) -> dict[str, Any] | None:
        """Return how far this epoch is, for :meth:`resume`; None at its end.

        Samples are those of all replicas, and the schedule's part is a fraction, so that a run may go on with another
        number of devices or another batch size.
        """
        if self.epoch_is_over:
            return None
        return {
            "samples": self._epoch.seen * self.shape.replicas,
            "steps": self._epoch.steps,
            "schedule": list(self._epoch.schedule.as_integer_ratio()),
        }

    def resume(self, number: int, progress: Mapping[str, Any]) -> int:
        """Go on within the epoch ``number``, at the present size; what was due up to there has been decided.

        Args:
            number: The epoch, from 0.
            progress: The :meth:`progress` of the run that is resumed.

        Returns:
            How many steps the schedule takes at once: all of the epoch's, if another size leaves no room for a step.
        """
        self._number = number
        self._epoch = _Epoch.resumed(self.shape, progress, self._run_samples_left)
        self._epoch.set_window(self.window)
        if not self.history or self.history[-1][1] != self.controller.batch_size:
            self.history.append((number + self._epoch.seen / self.shape.samples, self.controller.batch_size))
        return self.shape.reference_steps - self._epoch.reference if self.epoch_is_over else 0

    def take_step(self) -> int:
        """Record an optimizer step and return how many steps the schedule takes with it."""
        self.samples_seen += self.window * self.shape.replicas
        self.steps += 1
        return self._epoch.advance(self.window)

    def decide_if_due(self, observe: Callable[[], Mapping[str, Any]] = dict) -> Decision | None:
        """Decide on the size of the next steps if a decision is due; the end of an epoch is the start of the next."""
        due = self._epoch.due
        if due < self._epoch.decided or self.epoch_is_over:
            return None
        self._epoch.decided = due + 1
        return self._decide(self._number + due / self.shape.decisions, observe)

    def plan(self, first_epoch: int = 0) -> list[PlannedEpoch]:
        """Plan the rest of the run, with all decisions that can be made before training."""
        trial, planned = self._trial(), []
        resumed = self._number if self._epoch.seen else None
        for number in range(first_epoch, self.shape.epochs):
            if number == resumed or not trial.run_is_over:
                planned.append(trial._plan_epoch(number, is_resumed=number == resumed))
        return planned

    def expected(self) -> PlannedEpoch:
        """Return this epoch from its start, as far as it is decided."""
        return self._trial()._plan_epoch(self._number)

    def steps_left(self) -> int:
        """Count the optimizer steps left in the run, as far as it is decided."""
        later = self._trial()
        rest = sum(later._plan_epoch(number).steps for number in range(self._number + 1, self.shape.epochs))
        return self.steps_per_epoch - self._epoch.steps + rest

    def _trial(self) -> Course:
        """Return a copy to run ahead with; decisions that can be made early are made once, for both."""
        trial = copy.copy(self)
        trial._epoch = copy.copy(self._epoch)
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
        sizes, windows = [self.controller.batch_size], [self.window]
        while not self.epoch_is_over:
            self.take_step()
            if self.decide_if_due() is not None and sizes[-1] != self.controller.batch_size:
                sizes.append(self.controller.batch_size)
                windows.append(self.window)
        replicas = self.shape.replicas
        seen = self._epoch.seen * replicas
        end = min((number + 1) * self.shape.reference_steps, len(self._rates) - 1)
        return PlannedEpoch(
            number, sizes, [window * replicas for window in windows], self._epoch.steps, seen,
            self._epoch.samples * replicas - seen, self._rates[end] * self.lr_scale,
        )  # fmt: skip

    def _decide(self, epoch: float, observe: Callable[[], Mapping[str, Any]]) -> Decision:
        observed = observe()
        decision = self._decisions.get(epoch)
        if decision is None:
            decision = self._decisions[epoch] = self._new_decision(epoch, observed)
        self.controller.batch_size = decision.batch_size
        self._epoch.set_window(self.window)
        if not self.history or self.history[-1][1] != decision.batch_size:
            self.history.append((epoch, decision.batch_size))
        return decision

    def _new_decision(self, epoch: float, observed: Mapping[str, Any]) -> Decision:
        size = self.controller.batch_size
        used = min(self._number * self.shape.reference_steps + self._epoch.reference, len(self._rates) - 1)
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
        if self._epoch.seen > 0 or self._epoch.samples < self.shape.samples:
            room = self.shape.accumulation.room(self._epoch.samples - self._epoch.seen)
        return self.controller.decide(dataclasses.replace(state, **observed), room)


def learning_rate_scale(rule: str, growth: float, at_most: float) -> float:
    """Return the factor of the learning rate where the global batch is ``growth`` times the configured one.

    Args:
        rule: ``"none"``, ``"linear"`` (Goyal et al. 2017, arXiv:1706.02677, for SGD) or ``"sqrt"`` (Malladi et al.
            2022, arXiv:2205.10287, for Adam).
        growth: The ratio of the global batches.
        at_most: Upper bound.
    """
    scales = {"none": 1.0, "linear": growth, "sqrt": math.sqrt(growth)}
    return min(scales[rule], at_most)
