"""The batch size and the learning rate while training: laid out from the settings, and followed.

The rate is that of stock's schedule, read by samples seen, times a factor that follows the global batch. Checkpoints
hold it without its factor, as if the batch had not grown.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from omegaconf import DictConfig
from torch.optim import Optimizer
from torchtune import config
from torchtune.modules.peft import get_adapter_params

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._device import unchanged_random_state
from adaptive_batching._growth.batch_size_schedule import BatchSizeSchedule, RunShape
from adaptive_batching._growth.controller import Accumulation, BatchController, Decision
from adaptive_batching._growth.increase import IncreaseFunction, resolve
from adaptive_batching._growth.learning_rate_scale import learning_rate_scale
from adaptive_batching._probe.sizing import Sizes
from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._torchtune.stock.host import Host, StockRun

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Increase:
    """The settings of growth, and the increase function that they name."""

    settings: AdaptiveBatchingConfig
    name: str = ""
    function: IncreaseFunction | None = None


def resolve_increase(settings: AdaptiveBatchingConfig) -> Increase:
    """Import the increase function of a config."""
    if settings.batch_increase_function is None:
        return Increase(settings)
    return Increase(settings, *resolve(settings.batch_increase_function))


def make_controller(
    host: Host, run: StockRun, increase: Increase, accumulation: Accumulation, sizes: Sizes, stored: Mapping[str, Any]
) -> BatchController:
    """Return what decides on batch sizes within the maximum, from where a resumed run has been.

    The next increase adds to the stored size, unless the user has changed the configured one.
    """
    configured, start, reason = run.batch_size, sizes.batch_size, sizes.reason
    maximum, function = accumulation.allowed(sizes.maximum), None
    if increase.function is None:
        maximum = start
        if start != configured:
            log.info("batch size %d instead of the configured %d: the largest, bound by %s", start, configured, reason)
        if accumulation.window(start) > 2 * run.window and increase.settings.lr_scaling == "none":
            seen, before = (window * host.num_replicas for window in (accumulation.window(start), run.window))
            log.warning(
                "each optimizer step sees %d samples instead of %d, at the configured learning rate; to keep %d, set "
                "%s, or scale the rate with adaptive_batching.lr_scaling=auto",
                seen, before, before, what_keeps_global_batch(run.accumulation),
            )  # fmt: skip
    else:
        function = increase.function
        if stored and stored["configured_batch_size"] == configured:
            start = int(stored["batch_size"])
        elif stored:
            log.info(
                "batch_size=%d was %d in the run being resumed; starting from %d, not from its last size %d",
                configured, stored["configured_batch_size"], configured, stored["batch_size"],
            )  # fmt: skip
        if stored and stored["maximum"] != maximum:
            log.info("the maximum was %d in the run being resumed; now it is %d", stored["maximum"], maximum)
        start = accumulation.allowed(start)  # a stored one may be of another accumulation
        if start > maximum:
            log.warning("batch size %d is above the maximum of %d, bound by %s; starting there", start, maximum, reason)
            start = maximum
        elif increase.settings.use_maximum_batch_size:
            log.info("batch size starts at %d and grows to at most %d, bound by %s", start, maximum, reason)
    largest = accumulation.window(maximum)
    if largest > run.window and get_adapter_params(host.model):
        log.warning(
            "the global batch reaches %.3g times the configured one, and LoRA tolerates large batches less than full "
            "fine-tuning does, at any rank (Schulman et al. 2025, 'LoRA Without Regret'); compare the held-out loss "
            "with that of a run at the configured size",
            largest / run.window,
        )
    # One rank alone is asked: a function that is random or keeps a state cannot split them.
    ask = host.ranks.on_first
    return BatchController(start, maximum, reason, function, increase.name, accumulation, ask)


def what_keeps_global_batch(accumulation: int) -> str:
    """Return the overrides that fill the device without changing what the optimizer sees."""
    if accumulation > 1:
        return "adaptive_batching.keep_global_batch=True"
    return "micro_batch_size=auto use_maximum_batch_size=False"


def shape_of(host: Host, run: StockRun, settings: AdaptiveBatchingConfig) -> RunShape:
    """Return the shape of a run that ends with its last epoch."""
    return RunShape(
        epochs=run.epochs,
        samples=host.samples_per_rank,
        replicas=host.num_replicas,
        max_steps=run.max_steps_per_epoch,
        decisions=settings.decisions_per_epoch,
        reference_steps=run.steps_per_epoch,
        reference_samples=run.window,
    )


def _batch_schedule_of(
    host: Host, run: StockRun, settings: AdaptiveBatchingConfig, controller: BatchController, shape: RunShape
) -> BatchSizeSchedule:
    rule, optimizer, at_most = settings.lr_scaling, host.optimizers[0], settings.max_lr_scale
    return BatchSizeSchedule(
        controller,
        shape,
        run.rates,
        lambda window: learning_rate_scale(rule, optimizer, window / run.window, at_most),
        initial_batch_size=min(run.batch_size, controller.maximum),
        grows_in_warmup=settings.grow_during_warmup,
    )


def scheduled_rates(cfg_lr_scheduler: DictConfig | None, num_steps: int, initial_lr: float) -> list[float]:
    """Return the learning rate before each step of the stock run, and after the last."""
    if cfg_lr_scheduler is None:
        return [initial_lr]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=initial_lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no step of this optimizer is ever taken
        scheduler = config.instantiate(cfg_lr_scheduler, optimizer, num_training_steps=num_steps, last_epoch=-1)
        rates = [float(optimizer.param_groups[0]["lr"])]
        for _ in range(num_steps):
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


def scheduled_steps(epochs_run: int, stored: Mapping[str, Any], steps_per_epoch: int) -> int:
    """Return how many steps the schedule of a resumed run has taken; ``stored`` may tell of a part of an epoch."""
    within_epoch = stored.get("growth", {}).get("within_epoch")
    part = Fraction(0) if within_epoch is None else Fraction(*within_epoch["schedule"])
    return int((epochs_run + part) * steps_per_epoch)


class LearningRate:
    """Moves a schedule of torch, None for a constant rate, and multiplies its rate by a factor.

    The schedule never sees the factor: many schedulers compute a rate from the last one. So the rate that it has set is
    put back before each of its steps, and multiplied after it.
    """

    def __init__(self, scheduler: Any, optimizers: Sequence[Optimizer]) -> None:
        self._scheduler = scheduler
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        # Of optimizers that step in the backward pass, stock tells one alone the rate before the first step.
        self._have_one_rate = len(optimizers) == 1
        self._scale = 1.0
        self._scheduled: list[Any] = []

    def advance(self, steps: int) -> None:
        if self._scheduler is None or (steps == 0 and self._have_one_rate):
            return
        with self.unscaled():
            for _ in range(steps):
                self._scheduler.step()
            if not self._have_one_rate:
                for group in self._groups:
                    set_rate(group, self._scheduler.get_last_lr()[0])
        self._have_one_rate = True

    def set_scale(self, scale: float) -> None:
        with self.unscaled():
            self._scale = scale

    @contextlib.contextmanager
    def unscaled(self) -> Iterator[None]:
        """Give the optimizers the rate that the schedule has set, inside."""
        for group, scheduled in zip(self._groups, self._scheduled, strict=False):
            set_rate(group, scheduled)
        self._scheduled = []
        yield
        if self._scale != 1:
            self._scheduled = [copy.deepcopy(group["lr"]) for group in self._groups]
            for group, scheduled in zip(self._groups, self._scheduled, strict=True):
                set_rate(group, scheduled * self._scale)


def set_rate(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], torch.Tensor):  # compiled optimizers keep it on the device
        group["lr"].copy_(rate)
    else:
        group["lr"] = rate


@dataclass
class _Interval:
    """Sums on this rank since the last decision."""

    samples: int = 0
    loss: float = 0.0  # summed over samples
    val_loss: float | None = None  # of the last validation


class Growth:
    """Makes loader and learning rate follow the batch schedule of a run."""

    def __init__(
        self,
        host: Host,
        run: StockRun,
        increase: Increase,
        controller: BatchController,
        shape: RunShape,
        stored: Mapping[str, Any],
    ) -> None:
        self._host = host
        self.batch_schedule = _batch_schedule_of(host, run, increase.settings, controller, shape)
        self.learning_rate = LearningRate(run.scheduler, host.optimizers)
        stored = stored.get("growth", {})
        self._losses: list[float] = list(stored.get("losses", []))
        self._val_losses: list[float] = list(stored.get("val_losses", []))
        self._interval = _Interval(**stored.get("interval", {}))
        self.batch_schedule.samples_seen, self.batch_schedule.steps = stored.get("samples_seen", 0), run.first_step
        self.batch_schedule.history = [(epoch, size) for epoch, size in stored.get("history", [])]
        within_epoch = stored.get("within_epoch")
        if within_epoch is not None:
            self.learning_rate.advance(self.batch_schedule.resume(run.first_epoch, within_epoch))
        self._resumes_epoch = within_epoch is not None

    @property
    def global_batch_size(self) -> int:
        """Samples that the optimizer sees in a step."""
        return self.batch_schedule.window * self.batch_schedule.shape.replicas

    def start_epoch(self, number: int) -> Decision | None:
        """Decide on the size that an epoch starts with; None for one that is resumed, whose size is known."""
        if self._resumes_epoch:
            self._resumes_epoch = False
            log.info(
                "resuming epoch %d after %d of %d samples; batch size %d",
                number, self.batch_schedule.seen_in_epoch, self.batch_schedule.shape.samples,
                self.batch_schedule.controller.batch_size,
            )  # fmt: skip
            self._follow()
            return None
        return self._applied(self.batch_schedule.start_epoch(number, self._observe))

    def batches(self) -> Iterator[list[Sample]]:
        """Return the batches of this epoch that are left."""
        if not self.batch_schedule.seen_in_epoch:
            return iter(self._host.loader)
        if self.batch_schedule.epoch_is_over:  # as another batch size leaves no room for a step
            return iter(())
        with unchanged_random_state(self._host.device):  # a new iterator draws a number, and this one is not new
            return self._host.loader.iter_from(self.batch_schedule.seen_in_epoch)

    def take_step(self) -> None:
        """Move both schedules by a step."""
        self.learning_rate.advance(self.batch_schedule.take_step())

    def record_step(self, loss: float) -> Decision | None:
        """Take note of a step that is over, and return what is decided for those that follow, if anything is."""
        interval, window = self._interval, self.batch_schedule.window
        interval.samples += window
        interval.loss += loss * window
        decision = self.batch_schedule.decide_if_due(self._observe)
        return None if decision is None else self._applied(decision)

    def note_validation(self, loss: float) -> None:
        """Take note of the loss of a validation, before :meth:`record_step` of the step that it follows."""
        self._interval.val_loss = loss

    def unscaled(self) -> contextlib.AbstractContextManager[None]:
        """Give the optimizers the rate as scheduled, inside, which a checkpoint holds."""
        return self.learning_rate.unscaled()

    def metrics(self) -> dict[str, float]:
        """Return what is logged in addition to stock's metrics."""
        batch_size = self.batch_schedule.controller.batch_size
        return {"batch_size": batch_size, "global_batch_size": self.global_batch_size}

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples_seen": self.batch_schedule.samples_seen,
            "within_epoch": self.batch_schedule.progress(),
            "history": [list(change) for change in self.batch_schedule.history],
            "losses": self._losses,
            "val_losses": self._val_losses,
            "interval": dataclasses.asdict(self._interval),
        }

    def _applied(self, decision: Decision) -> Decision:
        self.batch_schedule.controller.announce(decision)
        self._follow()
        if decision.batch_size != decision.previous and not self.batch_schedule.controller.decides_early:
            log.info("about %d optimizer steps left if the size stays", self.batch_schedule.steps_left())
        return decision

    def _follow(self) -> None:
        self._host.loader.set_batch_size(self.batch_schedule.controller.batch_size)
        self.learning_rate.set_scale(self.batch_schedule.lr_scale)

    def _observe(self) -> dict[str, Any]:
        interval, self._interval = self._interval, _Interval()
        if interval.samples:
            self._losses.append(interval.loss / interval.samples)
        if interval.val_loss is not None:
            self._val_losses.append(interval.val_loss)
        return {"losses": tuple(self._losses), "val_losses": tuple(self._val_losses)}
