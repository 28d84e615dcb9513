"""The training loop: epochs of steps, in batches whose size may change, and what is saved and told between them."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchtune import training as stock_training
from tqdm import tqdm

from adaptive_batching._memory import PeakSoFar, memory_meter
from adaptive_batching._report.events import StepCost, Watcher
from adaptive_batching._report.summary import columns
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._torchtune.stock.host import Host, MemoryHistory, StockRun, TrainingHooks
from adaptive_batching._torchtune.stock.objective import Sums
from adaptive_batching._torchtune.train.gradients import apply_gradients, sum_over_ranks
from adaptive_batching._torchtune.train.growing import Growth, StockSchedule
from adaptive_batching._torchtune.train.noise_meter import NoiseMeter
from adaptive_batching._torchtune.train.splitting import MicroBatch
from adaptive_batching._torchtune.train.training_work import TrainingWork
from adaptive_batching._torchtune.train.validating import Validation

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    host: Host
    run: StockRun
    hooks: TrainingHooks
    schedule: Growth | StockSchedule
    watchers: Sequence[Watcher] = ()
    limited: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Gives a context in which memory is limited; checkpoints are saved outside of it."""

    save_every: int | None = None  # steps from one checkpoint to the next; None for the end of each epoch


class Loop(ABC):
    """Epochs of steps, and what is saved and told between them.

    With adaptive batching off a loop does what stock's does, operation by operation, and so gives the same bits.
    """

    def __init__(self, training: Training) -> None:
        self._host, self._run, self._schedule = training.host, training.run, training.schedule
        self._hooks, self._watchers = training.hooks, training.watchers
        self._limited, self._save_every = training.limited, training.save_every
        self.global_step = training.run.first_step

    def run(self) -> None:
        host, run = self._host, self._run
        if host.is_compiled:
            log.info("the model is compiled in its first forward: expect a slow first step")
        if not host.steps_in_backward:
            for optimizer in host.optimizers:
                optimizer.zero_grad()
        if run.profiler is not None:
            run.profiler.start()
        with contextlib.ExitStack() as self._limits:
            for epoch in range(run.first_epoch, run.epochs):
                self._start_epoch(epoch)
                self._limits.enter_context(self._limited())
                self._run_epoch(epoch)
                self._limits.close()
                is_last = self._schedule.batch_schedule.run_is_over or epoch + 1 == run.epochs
                self._note_progress(epochs_run=epoch + 1)
                if self._save_every is None or is_last or self._is_step_to_save:
                    self._save(epoch, is_last=is_last)
                if is_last:
                    break
        if run.profiler is not None:
            run.profiler.stop()

    @abstractmethod
    def _run_epoch(self, epoch: int) -> None:
        """Train an epoch, and save after its steps."""

    def _save_within(self, epoch: int) -> None:
        """Save within an epoch, where that is due."""
        if self._is_step_to_save:
            self._limits.close()
            self._note_progress(epochs_run=epoch)
            self._save(epoch, is_last=False)
            self._limits.enter_context(self._limited())

    @property
    def _is_step_to_save(self) -> bool:
        return self._save_every is not None and self.global_step % self._save_every == 0

    def _save(self, epoch: int, *, is_last: bool) -> None:
        start = time.perf_counter()
        what, number = ("epoch", epoch) if self._save_every is None else ("step", self.global_step)
        save = self._hooks.save_epoch if self._save_every is None else self._hooks.save_step
        with self._schedule.unscaled():
            save(number, is_last=is_last)
        self._note_time("checkpoint", epoch, start)
        go_on = "; to resume from it, add resume_from_checkpoint=True" if self._schedule.adapts and not is_last else ""
        log.info("checkpoint of %s %d saved in %.1f s%s", what, number, time.perf_counter() - start, go_on)

    def _note_time(self, what: str, epoch: int, start: float) -> None:
        for watcher in self._watchers:
            watcher.took(what=what, epoch=epoch, step=self.global_step, seconds=time.perf_counter() - start)

    def _start_epoch(self, epoch: int) -> None:
        schedule = self._schedule
        decision = schedule.start_epoch(epoch)
        if isinstance(schedule, Growth) and decision is not None:
            expected = schedule.batch_schedule.expected()
            for watcher in self._watchers:
                watcher.epoch(
                    epoch=epoch, step=self.global_step, batch_size=decision.batch_size,
                    global_batch_size=schedule.global_batch_size, steps=expected.steps, samples=expected.samples,
                    dropped_samples=expected.dropped_samples, reason=decision.reason,
                )  # fmt: skip
        self._note_progress(epochs_run=epoch)
        self._host.loader.sampler.set_epoch(epoch)

    def _note_progress(self, *, epochs_run: int) -> None:
        steps_per_epoch = self._schedule.batch_schedule.steps_per_epoch
        self._hooks.note_progress(epochs_run=epochs_run, global_step=self.global_step, steps_per_epoch=steps_per_epoch)

    def _record_step(self, loss: float, seconds: float, micro_batches: Sequence[MicroBatch]) -> bool:
        """Have the schedule take note of a step, and tell what changes; True if it has decided on what follows."""
        decision = self._schedule.record_step(loss, seconds, micro_batches)
        if decision is None:
            return False
        if decision.batch_size != decision.previous:
            for watcher in self._watchers:
                watcher.change(
                    epoch=decision.epoch, batch_size=decision.batch_size,
                    global_batch_size=self._schedule.global_batch_size, step=self.global_step, reason=decision.reason,
                )  # fmt: skip
        return True


class TrainingLoop(Loop):
    """Trains a model on the sum of its samples' gradients.

    A *window* is the batches of one optimizer step, each run as one micro-batch or several; the samples
    of all its batches may be sorted and split together. Where stock's epoch ends within a window, its gradients
    are carried into the next epoch, as in stock; with adaptive batching on, an epoch ends with its last full window.
    """

    def __init__(
        self,
        training: Training,
        work: TrainingWork,
        runner: StepRunner[list[list[Sample]], MicroBatch, Sums],
        validation: Validation | None,
    ) -> None:
        super().__init__(training)
        self._work, self._runner, self._validation = work, runner, validation
        self._costs: StepCosts | None = None
        self._start_window()

    def run(self) -> None:
        if self._host.ranks.size > 1 and self._host.device.type != "cpu":
            stock_training.cleanup_before_training()  # as stock does on many devices
        if self._schedule.adapts:
            self._costs = StepCosts(self._host)
        if self._validation is not None:
            with self._limited():
                self._validation.check_that_longest_fits()
        super().run()

    def _run_epoch(self, epoch: int) -> None:
        host, run, batch_schedule = self._host, self._run, self._schedule.batch_schedule
        batches = 0
        if self._schedule.adapts:
            self._window_start = time.perf_counter()  # the last epoch's checkpoint is no part of a step
        total, before = batch_schedule.steps_per_epoch, batch_schedule.steps_in_epoch
        shown = {} if host.ranks.is_first else {"disable": True}  # else as the environment says
        with tqdm(total=total, initial=before, dynamic_ncols=True, **shown) as progress:
            for index, batch in enumerate(self._schedule.batches()):
                with recorded_memory(run.memory_history if host.ranks.is_first else None, epoch, index):
                    batches += 1
                    ends_window = batches == batch_schedule.accumulation
                    self._run_batch(batch, ends_window=ends_window)
                    if ends_window:
                        batches = 0
                        self._finish_step(epoch, progress)
                if run.profiler is not None and (ends_window or not run.profiles_steps):  # as in stock
                    run.profiler.step()
                if batch_schedule.epoch_is_over:
                    break
                if ends_window and self._is_step_to_save:
                    self._save_within(epoch)
                    self._window_start = time.perf_counter()

    def _start_window(self) -> None:
        self._window: list[list[Sample]] = []
        self._window_start = time.perf_counter()

    def _run_batch(self, batch: list[Sample], *, ends_window: bool) -> None:
        """Gather the gradients of a batch; if it runs out of memory, those of its window again, in smaller parts."""
        if not self._window:
            self._host.objective.begin_step(self.global_step, self._schedule.batch_schedule.accumulation * len(batch))
            if self._noise is not None:
                self._noise.start_step(self.global_step)
            self._runner.begin()  # last: what has begun stays where samples run again
        self._window.append(batch)
        if not self._work.together:
            self._runner.add([batch])
        elif ends_window:
            self._runner.add(self._window)

    @property
    def _noise(self) -> NoiseMeter | None:
        return self._schedule.noise

    def _finish_step(self, epoch: int, progress: Any) -> None:
        host, schedule = self._host, self._schedule
        parts, results = zip(*self._runner.done, strict=True)
        sums = functools.reduce(operator.add, results)
        if not host.steps_in_backward:  # which sums them before
            sums = sum_over_ranks(sums, host.ranks)
        with self._work.stepping():
            see_gradient = (lambda: None) if self._noise is None else self._noise.see_gradient
            grad_norm = apply_gradients(host, sums, see_gradient)
        self._work.splitter.read_timings()
        self._runner.end()
        shown = schedule.take_step(sums.tokens)
        if shown is not None and self._noise is not None:
            for watcher in self._watchers:
                watcher.noise(self.global_step + 1, shown, self._noise.scale.samples)
        self.global_step += 1
        self._note_progress(epochs_run=epoch)
        loss = host.objective.mean_loss(sums)
        if schedule.adapts:
            loss = float(loss)  # read once: what follows waits for the device no more than stock's loop does
        seconds = time.perf_counter() - self._window_start
        samples = [sample for batch in self._window for sample in batch]
        cost = None if self._costs is None else self._costs.cost_of(samples, parts, seconds)
        progress.update(1)
        progress.set_description(f"{epoch + 1}|{self.global_step}|Loss: {float(loss):.4f}")
        size = len(self._window[-1]) if schedule.adapts else None
        progress.set_postfix_str(columns(size, cost, self._runner.num_recoveries))
        if self.global_step % self._run.log_every == 0 and host.ranks.is_first:
            self._log_metrics(loss, sums, grad_norm)
        recoveries = self._runner.num_recoveries
        recovered = self._runner.take_recovered()
        for watcher in self._watchers:
            for failed, max_tokens in recovered:
                watcher.recovery(epoch=epoch, step=self.global_step, failed=failed, max_tokens=max_tokens)
            if cost is not None:
                watcher.cost(cost)
            seen = len(samples) * host.num_replicas
            watcher.step(epoch, self.global_step, seen, float(loss), float(self._hooks.learning_rate()), recoveries)
        if self._validation is not None and self._validation.is_due(self.global_step):
            self._validate(epoch, self._validation)
        if schedule.adapts and self._record_step(float(loss), seconds, parts):
            progress.total = schedule.batch_schedule.steps_per_epoch
        self._start_window()

    def _validate(self, epoch: int, validation: Validation) -> None:
        start = time.perf_counter()
        loss = validation.run()
        if self._host.ranks.is_first:
            self._hooks.log_metrics({"val_loss": loss}, self.global_step)
        for watcher in self._watchers:
            watcher.validation(epoch, self.global_step, loss)
        self._note_time("validation", epoch, start)
        self._schedule.note_validation(loss)

    def _log_metrics(self, loss: torch.Tensor | float, sums: Sums, grad_norm: torch.Tensor | None) -> None:
        host = self._host
        metrics = {
            "loss": loss,
            "lr": self._hooks.learning_rate(),
            "tokens_per_second_per_gpu": sums.tokens / ((time.perf_counter() - self._window_start) * host.ranks.size),
            **host.objective.metrics(sums),
        }
        if self._run.logs_peak_memory:
            peaks = stock_training.get_memory_stats(device=host.device)
            metrics.update(peaks if self._validation is None else self._validation.with_peaks_before(peaks))
        if grad_norm is not None and (host.logs_norm or self._schedule.adapts):
            metrics["grad_norm"] = grad_norm
        metrics.update(self._schedule.metrics())
        if self._schedule.adapts or self._runner.num_recoveries > 0:  # else as in stock
            metrics["oom_retries"] = self._runner.num_recoveries
        self._hooks.log_metrics(metrics, self.global_step)


class StepCosts:
    """Tells what each optimizer step has taken; counters that others may read are left alone while training goes on."""

    def __init__(self, host: Host) -> None:
        self._host = host
        with contextlib.suppress(NotImplementedError, OSError):
            memory_meter(host.device).reset_peak()  # what the probe took is its own
        self._peak = PeakSoFar(host.device)

    def cost_of(self, samples: Sequence[Sample], micro_batches: Sequence[MicroBatch], seconds: float) -> StepCost:
        objective, tokens, padded = self._host.objective, None, None
        if samples and objective.is_text(samples[0]):
            tokens = sum(len(objective.tokens(sample)) for sample in samples)
            padded = sum(part.tokens for part in micro_batches)
        return StepCost(seconds, len(micro_batches), tokens, padded, self._peak.read())


@contextlib.contextmanager
def recorded_memory(history: MemoryHistory | None, epoch: int, index: int) -> Iterator[None]:
    """Record CUDA's allocations inside, if batch number ``index`` of ``epoch``, both from 0, is one to record."""
    begin, end = (history.first, history.last) if history is not None and epoch == 0 else (None, None)
    if index == begin:
        torch.cuda.memory._record_memory_history()
    yield
    if index == end:
        torch.cuda.memory._record_memory_history(enabled=None)
