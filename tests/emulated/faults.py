"""Training in which each allocation of a step runs out of memory in turn, and what becomes of it."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from adaptive_batching._dry_run.device import control
from adaptive_batching._dry_run.device.control import Counters
from adaptive_batching._memory.out_of_memory import forget_frames
from adaptive_batching._torchtune.cli.launch import mistakes_in_one_line
from adaptive_batching._torchtune.ppo.ppo_loop import PPOLoop
from adaptive_batching._torchtune.stock.data import index_of
from adaptive_batching._torchtune.stock.objective import Sums
from adaptive_batching._torchtune.train.recipe_work import MicroBatch
from adaptive_batching._torchtune.train.run import TrainingLoop, TrainingRun
from tests.support.overrides import RECOVER

WARM = 2  # steps, of which the first makes the states of the optimizer
PATIENCE = 120  # seconds of a step; then the process ends, and says where it was (pytest shows that with -s)
ON_CUDA = (  # settings of a small run on the device, whose samples are alike, so that steps can be compared
    "device=cuda", "dtype=bf16", "epochs=1", "dataset._component_=tests.emulated.samples.Samples",
    "metric_logger._component_=torchtune.training.metric_logging.StdoutLogger", "~metric_logger.log_dir",
    "log_every_n_steps=1000000", *RECOVER,
)  # fmt: skip


class Finished(Exception):
    """Everything that was to fail has failed."""


@dataclass(frozen=True)
class Fault:
    """The end of a step in which an allocation ran out of memory."""

    number: int  # of the allocation in its step, from 0
    recoveries: int  # times that something ran again
    line: str = ""  # the last of a run that this would have ended; empty where training went on
    place: str = ""  # frames in which it would have ended


@dataclass(frozen=True)
class State:
    """Counters between two steps."""

    counters: Counters
    allocated_bytes: int
    errors: int  # of torch's allocator
    recoveries: int


def sample_of(most: int) -> Callable[[int], Sequence[int]]:
    """Return a function that picks so many numbers of those below another, evenly."""
    return lambda numbers: sorted({numbers * each // most for each in range(most)})


class EachAllocationFails:
    """Has allocations of a training step fail, one in every second step, and compares all steps with undisturbed ones.

    What would have ended the run is noted, its gradients are dropped, and training goes on: nothing is computed, so
    that parameters updated in part do no harm.

    Args:
        which: The allocations that fail, out of the number that a step makes; all of them by default.
        times: Allocations that fail in a row.
        arm: Has the allocation of a number fail in the step that comes, so many times.
        repeats: Each step asks the same of the device. Else one may end before the allocation that is to fail.
    """

    def __init__(
        self,
        which: Callable[[int], Sequence[int]] = range,
        times: int = 1,
        arm: Callable[[int, int], None] = lambda number, times: control.fail_allocations(number, times),
        *,
        repeats: bool = True,
    ) -> None:
        self.faults: list[Fault] = []
        self.before_update = 0  # allocations of an undisturbed step before all gradients are there
        self.samples: list[int | None] = []  # numbers of the samples that have been trained on
        self._which, self._times, self._arm = which, times, arm
        self._repeats = repeats
        self._waiting: list[int] | None = None
        self._failing: int | None = None
        self._states: list[State] = []
        self._reference: Counters | None = None
        self._level = 0  # bytes that are allocated after an undisturbed step
        self._tokens: set[float] = set()
        self._errors: list[tuple[str, str]] = []
        self._reruns = Reruns()

    def step(self, call: Callable[[], Any], drop: Callable[[], None]) -> None:
        """Run a step; one that would end the run is noted and dropped. Raise Finished when all have failed."""
        self._start_step()
        self._run(call, drop)

    def fails_here(self, number: int) -> bool:
        """True if an allocation fails on this rank."""
        return True

    def _start_step(self) -> None:
        """Judge the step that is over, and arm the next one."""
        if not self._states:
            gc.collect()  # of tests before this one
        torch.cuda.synchronize()
        errors = torch.cuda.memory_stats()["num_ooms"]
        state = State(control.counters(), torch.cuda.memory_allocated(), errors, self._reruns.number)
        self._states.append(state)
        if len(self._states) > WARM + 1:
            self._judge(*self._states[-2:])
        if len(self._states) < WARM + 3:
            return
        if self._waiting is None:
            assert self._reference is not None
            self._waiting = list(self._which(self._reference.allocations))
        if self._failing is not None:  # the next step is to be as ever
            self._failing = None
        elif not self._waiting:
            raise Finished
        else:
            self._failing = self._waiting.pop(0)
            if self.fails_here(self._failing):
                self._arm(self._failing, self._times)
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=2)

    def _judge(self, before: State, after: State) -> None:
        about = f"allocation {self._failing}, {self._errors}"
        self._level = self._level or before.allocated_bytes
        lost = after.allocated_bytes - self._level
        assert lost == 0 or self._errors, f"{about}: {lost} bytes more are allocated than after an undisturbed step"
        asked = after.counters - before.counters
        recoveries = after.recoveries - before.recoveries
        if self._failing is None:
            assert not self._errors and recoveries == 0 and after.errors == before.errors, about
            if self._reference is None:
                self._reference = asked
            if self._repeats:
                for name in ("allocations", "kernels", "products"):
                    assert getattr(asked, name) == getattr(self._reference, name), "another step than before a fault"
            return
        control.end_faults()
        if not self._repeats and after.errors == before.errors:
            return
        assert len(self._errors) <= 1, about
        line, place = self._errors.pop() if self._errors else ("", "")
        assert (after.errors > before.errors) == self.fails_here(self._failing), f"{about}: errors {before}, {after}"
        self.faults.append(Fault(self._failing, recoveries, line, place))

    def _run(self, call: Callable[[], Any], drop: Callable[[], None]) -> None:
        try:
            call()
            return
        except Exception as error:
            if self._failing is None:
                raise
            self._errors.append((line_of(error), "".join(traceback.format_tb(error.__traceback__))))
            forget_frames(error)
        control.end_faults()
        drop()

    def _see_gradients(self, loop: TrainingLoop, done: Sequence[tuple[Any, Sums]]) -> None:
        """Take note of what a step has learned from, when all of it has run."""
        self.samples += [index_of(sample) for batch in loop._window for sample in batch]
        self._tokens.add(sum(float(sums.tokens) for _, sums in done))
        assert len(self._tokens) == 1, f"samples are lost or counted twice: {self._tokens} tokens"
        if len(self._states) == WARM + 1:
            self.before_update = (control.counters() - self._states[-1].counters).allocations

    @contextlib.contextmanager
    def in_training(self) -> Iterator[EachAllocationFails]:
        """Have it happen in the recipes that train inside."""
        run, run_window, finish_step = TrainingLoop.run, TrainingLoop._run_window, TrainingLoop._finish_step
        run_rollouts, run_rollout = PPOLoop.run, PPOLoop._run_batch

        def drop(loop: TrainingLoop) -> None:
            loop._runner._discard()
            loop._start_window()

        def window_of(loop: TrainingLoop, *arguments: Any) -> list[tuple[MicroBatch, Sums]]:
            done: list[tuple[MicroBatch, Sums]] = []
            self._start_step()
            self._run(lambda: done.extend(run_window(loop, *arguments)), lambda: drop(loop))
            return done

        def finish(loop: TrainingLoop, epoch: int, progress: Any, done: list[tuple[MicroBatch, Sums]]) -> None:
            if loop._window:  # else it has been dropped
                self._see_gradients(loop, done)
                self._run(lambda: finish_step(loop, epoch, progress, done), lambda: drop(loop))

        def drop_rollout(loop: PPOLoop) -> None:
            loop._stock.forget()
            loop._runner._discard()

        def rollout_of(loop: PPOLoop, *arguments: Any) -> None:
            self.step(lambda: run_rollout(loop, *arguments), lambda: drop_rollout(loop))

        with (
            mock.patch.multiple(TrainingLoop, run=until_finished(run), _run_window=window_of, _finish_step=finish),
            mock.patch.multiple(PPOLoop, run=until_finished(run_rollouts), _run_batch=rollout_of),
            mock.patch.object(TrainingRun, "_save", lambda *_, **__: None),
            self.watched(),
        ):
            yield self

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Count what runs again, end what hangs, and see to it that everything has failed in the end."""
        log = logging.getLogger("adaptive_batching")
        log.addHandler(self._reruns)
        try:
            yield
        finally:
            log.removeHandler(self._reruns)
            faulthandler.cancel_dump_traceback_later()
            control.end_faults()
        assert self._waiting == [] and self.faults, "training ended before all allocations had failed"
        assert len(set(self.samples)) == len(self.samples), "samples have been trained on twice"


class Reruns(logging.Handler):
    """Counts what is said to run again."""

    number = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.number += "running" in record.getMessage() and "again" in record.getMessage()


def until_finished(run: Callable[..., None]) -> Callable[..., None]:
    """Return a loop that ends when everything has failed."""

    def run_until(*arguments: Any) -> None:
        gc.collect()
        gc.freeze()  # else each recovery goes through all that torch has made
        try:
            with contextlib.suppress(Finished):
                run(*arguments)
        finally:
            gc.unfreeze()

    return run_until


def line_of(error: Exception) -> str:
    """Return the line that a run ends with; raise ``error`` itself if it would have ended in a traceback."""
    try:
        with mistakes_in_one_line("outside a forward or backward pass, where nothing can run again"):
            raise error
    except SystemExit as end:
        return str(end)
