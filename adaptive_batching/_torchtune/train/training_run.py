"""A run while it trains: how far it is, and what is saved and told between its steps."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator, Sequence

import torch

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._probe.does_not_fit import within_memory_limit
from adaptive_batching._report.events import Watcher
from adaptive_batching._torchtune.stock.host import Host, StockRun, TrainingHooks
from adaptive_batching._torchtune.train.growing import Growth

log = logging.getLogger(__name__)


class TrainingRun:
    """A run while it trains, as a loop drives it: begun, trained epoch by epoch, step by step, and ended."""

    def __init__(
        self,
        host: Host,
        run: StockRun,
        hooks: TrainingHooks,
        schedule: Growth,
        settings: AdaptiveBatchingConfig,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.host, self.run, self.hooks, self.schedule, self.watchers = host, run, hooks, schedule, watchers
        self.global_step = run.first_step
        self.limited = functools.partial(within_memory_limit, settings, host.device)
        """Returns a context in which memory is limited."""

        self._limit = contextlib.ExitStack()
        self._save_every = settings.save_every_n_steps  # None for the end of each epoch

    def begin(self) -> None:
        """Begin as stock's loops do."""
        host, run = self.host, self.run
        if host.is_compiled:
            log.info("the model is compiled in its first forward: expect a slow first step")
        if not host.steps_in_backward:
            for optimizer in host.optimizers:
                optimizer.zero_grad()
        if run.profiler is not None:
            run.profiler.start()

    @contextlib.contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        """Decide on the size that an epoch starts with, train it inside, in limited memory, and save it."""
        schedule = self.schedule
        decision = schedule.start_epoch(number)
        if decision is not None:
            expected = schedule.batch_schedule.expected()
            for watcher in self.watchers:
                watcher.epoch(
                    epoch=number, step=self.global_step, batch_size=decision.batch_size,
                    global_batch_size=schedule.global_batch_size, steps=expected.steps, samples=expected.samples,
                    dropped_samples=expected.dropped_samples, reason=decision.reason,
                )  # fmt: skip
        self._note_progress(epochs_run=number)
        self.host.loader.sampler.set_epoch(number)
        with self._limit:
            self._limit.enter_context(self.limited())
            yield
        # Outside of the limit, as nothing may come in the way of a checkpoint.
        is_last = schedule.batch_schedule.run_is_over or number + 1 == self.run.epochs
        self._note_progress(epochs_run=number + 1)
        if self._save_every is None or is_last or self._is_step_to_save:
            self._save(number, is_last=is_last)

    def end(self) -> None:
        if self.run.profiler is not None:
            self.run.profiler.stop()

    def count_step(self, epoch: int) -> None:
        """Count a step of ``epoch`` that has been taken."""
        self.global_step += 1
        self._note_progress(epochs_run=epoch)

    def record_step(self, loss: float) -> bool:
        """Have the schedule take note of a step, and tell what changes; True if it has decided on what follows."""
        decision = self.schedule.record_step(loss)
        if decision is None:
            return False
        if decision.batch_size != decision.previous:
            for watcher in self.watchers:
                watcher.change(
                    epoch=decision.epoch, batch_size=decision.batch_size,
                    global_batch_size=self.schedule.global_batch_size, step=self.global_step, reason=decision.reason,
                )  # fmt: skip
        return True

    def save_if_due(self, epoch: int) -> bool:
        """Save after a step within ``epoch`` if one is due; return True if it was."""
        if not self._is_step_to_save:
            return False
        self._limit.close()
        self._note_progress(epochs_run=epoch)
        self._save(epoch, is_last=False)
        self._limit.enter_context(self.limited())
        return True

    def note_time(self, what: str, epoch: int, start: float) -> None:
        """Tell how long something other than a step has taken since ``start``."""
        for watcher in self.watchers:
            watcher.took(what=what, epoch=epoch, step=self.global_step, seconds=time.perf_counter() - start)

    @contextlib.contextmanager
    def recorded_memory(self, epoch: int, index: int) -> Iterator[None]:
        """Record CUDA's allocations inside, if batch number ``index`` of ``epoch``, both from 0, is one to record."""
        history = self.run.memory_history if self.host.ranks.is_first else None
        begin, end = (history.first, history.last) if history is not None and epoch == 0 else (None, None)
        if index == begin:
            torch.cuda.memory._record_memory_history()
        yield
        if index == end:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _note_progress(self, *, epochs_run: int) -> None:
        steps_per_epoch = self.schedule.batch_schedule.steps_per_epoch
        self.hooks.note_progress(epochs_run=epochs_run, global_step=self.global_step, steps_per_epoch=steps_per_epoch)

    @property
    def _is_step_to_save(self) -> bool:
        return self._save_every is not None and self.global_step % self._save_every == 0

    def _save(self, epoch: int, *, is_last: bool) -> None:
        start = time.perf_counter()
        what, number = ("epoch", epoch) if self._save_every is None else ("step", self.global_step)
        save = self.hooks.save_epoch if self._save_every is None else self.hooks.save_step
        with self.schedule.unscaled():
            save(number, is_last=is_last)
        self.note_time("checkpoint", epoch, start)
        go_on = "" if is_last else "; to resume from it, add resume_from_checkpoint=True"
        log.info("checkpoint of %s %d saved in %.1f s%s", what, number, time.perf_counter() - start, go_on)
