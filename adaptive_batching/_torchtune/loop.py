"""The training loop of every recipe: stock's steps, in batches whose size may change between epochs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torchtune import training
from tqdm import tqdm

from adaptive_batching._report.events import StepCost, Watcher
from adaptive_batching._torchtune.cutting import Cutter, MicroBatch
from adaptive_batching._torchtune.data import Sample
from adaptive_batching._torchtune.gradients import apply_gradients, gather_gradients, sum_over_ranks
from adaptive_batching._torchtune.growing import Growth
from adaptive_batching._torchtune.host import Host, Outlet, StockRun
from adaptive_batching._torchtune.noise_meter import NoiseMeter
from adaptive_batching._torchtune.objective import Sums
from adaptive_batching._torchtune.recovery import Recovery
from adaptive_batching._torchtune.step_cost import StepCosts, recorded_memory
from adaptive_batching._torchtune.validating import Validation

log = logging.getLogger(__name__)


class TrainingLoop:
    """Trains a model.

    With adaptive batching off it does what stock's loop does, operation by operation, and so gives the same bits:
    gradients of an accumulation window that an epoch leaves unfinished are carried into the next one, as in stock.
    With it on, an epoch ends with its last full window.

    A *window* is the batches of one optimizer step. Each runs as one micro-batch or several, which changes the gradient
    by no more than rounding. With ``together`` the samples of all its batches are sorted and cut together.

    Without ``growth`` the batches are those of stock. ``limited`` gives a context in which memory is limited;
    checkpoints are saved outside of it, every ``save_every`` optimizer steps, or at the end of each epoch if None.
    """

    def __init__(
        self,
        host: Host,
        run: StockRun,
        outlet: Outlet,
        cutter: Cutter,
        recovery: Recovery,
        growth: Growth | None = None,
        *,
        together: bool = False,
        watchers: Sequence[Watcher] = (),
        limited: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        save_every: int | None = None,
        validation: Validation | None = None,
    ) -> None:
        self._host = host
        self._run = run
        self._outlet = outlet
        self._cutter = cutter
        self._recovery = recovery
        self._growth = growth
        self._together = together
        self._watchers = watchers
        self._limited = limited
        self._save_every = save_every
        self._validation = validation
        self.global_step = run.first_step
        self._costs: StepCosts | None = None
        self._start_window()

    @property
    def accumulation(self) -> int:
        return self._run.accumulation if self._growth is None else self._growth.course.accumulation

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of this epoch, if the size does not change any more."""
        return self._run.steps_per_epoch if self._growth is None else self._growth.course.steps_per_epoch

    def run(self) -> None:
        host, run = self._host, self._run
        if host.ranks.size > 1 and host.device.type != "cpu":
            training.cleanup_before_training()  # as stock does on many devices
        if host.is_compiled:
            log.info("the model is compiled in its first forward: expect a slow first step")
        if not host.steps_in_backward:
            for optimizer in host.optimizers:
                optimizer.zero_grad()
        if run.profiler is not None:
            run.profiler.start()
        self._costs = None if self._growth is None else StepCosts(host)
        if self._validation is not None:
            with self._limited():
                self._validation.check_that_longest_fits()
        for epoch in range(run.first_epoch, run.epochs):
            self._start_epoch(epoch)
            training_of_epoch = self._run_epoch(epoch)
            is_over = False
            while not is_over:
                with self._limited():
                    is_over = next(training_of_epoch, True)
                self._note_progress(epochs_run=epoch + is_over)
                self._save_if_due(epoch, is_over=is_over)
        if run.profiler is not None:
            run.profiler.stop()

    def _save_if_due(self, epoch: int, *, is_over: bool) -> None:
        by_steps, is_last = self._save_every is not None, is_over and epoch + 1 == self._run.epochs
        if by_steps and not is_last and not self._is_step_to_save:
            return
        start = time.perf_counter()
        with contextlib.nullcontext() if self._growth is None else self._growth.unscaled():
            if by_steps:
                self._outlet.save_step(self.global_step, is_last=is_last)
            else:
                self._outlet.save_epoch(epoch)
        what, number = ("step", self.global_step) if by_steps else ("epoch", epoch)
        go_on = "" if is_last or self._growth is None else "; to go on from it, add resume_from_checkpoint=True"
        log.info("checkpoint of %s %d saved in %.1f s%s", what, number, time.perf_counter() - start, go_on)

    @property
    def _is_step_to_save(self) -> bool:
        return self._save_every is not None and self.global_step % self._save_every == 0

    def _start_epoch(self, epoch: int) -> None:
        if self._growth is None:
            return
        decision = self._growth.start_epoch(epoch)
        if decision is not None:
            expected = self._growth.course.expected()
            for watcher in self._watchers:
                watcher.epoch(
                    epoch=epoch, step=self.global_step, batch_size=decision.batch_size,
                    global_batch_size=self._growth.global_batch_size, steps=expected.steps, samples=expected.samples,
                    dropped_samples=expected.dropped_samples, reason=decision.reason,
                )  # fmt: skip
        self._note_progress(epochs_run=epoch)

    def _note_progress(self, *, epochs_run: int) -> None:
        self._outlet.note_progress(
            epochs_run=epochs_run, global_step=self.global_step, steps_per_epoch=self.steps_per_epoch
        )

    def _run_epoch(self, epoch: int) -> Iterator[bool]:
        """Train an epoch; yield False where a checkpoint within it is due."""
        host, run, growth = self._host, self._run, self._growth
        host.loader.sampler.set_epoch(epoch)
        steps_done = batches = 0
        if growth is not None:
            self._window_start = time.perf_counter()  # the last epoch's checkpoint is no part of a step
        before = 0 if growth is None else growth.course.steps_in_epoch
        total = self.steps_per_epoch
        with tqdm(total=total, initial=before, dynamic_ncols=True, disable=not host.ranks.is_first) as progress:
            for index, batch in enumerate(host.loader if growth is None else growth.batches()):
                with recorded_memory(run.memory_history if host.ranks.is_first else None, epoch, index):
                    batches += 1
                    ends_window = batches == self.accumulation
                    self._run_batch(batch, ends_window=ends_window)
                    if ends_window:
                        batches = 0
                        steps_done += 1
                        self._finish_step(epoch, progress)
                if run.profiler is not None and (ends_window or not run.profiles_steps):  # as in stock
                    run.profiler.step()
                if growth.course.epoch_is_over if growth is not None else steps_done == run.max_steps_per_epoch:
                    break
                if ends_window and self._is_step_to_save:
                    yield False
                    self._window_start = time.perf_counter()

    def _start_window(self) -> None:
        self._window: list[list[Sample]] = []
        self._window_start = time.perf_counter()
        self._sums: Sums | None = None
        self._ran: list[MicroBatch] = []

    def _run_batch(self, batch: list[Sample], *, ends_window: bool) -> None:
        """Gather the gradients of a batch; if it runs out of memory, those of its window again, in smaller parts."""
        if not self._window:
            self._recovery.remember()
            self._host.objective.begin_step(self.global_step, self.accumulation * len(batch))
            if self._noise is not None:
                self._noise.start_step(self.global_step)
        self._window.append(batch)
        waiting = [batch]
        if self._together:
            waiting = self._window
            if not ends_window:
                return
        while not self._gather(waiting):
            self._sums = None
            self._ran = []
            waiting = self._window

    def _gather(self, batches: list[list[Sample]]) -> bool:
        """Run forward and backward of each micro-batch; False if one ran out of memory and all must run again."""
        noise = self._noise if self._noise is not None and self._noise.measures else None
        apart = noise.samples_apart(sum(map(len, batches))) if noise is not None and self._together else 0
        if apart:
            cuts = self._cutter.cut_apart(batches, apart)
        elif self._together:
            cuts = [self._cutter.cut_together(batches)]
        else:
            min_parts = 1 if noise is None else noise.min_parts(self.accumulation)
            cuts = [self._cutter.cut(batch, min_parts, in_order=noise is not None) for batch in batches]
        for number, micro_batches in enumerate(cuts):
            if apart and number == 1 and noise is not None:
                noise.see_part(self._ran)
            if not micro_batches:  # samples without anything to learn from
                continue
            # Counting takes time; a run that is as stock is left alone, however slow.
            counts_retries = self._growth is not None
            outcome = gather_gradients(self._host, micro_batches, self._around, counts_retries=counts_retries)
            if outcome.failed:
                self._cutter.forget_timings()
                if noise is not None:
                    noise.forget()
                self._recovery.recover(micro_batches, outcome)
                return False
            self._recovery.note(micro_batches, outcome)
            self._ran += micro_batches
            for sums in outcome.results:
                self._sums = sums if self._sums is None else self._sums + sums
        return True

    @property
    def _noise(self) -> NoiseMeter | None:
        return None if self._growth is None else self._growth.noise

    @contextlib.contextmanager
    def _around(self, micro_batch: MicroBatch) -> Iterator[None]:
        watch = contextlib.nullcontext() if self._noise is None else self._noise.watch(micro_batch)
        with self._cutter.timed(micro_batch), watch:
            yield

    def _finish_step(self, epoch: int, progress: Any) -> None:
        host, growth = self._host, self._growth
        assert self._sums is not None
        # With optimizers in the backward pass they are summed already.
        sums = self._sums if host.steps_in_backward else sum_over_ranks(self._sums, host.ranks)
        with self._recovery.fatal():
            see_gradient = (lambda: None) if self._noise is None else self._noise.see_gradient
            grad_norm = apply_gradients(host, sums, see_gradient)
        self._cutter.read_timings()
        self._recovery.end_step()
        if growth is not None:
            shown = growth.take_step(sums.tokens)
            if shown is not None and growth.noise is not None:
                for watcher in self._watchers:
                    watcher.noise(self.global_step + 1, shown, growth.noise.scale.samples)
        elif self._run.scheduler is not None:
            self._run.scheduler.step()
        self.global_step += 1
        self._note_progress(epochs_run=epoch)
        loss = host.objective.mean_loss(sums)
        if growth is not None:
            loss = float(loss)  # read once: what follows waits for the device no more than stock's loop does
        seconds = time.perf_counter() - self._window_start
        samples = [sample for batch in self._window for sample in batch]
        cost = None if self._costs is None else self._costs.of(samples, self._ran, seconds)
        progress.update(1)
        progress.set_description(f"{epoch + 1}|{self.global_step}|Loss: {float(loss):.4f}")
        progress.set_postfix_str(self._columns(cost))
        if self.global_step % self._run.log_every == 0 and host.ranks.is_first:
            self._log_metrics(loss, sums, grad_norm)
        recoveries = self._recovery.num_recoveries
        for watcher in self._watchers:
            if cost is not None:
                watcher.cost(cost)
            size = len(samples) * host.num_replicas
            watcher.step(epoch, self.global_step, size, float(loss), float(self._outlet.learning_rate()), recoveries)
        if self._validation is not None and self._validation.is_due(self.global_step):
            self._validate(epoch, self._validation)
        if growth is not None:
            decision = growth.record_step(loss, seconds, self._ran)
            if decision is not None:
                progress.total = self.steps_per_epoch
                if decision.batch_size != decision.previous:
                    for watcher in self._watchers:
                        watcher.change(
                            epoch=decision.epoch, batch_size=decision.batch_size,
                            global_batch_size=growth.global_batch_size, step=self.global_step, reason=decision.reason,
                        )  # fmt: skip
        self._start_window()

    def _validate(self, epoch: int, validation: Validation) -> None:
        loss = validation.run()
        if self._host.ranks.is_first:
            self._outlet.log_metrics({"val_loss": loss}, self.global_step)
        for watcher in self._watchers:
            watcher.validation(epoch, self.global_step, loss)
        if self._growth is not None:
            self._growth.note_validation(loss)

    def _columns(self, cost: StepCost | None) -> str:
        """Return what the progress bar shows besides the loss: batch size, padding and recoveries."""
        columns = [] if self._growth is None else [f"batch {len(self._window[-1])}"]
        if cost is not None and cost.tokens and cost.padded_tokens is not None:
            columns.append(f"padded {cost.padded_tokens / cost.tokens:.2f}x")
        if self._recovery.num_recoveries:
            columns.append(f"recovered {self._recovery.num_recoveries}")
        return ", ".join(columns)

    def _log_metrics(self, loss: torch.Tensor | float, sums: Sums, grad_norm: torch.Tensor | None) -> None:
        host = self._host
        metrics = {
            "loss": loss,
            "lr": self._outlet.learning_rate(),
            "tokens_per_second_per_gpu": sums.tokens / ((time.perf_counter() - self._window_start) * host.ranks.size),
            **host.objective.metrics(sums),
        }
        if self._run.logs_peak_memory:
            peaks = training.get_memory_stats(device=host.device)
            metrics.update(peaks if self._validation is None else self._validation.with_peaks_before(peaks))
        if grad_norm is not None and (host.logs_norm or self._growth is not None):
            metrics["grad_norm"] = grad_norm
        if self._growth is not None:
            metrics.update(self._growth.metrics())
        if self._growth is not None or self._recovery.num_recoveries > 0:  # else as in stock
            metrics.update(self._recovery.metrics())
        self._outlet.log_metrics(metrics, self.global_step)
