"""The training loop: epochs of steps, in batches whose size may change."""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections.abc import Sequence
from typing import Any

import torch
from torchtune import training as stock_training
from tqdm import tqdm

from adaptive_batching._memory.meter import PeakSoFar, memory_meter
from adaptive_batching._report.events import StepCost
from adaptive_batching._report.summary import columns
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._step.sharing import Sharing
from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.objective import Sums
from adaptive_batching._torchtune.train.gradients import apply_gradients, sum_over_ranks
from adaptive_batching._torchtune.train.splitting import MicroBatch
from adaptive_batching._torchtune.train.training_run import TrainingRun
from adaptive_batching._torchtune.train.training_work import TrainingWork
from adaptive_batching._torchtune.train.validating import Validation


class TrainingLoop:
    """Trains a model on the sum of its samples' gradients.

    A *window* is the batches of one optimizer step, each run as one micro-batch or several; the samples
    of all its batches may be sorted and split together. An epoch ends with its last full window.
    """

    def __init__(
        self,
        training: TrainingRun,
        work: TrainingWork,
        runner: StepRunner[list[list[Sample]], MicroBatch, Sums],
        validation: Validation | None,
    ) -> None:
        self.training = training
        self._host, self._run, self._schedule = training.host, training.run, training.schedule
        self._work, self._runner, self._validation = work, runner, validation
        self._start_window()

    def run(self) -> None:
        training = self.training
        if self._host.ranks.size > 1 and self._host.device.type != "cpu":
            stock_training.cleanup_before_training()  # as stock does on many devices
        self._costs = StepCosts(self._host)
        if self._validation is not None:
            with training.limited():
                self._validation.check_that_longest_fits()
        training.begin()
        for epoch in range(self._run.first_epoch, self._run.epochs):
            with training.epoch(epoch):
                self._run_epoch(epoch)
        training.end()

    def _run_epoch(self, epoch: int) -> None:
        host, run, batch_schedule = self._host, self._run, self._schedule.batch_schedule
        self._window_start = time.perf_counter()  # the last epoch's checkpoint is no part of a step
        total, before = batch_schedule.steps_per_epoch, batch_schedule.steps_in_epoch
        shown = {} if host.ranks.is_first else {"disable": True}  # else as the environment says
        with tqdm(total=total, initial=before, dynamic_ncols=True, **shown) as progress:
            for index, batch in enumerate(self._schedule.batches()):
                with self.training.recorded_memory(epoch, index):
                    ends_window = len(self._window) + 1 == batch_schedule.accumulation
                    self._run_batch(batch, ends_window=ends_window)
                    if ends_window:
                        self._finish_step(epoch, progress)
                if run.profiler is not None and (ends_window or not run.profiles_steps):  # as in stock
                    run.profiler.step()
                if batch_schedule.epoch_is_over:
                    break
                if ends_window and self.training.save_if_due(epoch):
                    self._window_start = time.perf_counter()

    def _start_window(self) -> None:
        self._window: list[list[Sample]] = []
        self._window_start = time.perf_counter()

    def _run_batch(self, batch: list[Sample], *, ends_window: bool) -> None:
        """Gather the gradients of a batch; if it runs out of memory, those of its window again, in smaller parts."""
        if not self._window:
            samples = self._schedule.batch_schedule.accumulation * len(batch)
            self._host.objective.begin_step(self.training.global_step, samples)
            self._runner.begin()  # last: what has begun stays where samples run again
        self._window.append(batch)
        if not self._work.together:
            self._runner.add([batch])
        elif ends_window:
            self._runner.add(self._window)

    def _finish_step(self, epoch: int, progress: Any) -> None:
        host, schedule, training = self._host, self._schedule, self.training
        parts, results = zip(*self._runner.done, strict=True)
        sums = functools.reduce(operator.add, results)
        if not host.steps_in_backward:  # which sums them before
            sums = sum_over_ranks(sums, host.ranks)
        with self._work.stepping():
            grad_norm = apply_gradients(host, sums)
        self._work.splitter.timer.read()
        self._runner.end()
        schedule.take_step()
        training.count_step(epoch)

        loss = float(host.objective.mean_loss(sums))  # read once, as it waits for the device
        seconds = time.perf_counter() - self._window_start
        samples = [sample for batch in self._window for sample in batch]
        cost = self._costs.cost_of(samples, parts, seconds, self._work.splitter.sharing)
        progress.update(1)
        progress.set_description(f"{epoch + 1}|{training.global_step}|Loss: {loss:.4f}")
        progress.set_postfix_str(columns(len(self._window[-1]), cost, self._runner.num_recoveries))
        if training.global_step % self._run.log_every == 0 and host.ranks.is_first:
            self._log_metrics(loss, sums, grad_norm)

        recoveries, recovered = self._runner.num_recoveries, self._runner.take_recovered()
        for watcher in training.watchers:
            for failed, max_tokens in recovered:
                watcher.recovery(epoch=epoch, step=training.global_step, failed=failed, max_tokens=max_tokens)
            watcher.cost(cost)
            seen = len(samples) * host.num_replicas
            rate = float(training.hooks.learning_rate())
            watcher.step(epoch, training.global_step, seen, loss, rate, recoveries)

        # A decision on the next size may read the validation's loss.
        if self._validation is not None and self._validation.is_due(training.global_step):
            self._validate(epoch, self._validation)
        if training.record_step(loss):
            progress.total = schedule.batch_schedule.steps_per_epoch
        self._start_window()

    def _validate(self, epoch: int, validation: Validation) -> None:
        training, start = self.training, time.perf_counter()
        loss = validation.run()
        if self._host.ranks.is_first:
            training.hooks.log_metrics({"val_loss": loss}, training.global_step)
        for watcher in training.watchers:
            watcher.validation(epoch, training.global_step, loss)
        training.note_time("validation", epoch, start)
        self._schedule.note_validation(loss)

    def _log_metrics(self, loss: float, sums: Sums, grad_norm: torch.Tensor | None) -> None:
        host, hooks = self._host, self.training.hooks
        metrics = {
            "loss": loss,
            "lr": hooks.learning_rate(),
            "tokens_per_second_per_gpu": sums.tokens / ((time.perf_counter() - self._window_start) * host.ranks.size),
            **host.objective.metrics(sums),
        }
        if self._run.logs_peak_memory:
            peaks = stock_training.get_memory_stats(device=host.device)
            metrics.update(peaks if self._validation is None else self._validation.with_peaks_before(peaks))
        if grad_norm is not None:
            metrics["grad_norm"] = grad_norm
        metrics |= {**self._schedule.metrics(), "oom_retries": self._runner.num_recoveries}
        hooks.log_metrics(metrics, self.training.global_step)


class StepCosts:
    """Tells what each optimizer step has taken; counters that others may read are left alone while training goes on."""

    def __init__(self, host: Host) -> None:
        self._host = host
        with contextlib.suppress(NotImplementedError, OSError):
            memory_meter(host.device).reset_peak()  # what the probe took is its own
        self._peak = PeakSoFar(host.device)

    def cost_of(
        self, samples: Sequence[Sample], micro_batches: Sequence[MicroBatch], seconds: float, sharing: Sharing | None
    ) -> StepCost:
        objective, tokens, padded = self._host.objective, None, None
        balance = () if sharing is None else sharing.balance
        if balance:  # those that this rank has computed, wherever they were drawn
            samples = [sample for part in micro_batches if not part.is_filler for sample in part.samples] or samples
        if samples and objective.is_text(samples[0]):
            tokens = sum(len(objective.tokens(sample)) for sample in samples)
            padded = sum(part.tokens for part in micro_batches)
        return StepCost(seconds, len(micro_batches), tokens, padded, self._peak.read(), *balance)
