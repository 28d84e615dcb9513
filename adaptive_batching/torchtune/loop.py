"""The training loop of every recipe: stock's steps, in batches whose size may change between epochs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from torchtune import training
from torchtune.training.lr_schedulers import get_lr
from tqdm import tqdm

from adaptive_batching.torchtune.cutting import Cutter, MicroBatch
from adaptive_batching.torchtune.data import Sample
from adaptive_batching.torchtune.gradients import (
    apply_gradients,
    gather_gradients,
    in_backward,
    lr_holder,
    sum_over_ranks,
)
from adaptive_batching.torchtune.growing import Growth
from adaptive_batching.torchtune.noise_meter import NoiseMeter
from adaptive_batching.torchtune.recovery import Recovery

log = logging.getLogger(__name__)


class TrainingLoop:
    """Trains a recipe that has been set up.

    With adaptive batching off it does what stock's loop does, operation by operation, and so gives the same bits:
    gradients of an accumulation window that an epoch leaves unfinished are carried into the next one, as in stock.
    With it on, an epoch ends with its last full window.

    A *window* is the batches of one optimizer step, ``gradient_accumulation_steps`` of them. Each runs as one
    micro-batch or several, which changes the gradient by no more than rounding: losses are sums over tokens, and the
    sum over the window is divided by all of its tokens.
    """

    def __init__(self, recipe: Any) -> None:
        self._recipe = recipe
        self._growth: Growth | None = recipe.growth
        times_forwards = self._growth is not None and not self._growth.course.controller.decides_early
        cost, limit = recipe.forward_cost, recipe.token_limit
        self._cutter = Cutter(recipe, recipe.settings.micro_batch_size, cost, limit, learns=times_forwards)
        self._recovery = Recovery(recipe, limit)
        self._start_window()

    def run(self) -> None:
        recipe = self._recipe
        if recipe.ranks.size > 1 and recipe._device.type != "cpu":
            training.cleanup_before_training()  # as stock does on many devices
        if recipe._compile:
            log.info("the model is compiled in its first forward: expect a slow first step")
        if not in_backward(recipe):
            recipe._optimizer.zero_grad()
        recipe._profiler.start()
        for epoch in range(recipe.epochs_run, recipe.total_epochs):
            recipe.start_epoch(epoch)
            with recipe.within_memory_limit():
                self._run_epoch(epoch)
            recipe.epochs_run += 1
            start = time.perf_counter()
            with recipe.checkpointing(epoch):
                recipe.save_checkpoint(epoch=epoch)
            log.info("checkpoint of epoch %d saved in %.1f s", epoch, time.perf_counter() - start)
        recipe._profiler.stop()

    def _run_epoch(self, epoch: int) -> None:
        recipe, growth = self._recipe, self._growth
        recipe._dataloader.sampler.set_epoch(epoch)
        is_first = recipe.ranks.is_first
        steps_done = batches = 0
        if growth is not None:
            self._window_start = time.perf_counter()  # the last epoch's checkpoint is no part of a step
        with tqdm(total=recipe._steps_per_epoch, dynamic_ncols=True, disable=not is_first) as progress:
            for index, batch in enumerate(recipe._dataloader):
                with self._memory_history(epoch, index):
                    batches += 1
                    ends_window = batches == recipe._gradient_accumulation_steps
                    self._run_batch(batch, ends_window=ends_window)
                    if ends_window:
                        batches = 0
                        steps_done += 1
                        self._finish_step(epoch, progress)
                if ends_window or not recipe.profiles_steps:  # as in stock
                    recipe._profiler.step()
                if growth.course.epoch_is_over if growth is not None else steps_done == recipe.max_steps_per_epoch:
                    break

    def _start_window(self) -> None:
        """Begin the batches of an optimizer step."""
        self._window: list[list[Sample]] = []
        self._window_start = time.perf_counter()
        self._loss: Any = 0
        self._num_tokens: Any = 0
        self._ran: list[MicroBatch] = []

    def _run_batch(self, batch: list[Sample], *, ends_window: bool) -> None:
        """Gather the gradients of a batch; if it runs out of memory, those of its window anew, in smaller parts."""
        if not self._window:
            self._recovery.remember()
            if self._noise is not None:
                self._noise.start_step(self._recipe.global_step)
        self._window.append(batch)
        waiting = [batch]
        if self._recipe.settings.cuts_by_length:
            waiting = self._window  # all samples of the step are sorted together
            if not ends_window:
                return
        while not self._gather(waiting):
            self._loss = self._num_tokens = 0
            self._ran = []
            waiting = self._window

    def _gather(self, batches: list[list[Sample]]) -> bool:
        """Run forward and backward of each micro-batch; False if one ran out of memory and all must run again."""
        noise = self._noise if self._noise is not None and self._noise.measures else None
        by_length = self._recipe.settings.cuts_by_length
        apart = noise.samples_apart(sum(map(len, batches))) if noise is not None and by_length else 0
        if apart:
            cuts = self._cutter.cut_apart(batches, apart)
        elif by_length:
            cuts = [self._cutter.cut_together(batches)]
        else:
            min_parts = 1 if noise is None else noise.min_parts(self._recipe._gradient_accumulation_steps)
            cuts = [self._cutter.cut(batch, min_parts, in_order=noise is not None) for batch in batches]
        for number, micro_batches in enumerate(cuts):
            if apart and number == 1 and noise is not None:
                noise.see_part(self._ran)
            if not micro_batches:  # samples without targets
                continue
            outcome = gather_gradients(self._recipe, micro_batches, self._around)
            if outcome.failed:
                self._cutter.forget_timings()
                if noise is not None:
                    noise.forget()
                self._recovery.recover(micro_batches, outcome)
                return False
            self._recovery.note(micro_batches, outcome)
            self._ran += micro_batches
            for loss, num_tokens in outcome.results:
                self._loss = self._loss + loss
                self._num_tokens = self._num_tokens + num_tokens
        return True

    @property
    def _noise(self) -> NoiseMeter | None:
        return None if self._growth is None else self._growth.noise

    @contextlib.contextmanager
    def _around(self, micro_batch: MicroBatch) -> Iterator[None]:
        """What goes on beside a forward and backward."""
        watch = contextlib.nullcontext() if self._noise is None else self._noise.watch(micro_batch)
        with self._cutter.timed(micro_batch), watch:
            yield

    def _finish_step(self, epoch: int, progress: Any) -> None:
        recipe, growth = self._recipe, self._growth
        if not in_backward(recipe):  # else they are summed already
            self._num_tokens = sum_over_ranks(recipe, self._num_tokens)
            self._loss = sum_over_ranks(recipe, self._loss)
        with self._recovery.fatal():
            see_gradient = (lambda: None) if self._noise is None else self._noise.see_gradient
            grad_norm = apply_gradients(recipe, self._num_tokens, see_gradient)
        self._cutter.read_timings()
        self._recovery.step_done()
        if growth is not None:
            growth.take_step(self._num_tokens)
        elif recipe._lr_scheduler is not None:
            recipe._lr_scheduler.step()
        recipe.global_step += 1
        loss = self._loss.item() / self._num_tokens
        if growth is not None:
            loss = float(loss)  # read once: what follows waits for the device no more than stock's loop does
        seconds = time.perf_counter() - self._window_start
        progress.update(1)
        progress.set_description(f"{epoch + 1}|{recipe.global_step}|Loss: {loss}")
        if recipe.global_step % recipe._log_every_n_steps == 0 and recipe.ranks.is_first:
            self._log_metrics(loss, grad_norm)
        recipe.record_step(epoch, loss, get_lr(lr_holder(recipe)), self._recovery.num_recoveries)
        if growth is not None:
            decision = growth.step_done(loss, seconds, self._ran)
            if decision is not None:
                recipe.record_change(decision)
                progress.total = recipe._steps_per_epoch
        self._start_window()

    def _log_metrics(self, loss: torch.Tensor | float, grad_norm: torch.Tensor | None) -> None:
        recipe = self._recipe
        metrics = {
            "loss": loss,
            "lr": get_lr(lr_holder(recipe)),
            "tokens_per_second_per_gpu": self._num_tokens
            / ((time.perf_counter() - self._window_start) * recipe.ranks.size),
        }
        if recipe._device.type != "cpu" and recipe._log_peak_memory_stats:
            metrics.update(training.get_memory_stats(device=recipe._device))
        if grad_norm is not None:
            metrics["grad_norm"] = grad_norm
        metrics.update(recipe.batch_metrics(), **self._recovery.metrics())
        recipe.log_metrics(metrics)

    @contextlib.contextmanager
    def _memory_history(self, epoch: int, index: int) -> Iterator[None]:
        """Record CUDA's allocations while the profiler is active in the first epoch, if it is asked to."""
        recipe = self._recipe
        first = last = -1
        # Only the first rank of a stock recipe knows of its profiler's settings.
        if epoch == 0 and recipe.ranks.is_first and recipe.profiler_profile_memory and recipe._device.type == "cuda":
            first = recipe.profiler_wait_steps + recipe.profiler_warmup_steps
            last = first + recipe.profiler_active_steps
        if index == first:
            torch.cuda.memory._record_memory_history()
        yield
        if index == last:
            torch.cuda.memory._record_memory_history(enabled=None)
