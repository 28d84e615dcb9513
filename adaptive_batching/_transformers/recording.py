"""The record and page of a ``Trainer`` run, the metrics in its logs, and the columns of its progress bar."""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from tqdm.std import tqdm
from transformers import TrainerCallback

from adaptive_batching._device import Arrival, device_name
from adaptive_batching._memory.meter import PeakSoFar
from adaptive_batching._report.about import about
from adaptive_batching._report.events import FOLDER, StepCost
from adaptive_batching._report.record import Report
from adaptive_batching._report.summary import columns
from adaptive_batching._transformers.adaptive_run import AdaptiveRun
from adaptive_batching._transformers.handed_out import StepInputs

_NOTHING = StepCost(0.0, 0, 0, 0, None)


def watching(method: Callable[..., None]) -> Callable[..., None]:
    """Have a method called in training alone, with the record, and turn its errors into a warning."""

    @functools.wraps(method)
    def guarded(self: TrainingRecord, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.report is not None:
            with self.report.only_warned():
                method(self, self.report, state, **kwargs)

    return guarded


class TrainingRecord(TrainerCallback):
    """Writes the record of a run, without waiting for the device; what goes wrong here is a warning.

    When a step ends, its loss may still be on its way from the device. What is recorded after it waits, too, so that
    the record keeps its order.

    Args:
        run: With ``settings``, those ``given``, and ``ranks``.
        trainer: That trains.
    """

    def __init__(self, run: Any, trainer: Any) -> None:
        self.report: Report | None = None
        """The record while the run trains."""

        self._run, self._trainer = run, trainer
        self._unwritten: collections.deque[tuple[Arrival | None, Callable[[], None]]] = collections.deque()
        self._rate = self._last = 0.0
        self._epoch = 0
        self._peak: PeakSoFar | None = None

    @contextlib.contextmanager
    def of_training(self, *, resumed: bool) -> Iterator[None]:
        """Record the training inside, and an error that ends it; on exit the page is made."""
        settings, ranks, args = self._run.settings, self._run.ranks, self._trainer.args
        folder = Path(settings.report_dir) if settings.report_dir else Path(args.output_dir) / FOLDER
        facts = _about(self._trainer, self._run)
        report = Report(folder, resume=resumed, rank=ranks.rank, ranks=ranks.size, about=facts)
        self.report = report
        self._unwritten.clear()
        self._begin()
        try:
            with report.showing_errors() if ranks.is_next_to_first else contextlib.nullcontext():
                try:
                    yield
                finally:
                    self.flush()
        finally:
            is_dropped, self.report = self.report is None, None
        if not is_dropped:
            report.finish()

    def _begin(self) -> None:
        """Take note that a training begins."""

    def drop(self) -> None:
        """Record nothing of the training that has begun, and leave no folder of it."""
        if self.report is not None:
            with contextlib.suppress(OSError):  # there was one before
                self.report.directory.rmdir()
        self.report = None

    def flush(self, *, waits: bool = False) -> None:
        """Write down what has happened, up to the first loss that is not there yet unless ``waits``."""
        if self.report is not None:
            with self.report.only_warned():
                while self._unwritten:
                    arrival, write = self._unwritten[0]
                    if not (waits or arrival is None or arrival.is_there):
                        break
                    self._unwritten.popleft()
                    write()

    @watching
    def on_pre_optimizer_step(self, report: Report, state: Any, *, optimizer: Any, **kwargs: Any) -> None:
        self._rate = float(optimizer.param_groups[0]["lr"])

    @watching
    def on_evaluate(self, report: Report, state: Any, *, metrics: Any = None, **kwargs: Any) -> None:
        metrics = metrics or {}
        timed = [key.removesuffix("_runtime") for key in metrics if key.endswith("_runtime")]
        prefix = min(timed, key=len, default="eval")
        if (loss := metrics.get(f"{prefix}_loss")) is not None:
            dataset = None if prefix == "eval" else prefix.removeprefix("eval_")
            self._soon(partial(report.validation, self._epoch, state.global_step, float(loss), dataset))
        self._took("validation", report, state.global_step)

    @watching
    def on_save(self, report: Report, state: Any, **kwargs: Any) -> None:
        self._took("checkpoint", report, state.global_step)

    @watching
    def on_push_begin(self, report: Report, state: Any, **kwargs: Any) -> None:
        report.wait_for_page()  # an upload lists the folder, and would miss a part of a page that is there no longer

    def _soon(self, write: Callable[[], None], arrival: Arrival | None = None) -> None:
        """Have something written when all before it is, and the loss in it is there."""
        self._unwritten.append((arrival, write))
        self.flush()

    def _seconds(self) -> float:
        """Return the time since the last call."""
        before, self._last = self._last, time.perf_counter()
        return self._last - before

    def _took(self, what: str, report: Report, step: int) -> None:
        self._soon(partial(report.took, what=what, epoch=self._epoch, step=step, seconds=self._seconds()))


class Recording(TrainingRecord):
    """Writes the record of a run whose batches are split, and its metrics into the logs and progress bars."""

    _run: AdaptiveRun

    def __init__(self, run: AdaptiveRun, trainer: Any) -> None:
        super().__init__(run, trainer)
        self._ran: tuple[StepInputs, torch.Tensor] | None = None
        self._since_log = _NOTHING
        self._next_epoch = 0
        self._resumes_epoch = False

    def _begin(self) -> None:
        self._since_log = _NOTHING

    def ran(self, inputs: StepInputs, loss: torch.Tensor) -> None:
        """Take note of a step whose forwards and backwards are over, and of its loss on this device."""
        self._ran = inputs, loss

    def metrics(self) -> dict[str, float]:
        """Return what the logs get: sizes, recoveries so far, and the speed of this device since the last call."""
        run, cost = self._run, self._since_log
        self._since_log = _NOTHING
        values: dict[str, float] = {"oom_retries": run.num_recoveries, "batch_size": run.batch_size}
        values["global_batch_size"] = run.global_batch_size
        if cost.tokens and cost.padded_tokens:
            values["padding"] = cost.padded_tokens / cost.tokens
            values["tokens_per_second_per_device"] = cost.tokens / cost.seconds
        return values

    @watching
    def on_train_begin(self, report: Report, state: Any, *, lr_scheduler: Any = None, **kwargs: Any) -> None:
        run, step = self._run, state.global_step
        assert run.schedule is not None and run.sizes is not None
        self._peak, self._last = PeakSoFar(self._trainer.args.device), time.perf_counter()
        self._epoch, steps = run.schedule.place_of(step)
        self._next_epoch, self._resumes_epoch = self._epoch, steps > 0
        if run.probe is None:
            report.maximum(run.sizes.maximum, run.sizes.reason)
        else:
            report.probe(run.probe, sequence_length=run.longest or 1, of=run.probed, waited=run.waited)
        if steps:
            report.resume(step, epoch=run.schedule.epochs_after(step), **self._sizes())
        report.plan(run.planned(_rate_of(lr_scheduler), step), decided=True)

    @watching
    def on_epoch_begin(self, report: Report, state: Any, **kwargs: Any) -> None:
        run = self._run
        assert run.schedule is not None
        self._epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        if (last := len(run.schedule.decisions) - 1) < self._epoch:  # the next pass of a stream, whose plan has none
            self._epoch, self._resumes_epoch = last, True
        if not self._resumes_epoch:
            [expected] = [epoch for epoch in run.planned() if epoch.epoch == self._epoch]
            counts = {name: getattr(expected, name) for name in ("steps", "samples", "dropped_samples")}
            values = {**self._sizes(), **counts, "reason": run.schedule.decisions[self._epoch].reason}
            self._soon(partial(report.epoch, epoch=self._epoch, step=state.global_step, **values))
        self._resumes_epoch = False
        self._last = time.perf_counter()

    @watching
    def on_step_end(self, report: Report, state: Any, **kwargs: Any) -> None:
        run, step, epoch, rate = self._run, state.global_step, self._epoch, self._rate
        assert self._ran is not None and run.step is not None
        (inputs, loss), self._ran = self._ran, None
        cost, recoveries = self._cost_of(inputs), run.num_recoveries
        for failed, max_tokens in run.step.runner.take_recovered():
            self._soon(partial(report.recovery, epoch=epoch, step=step, failed=failed, max_tokens=max_tokens))
        samples = sum(map(len, inputs.batches)) * run.ranks.size
        arrival = Arrival(loss)

        def write() -> None:
            report.cost(cost)
            report.step(epoch, step, samples, arrival.value(), rate, recoveries)

        self._soon(write, arrival)
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(bar := getattr(callback, "training_bar", None), tqdm):
                bar.set_postfix_str(columns(run.batch_size, cost, recoveries), refresh=False)

    def _sizes(self) -> dict[str, int]:
        return {"batch_size": self._run.batch_size, "global_batch_size": self._run.global_batch_size}

    def _cost_of(self, inputs: StepInputs) -> StepCost:
        tokens, padded = (inputs.tokens, inputs.padded_tokens) if self._run.is_text else (None, None)
        peak = None if self._peak is None else self._peak.read()
        step = self._run.step
        balance = () if step is None or step.sharing is None else step.sharing.balance
        cost = StepCost(self._seconds(), inputs.forwards, tokens, padded, peak, *balance)
        before = self._since_log
        sums = [(a or 0) + (b or 0) for a, b in ((before.tokens, tokens), (before.padded_tokens, padded))]
        self._since_log = StepCost(before.seconds + cost.seconds, 0, sums[0], sums[1], None)
        return cost


def _rate_of(scheduler: Any) -> Callable[[int], float] | None:
    """Return the learning rate of a step as a function of how many came before, if it is one."""
    if not isinstance(scheduler, LambdaLR):
        return None
    return lambda step: float(scheduler.base_lrs[0] * scheduler.lr_lambdas[0](step))


def _about(trainer: Any, run: AdaptiveRun) -> dict[str, Any]:
    """Return what the record says of a run before it begins."""
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    loaded_from = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    packages = ["torch", "transformers"]  # and those that the trainer's classes are from
    packages += [class_.__module__.partition(".")[0] for class_ in reversed(type(trainer).__mro__)]
    return about(
        type(trainer).__name__,
        loaded_from.rstrip("/").rpartition("/")[2] or type(model).__name__,
        {**trainer.args.to_dict(), **run.given},
        device=device_name(trainer.args.device),
        ranks=run.ranks.size,
        packages=[name for name in dict.fromkeys(packages) if name not in ("builtins", "adaptive_batching")],
    )
