"""A run from its settings to its last step: what it decides before it trains, its epochs, and its steps.

Each decision hands its value on to the next: settings -> host -> sizing -> probed -> split policy -> schedule.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torchtune import training as stock_training
from tqdm import tqdm

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._device import random_state, set_random_state
from adaptive_batching._memory.meter import PeakSoFar, memory_meter
from adaptive_batching._probe.does_not_fit import require_room, within_memory_limit
from adaptive_batching._probe.sizing import Sizing
from adaptive_batching._report.events import StepCost, Watcher
from adaptive_batching._report.record import Report
from adaptive_batching._report.summary import columns
from adaptive_batching._step.judge import Audit
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.row_size import RowSize, first_row
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._step.sharing import Sharing
from adaptive_batching._torchtune.stock import compiling
from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._torchtune.stock.host import Host, StockRun, TrainingHooks
from adaptive_batching._torchtune.stock.objective import Sums
from adaptive_batching._torchtune.train.collectives import collectives_of
from adaptive_batching._torchtune.train.exploring import explore_micro_batch_size
from adaptive_batching._torchtune.train.growing import Growth, Increase, make_controller, shape_of
from adaptive_batching._torchtune.train.probing import CacheInputs, Probed, find_maximum, sizing_of
from adaptive_batching._torchtune.train.recipe_work import (
    BatchesAsTheyRun,
    MicroBatch,
    SplitPolicy,
    Splitter,
    TrainingWork,
    apply_gradients,
    parallel_of,
    sum_over_ranks,
)
from adaptive_batching._torchtune.train.rows import lay_end_to_end
from adaptive_batching._torchtune.train.training_step import batch_dependent_module
from adaptive_batching._torchtune.train.validating import HeldOut, Validation
from adaptive_batching._values import ByLength, ConfigError, Explore, Fixed, Whole

log = logging.getLogger(__name__)


class Run:
    """A run of a recipe: :meth:`make_plan` decides what it trains with, and :meth:`train` trains.

    Args:
        report: Of the run.
        stored: State of the run that is resumed; empty for a new one.
        held_out: Data of validations.
    """

    def __init__(
        self,
        host: Host,
        run: StockRun,
        settings: AdaptiveBatchingConfig,
        increase: Increase,
        report: Report,
        stored: Mapping[str, Any],
        held_out: HeldOut | None,
    ) -> None:
        self.host, self.run, self.settings, self.increase = host, run, settings, increase
        self.split_policy = SplitPolicy(
            row_size=RowSize(first_row(host.device.type)),
            balances_ranks=settings.balance_ranks,
        )
        self._report, self._stored, self._held_out = report, stored, held_out
        self.training: TrainingRun | None = None  # until there is a plan
        self._explored: int | str | None = None
        self._validation_limit = TokenLimit()

    def make_plan(self, cache_inputs: CacheInputs) -> None:
        """Decide all that is decided before training: what fits, how batches are split, how they grow."""
        host, run, settings, increase = self.host, self.run, self.settings, self.increase
        report, stored, split_policy = self._report, self._stored, self.split_policy
        sizing = sizing_of(host, run, settings)

        host.objective.equalize_collectives()
        if host.ranks.size > 1:
            collectives, why_not = collectives_of(host, settings, probes=sizing.probes)
            self.host = host = replace(host, collectives=collectives, why_no_recovery=why_not)
        before_memory_is_short(host, settings)
        check_that_splitting_is_exact(sizing, self._batch_dependent)
        if isinstance(settings.micro_batch_size, (ByLength, Explore)) and not settings.padding:
            self.host = host = lay_end_to_end(host)
        compiling.prepare(host, sizes_vary=settings.grows or sizing.bounds_forwards)

        probed = find_maximum(host, run, sizing, cache_inputs, report)
        controller = make_controller(host, run, increase, sizing.accumulation, probed.sizes, stored)
        if stored:
            self.run = run = replace(run, first_step=stored["global_step"])
            restore(stored, host, split_policy)
            self._validation_limit.load_state_dict(stored["validation_limit"])

        split_policy.limit.bound, split_policy.samples_at_longest = probed.capacity, probed.sizes.fits
        size = probed.sizes.micro_batch_size
        if isinstance(size, Explore):
            size = explore_micro_batch_size(host, run, controller, split_policy, stored, report)
            self._explored = size.samples if isinstance(size, Fixed) else str(size)
            compiling.prepare(host, sizes_vary=settings.grows or isinstance(size, ByLength))
        split_policy.size = size

        growth = Growth(host, run, increase, controller, shape_of(host, run, settings), stored)
        self.training = TrainingRun(host, run, settings, probed, split_policy, growth)
        self.training.report_plan(report)

    def train(self, hooks: TrainingHooks, watchers: Sequence[Watcher] = ()) -> None:
        """Train; the record of the run is told what happens before ``watchers`` are."""
        host, run, settings, split_policy = self.host, self.run, self.settings, self.split_policy
        training = self.training
        assert training is not None, "make a plan first"
        recovers = settings.recover_from_oom is not False
        training.attend(hooks, [self._report, *watchers])

        splitter = Splitter(host, split_policy)
        together = isinstance(split_policy.size, ByLength)
        work = TrainingWork(host, splitter, self._batch_dependent, together=together)
        # Uncompiled, flex attention holds a whole matrix of scores; what has stepped in its backward cannot run again.
        is_audited = not compiling.compiles_each_size(host.loader.dataset) and not host.steps_in_backward
        remedy = "leave micro_batch_size null and set a smaller batch_size, or take a loss that is a mean over tokens"
        audit = Audit(work, host.ranks, remedy, settings.audit_every) if is_audited else None
        runner = StepRunner(
            work, parallel_of(host), audit=audit, recovers=recovers,
            largest_that_ran=training.probed.tokens,
        )  # fmt: skip

        validation = None
        if self._held_out is not None:
            probed = training.probed if settings.use_maximum_batch_size else None
            validation = Validation(host, self._held_out, run, self._validation_limit, probed, recovers=recovers)
        TrainingLoop(training, work, runner, validation).run()

    def note_random_state(self) -> None:
        """Keep the random state of every rank for the checkpoint that is saved next."""
        assert self.training is not None, "make a plan first"
        self.training.note_random_state()

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a checkpoint that is saved now holds; None before there is a plan."""
        if self.training is None:
            return None
        state = self.training.state_dict()
        return state | {"explored": self._explored, "validation_limit": self._validation_limit.state_dict()}

    @functools.cached_property
    def _batch_dependent(self) -> Callable[[], str | None]:
        """Names what computes over the batch, which takes some forwards to find."""
        return functools.cache(functools.partial(batch_dependent_module, self.host))


class TrainingLoop:
    """Trains a model on the sum of its samples' gradients.

    A *window* is the batches of one optimizer step, each run as one micro-batch or several; the samples
    of all its batches may be sorted and split together. An epoch ends with its last full window.
    """

    def __init__(
        self,
        training: TrainingRun,
        work: TrainingWork,
        runner: StepRunner[Iterable[list[Sample]], MicroBatch, Sums],
        validation: Validation | None,
    ) -> None:
        self.training = training
        self._host, self._run, self._schedule = training.host, training.run, training.schedule
        self._work, self._runner, self._validation = work, runner, validation
        self._logs = training.host.ranks.is_first
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
        with tqdm(total=total, initial=before, dynamic_ncols=True, **host.ranks.bar_options) as progress:
            batches = enumerate(self._schedule.batches())
            for index, first in batches:
                in_step = itertools.chain([(index, first)], itertools.islice(batches, batch_schedule.accumulation - 1))
                with contextlib.ExitStack() as recording:
                    window = BatchesAsTheyRun(self._watched(epoch, in_step, recording), host.device)
                    done = self._run_window(window, batch_schedule.accumulation * len(first))
                    self._finish_step(epoch, progress, done)
                if run.profiler is not None:
                    run.profiler.step()
                if batch_schedule.epoch_is_over:
                    break
                if self.training.save_if_due(epoch):
                    self._window_start = time.perf_counter()

    def _watched(
        self, epoch: int, batches: Iterable[tuple[int, list[Sample]]], recording: contextlib.ExitStack
    ) -> Iterator[list[Sample]]:
        """Yield the batches of a step, each with its number in ``epoch``; profiled and recorded one by one, as stock's.

        The last one ends with the step, as ``recording`` does.
        """
        for number, (index, batch) in enumerate(batches):
            if number:
                recording.close()
                if self._run.profiler is not None and not self._run.profiles_steps:
                    self._run.profiler.step()
            if self._run.memory_history is not None:
                recording.enter_context(self.training.recorded_memory(epoch, index))
            yield batch

    def _start_window(self) -> None:
        self._window: list[list[Sample]] = []
        self._window_start = time.perf_counter()

    def _run_window(self, window: BatchesAsTheyRun, samples: int) -> list[tuple[MicroBatch, Sums]]:
        """Run forward and backward of a step of so many samples; return its parts, with their sums."""
        self._window = window.read
        self._host.objective.begin_step(self.training.global_step, samples)
        self._work.begin_step()
        return self._runner.step(window)

    def _finish_step(self, epoch: int, progress: Any, done: Sequence[tuple[MicroBatch, Sums]]) -> None:
        host, schedule, training = self._host, self._schedule, self.training
        parts, results = zip(*done, strict=True)
        sums = functools.reduce(operator.add, results)
        if host.ranks.size > 1 and not host.steps_in_backward:  # which sums them before
            sums = sum_over_ranks(sums, host.ranks)
        with self._work.stepping():
            grad_norm = apply_gradients(host, sums)
        if self._work.splitter.makes_rows:
            self._work.splitter.timer.read()
        schedule.take_step()
        training.count_step(epoch)

        loss = float(host.objective.mean_loss(sums))  # read once, as it waits for the device
        seconds = time.perf_counter() - self._window_start
        samples = list(itertools.chain(*self._window))
        cost = self._costs.cost_of(samples, parts, seconds, self._work.splitter.sharing)
        rate, recoveries = float(training.hooks.learning_rate()), self._runner.num_recoveries
        progress.update(1)
        progress.set_description(f"{epoch + 1}|{training.global_step}|Loss: {loss:.4f}")
        progress.set_postfix_str(columns(len(self._window[-1]), cost, recoveries))
        if self._logs and training.global_step % self._run.log_every == 0:
            self._log_metrics(loss, rate, sums, grad_norm)

        recovered = self._runner.take_recovered()
        for watcher in training.watchers:
            for failed, max_tokens in recovered:
                watcher.recovery(epoch=epoch, step=training.global_step, failed=failed, max_tokens=max_tokens)
            watcher.cost(cost)
            watcher.step(epoch, training.global_step, len(samples) * host.num_replicas, loss, rate, recoveries)

        # A decision on the next size may read the validation's loss.
        if self._validation is not None and self._validation.is_due(training.global_step):
            self._validate(epoch, self._validation)
        if training.record_step(loss):
            progress.total = schedule.batch_schedule.steps_per_epoch
        self._start_window()

    def _validate(self, epoch: int, validation: Validation) -> None:
        training, start = self.training, time.perf_counter()
        loss = validation.run()
        if self._logs:
            training.hooks.log_metrics({"val_loss": loss}, training.global_step)
        for watcher in training.watchers:
            watcher.validation(epoch, training.global_step, loss)
        training.note_time("validation", epoch, start)
        self._schedule.note_validation(loss)

    def _log_metrics(self, loss: float, rate: float, sums: Sums, grad_norm: torch.Tensor | None) -> None:
        host, hooks = self._host, self.training.hooks
        metrics = {
            "loss": loss,
            "lr": rate,
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


class TrainingRun:
    """A run whose plan is made, as a loop drives it: epoch by epoch, step by step, until it is saved."""

    def __init__(
        self,
        host: Host,
        run: StockRun,
        settings: AdaptiveBatchingConfig,
        probed: Probed,
        split_policy: SplitPolicy,
        schedule: Growth,
    ) -> None:
        self.host, self.run, self.probed, self.split_policy, self.schedule = host, run, probed, split_policy, schedule
        self.hooks: TrainingHooks
        self.watchers: Sequence[Watcher] = ()
        self.global_step = run.first_step
        self._random_states: list[dict[str, Any]] = []
        self.limited = functools.partial(within_memory_limit, settings, host.device)
        """Returns a context in which memory is limited."""

        self._limit = contextlib.ExitStack()
        self._save_every = settings.save_every_n_steps  # None for the end of each epoch

    def attend(self, hooks: TrainingHooks, watchers: Sequence[Watcher]) -> None:
        """Take the recipe's ``hooks``, and ``watchers`` that are told what happens."""
        self.hooks, self.watchers = hooks, watchers

    def report_plan(self, report: Report) -> None:
        """Record where a resumed run goes on, and what is planned."""
        run, schedule = self.run, self.schedule.batch_schedule
        if schedule.seen_in_epoch:
            at = run.first_epoch + schedule.seen_in_epoch / schedule.shape.samples
            sizes = {"batch_size": schedule.controller.batch_size, "global_batch_size": self.schedule.global_batch_size}
            report.resume(run.first_step, epoch=at, **sizes)
        report.plan(schedule.plan(run.first_epoch), decided=schedule.controller.decides_early)

    def note_random_state(self) -> None:
        """Keep the random state of every rank for the checkpoint that is saved next."""
        self._random_states = self.host.ranks.gather(random_state(self.host.device))  # only the first stores them

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint that is saved now holds."""
        controller, stored = self.schedule.batch_schedule.controller, self.probed.stored
        return {
            "batch_size": controller.batch_size,
            "maximum": controller.maximum,
            "probe": None if stored is None else json.dumps(stored.to_dict()),
            "configured_batch_size": self.run.batch_size,
            "global_step": self.global_step,
            "random_states": self._random_states,
            "order": _order_of(self.host),
            "growth": self.schedule.state_dict(),
            "row_size": self.split_policy.row_size.state_dict(),
            "token_limit": self.split_policy.limit.state_dict(),
        }

    def begin(self) -> None:
        """Begin as stock's loops do."""
        host, run = self.host, self.run
        if host.is_compiled:
            log.info("the model is compiled in its first forward pass: expect a slow first step")
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
        is_last = schedule.batch_schedule.ends_before(number + 1)
        self._note_progress(epochs_run=number + 1)
        if is_last or self._save_every is None or self.global_step % self._save_every == 0:
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
        if self._save_every is None or self.global_step % self._save_every:
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

    def _save(self, epoch: int, *, is_last: bool) -> None:
        start = time.perf_counter()
        what, number = ("epoch", epoch) if self._save_every is None else ("step", self.global_step)
        save = self.hooks.save_epoch if self._save_every is None else self.hooks.save_step
        with self.schedule.unscaled():
            save(number, is_last=is_last)
        self.note_time("checkpoint", epoch, start)
        go_on = "" if is_last else "; to resume from it, add resume_from_checkpoint=True"
        log.info("checkpoint of %s %d saved in %.1f s%s", what, number, time.perf_counter() - start, go_on)


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


def restore(stored: Mapping[str, Any], host: Host, split_policy: SplitPolicy) -> None:
    """Put back what a checkpoint holds of splitting and of random numbers; warn if the order of data is another."""
    split_policy.limit.load_state_dict(stored["token_limit"])
    split_policy.row_size.load_state_dict(stored["row_size"])
    if stored["growth"]["within_epoch"] is not None:
        _warn_of_another_order(stored["order"], _order_of(host))
    ranks = host.ranks
    if len(stored["random_states"]) == ranks.size:
        set_random_state(stored["random_states"][ranks.rank], host.device)


def before_memory_is_short(host: Host, settings: AdaptiveBatchingConfig) -> None:
    """Refuse a limit that leaves no room, and start what could not be started later."""
    if settings.memory_limit is not None and parallel_of(host).agrees:
        with contextlib.suppress(NotImplementedError):  # of a device whose memory cannot be measured
            require_room(settings, memory_meter(host.device), host.ranks)
    # The thread that watches progress bars takes some memory, and if it cannot start, Python waits for good.
    tqdm(disable=True).close()


def check_that_splitting_is_exact(sizing: Sizing, batch_dependent: Callable[[], str | None]) -> None:
    """Refuse to split the batches of a model that computes over the batch dimension."""
    what, remedy = f"micro_batch_size={sizing.settings.micro_batch_size}", "leave micro_batch_size unset"
    if sizing.settings.micro_batch_size == Whole():
        what, remedy = "adaptive_batching.grow_beyond_memory=True", "set grow_beyond_memory=False"
    if sizing.splits and (module := batch_dependent()) is not None:
        raise ConfigError(
            f"{what} would change the result: {module} computes over the batch, so its parts do not add up; {remedy}"
        )


def _order_of(host: Host) -> dict[str, Any]:
    """Return what the order of the samples in an epoch depends on, by the key of the config that it comes from."""
    return {"dataset": len(host.loader.dataset), "shuffle": getattr(host.loader.sampler, "shuffle", None)}


def _warn_of_another_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key, value in now.items():
        if before.get(key, value) != value:
            what = f"{value} samples in dataset, where" if key == "dataset" else f"{key}={value}, where it was"
            log.warning(
                "%s %s in the run being resumed: the epoch continues in another order, repeating some samples and "
                "skipping others; set %s back to keep the order",
                what, f"there were {before[key]}" if key == "dataset" else before[key], key,
            )  # fmt: skip
