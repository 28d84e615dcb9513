"""The batches and learning rates of stock, as one of the schedules that a loop can follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from adaptive_batching._torchtune.cutting import MicroBatch
from adaptive_batching._torchtune.data import Sample
from adaptive_batching._torchtune.host import Host, StockRun


class StockCourse:
    """The course of a run whose batches are those of stock; ``total_steps`` end it, be it within an epoch."""

    def __init__(self, run: StockRun, total_steps: int | None = None) -> None:
        self.accumulation = run.accumulation
        self.steps_per_epoch = run.steps_per_epoch
        self.steps_in_epoch = 0
        self._steps = run.first_step
        self._most_in_epoch, self._total = run.max_steps_per_epoch, total_steps

    @property
    def run_is_over(self) -> bool:
        return self._steps == self._total

    @property
    def epoch_is_over(self) -> bool:
        return self.run_is_over or self.steps_in_epoch == self._most_in_epoch

    def steps_left(self) -> int:
        return (self._total or 0) - self._steps

    def start_epoch(self) -> None:
        self.steps_in_epoch = 0

    def take_step(self) -> None:
        self._steps += 1
        self.steps_in_epoch += 1


class StockSchedule:
    """Batches and learning rates of a run with all fields unset; methods are those of ``Growth``."""

    adapts = False
    noise = None
    global_batch_size = 0

    def __init__(self, host: Host, run: StockRun, total_steps: int | None = None) -> None:
        self.course = StockCourse(run, total_steps)
        self._loader, self._scheduler = host.loader, run.scheduler

    def start_epoch(self, number: int) -> None:
        self.course.start_epoch()

    def batches(self) -> Iterator[list[Sample]]:
        return iter(self._loader)

    def take_step(self, num_tokens: torch.Tensor) -> None:
        if self._scheduler is not None:
            self._scheduler.step()
        self.course.take_step()

    def record_step(self, loss: float, seconds: float, micro_batches: Sequence[MicroBatch]) -> None: ...

    def note_validation(self, loss: float) -> None: ...

    def unscaled(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def metrics(self) -> dict[str, float]:
        return {}
