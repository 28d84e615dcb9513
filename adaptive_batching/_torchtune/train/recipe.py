"""Code that every recipe shares: stock's set-up, extended where it has to be, and our loop in place of stock's.

With no field set, each method here is stock's own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader
from torchtune import training
from torchtune.recipe_interfaces import FTRecipeInterface
from torchtune.training.lr_schedulers import get_lr

from adaptive_batching._device import unchanged_random_state
from adaptive_batching._memory.unused_memory import keep_little_on_the_host, little_to_collect
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._report.events import Watcher
from adaptive_batching._report.record import Report
from adaptive_batching._torchtune.stock import checkpoints
from adaptive_batching._torchtune.stock import host as hosts
from adaptive_batching._torchtune.stock.data import STATE_KEY, SampleLoader, check_data_fills_a_step
from adaptive_batching._torchtune.stock.loading import replaced_in_torchtune
from adaptive_batching._torchtune.stock.losses import OF_STOCK, next_token
from adaptive_batching._torchtune.stock.objective import Objective, StockParts
from adaptive_batching._torchtune.train.growing import (
    resolve_increase,
    scheduled_rates,
    scheduled_steps,
    set_rate,
)
from adaptive_batching._torchtune.train.probing import CacheInputs, stored_probe_in
from adaptive_batching._torchtune.train.run import Run
from adaptive_batching._torchtune.train.settings import describe, read_settings, read_validation, report_dir
from adaptive_batching._torchtune.train.stock_config import cannot_be_loaded, in_short
from adaptive_batching._torchtune.train.validating import check_validation, hold_out
from adaptive_batching._values import ConfigError

log = logging.getLogger(__name__)

_Method = TypeVar("_Method", bound=Callable[..., Any])


def unless_off(method: _Method) -> _Method:
    """Call stock's method instead of ``method`` when no field is set."""

    @functools.wraps(method)
    def run(self: AdaptiveBatching, *args: Any, **kwargs: Any) -> Any:
        if self.is_on:
            return method(self, *args, **kwargs)
        if self.watchers:
            raise ConfigError(
                "no field is set, so the recipe is stock's own, which does not notify watchers; set "
                "adaptive_batching.recover_from_oom=True, or another field"
            )
        return getattr(super(AdaptiveBatching, self), method.__name__)(*args, **kwargs)

    return cast("_Method", run)


class PlannedRun(Protocol):
    """A run whose plan is made, as a recipe sees it."""

    def train(self, hooks: Any, watchers: Sequence[Watcher]) -> None: ...

    def note_random_state(self) -> None: ...

    def state_dict(self) -> dict[str, Any] | None: ...


class AdaptiveBatching:
    """Mixed into a stock fine-tuning recipe, before it in the list of bases.

    With no field set, set-up, training and checkpoints are stock's own. A validation and a subclass's own
    ``make_objective`` count as fields.

    A subclass extends the methods of stock's set-up (``_setup_model`` and the like), or names another
    ``make_objective``; attributes that it changes when ``setup`` has ended are not looked at again.

    Raises:
        TypeError: When a class is made that names a stock recipe before this one, or overrides ``_loss_step``.
    """

    # Set by the stock recipe
    _dataloader: SampleLoader
    _device: torch.device
    _gradient_accumulation_steps: int
    _metric_logger: Any
    _resume_from_checkpoint: bool
    _steps_per_epoch: int
    epochs_run: int
    global_step: int
    total_epochs: int

    make_objective: Callable[[StockParts], Objective] = staticmethod(next_token)
    """Makes the recipe's objective."""

    validates = True
    """True if the loss is a mean over target tokens, which a validation computes."""

    takes_objective = True
    """False for a recipe whose loss is no objective's, so that there is none to replace."""

    loads: Mapping[str, str] = {
        "checkpointer": "model", "ref_checkpointer": "model", "teacher_checkpointer": "teacher_model",
    }  # fmt: skip
    """Key of a checkpointer in a config -> that of the model whose weights it loads; first that which is trained."""

    prepare: Callable[[DictConfig], None] = staticmethod(lambda cfg: None)
    """Called with the config before the recipe is launched."""

    check_settings: Callable[[DictConfig], None] = staticmethod(lambda cfg: None)
    """Called with the config before anything is loaded, and by ``validate``; refuses what it asks for in vain."""

    _batches_of_a_step: int | None = None
    """Batches of the loader that an optimizer step takes, at least; None for as many as stock accumulates."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[: cls.__mro__.index(AdaptiveBatching)]:
            if FTRecipeInterface in base.__mro__ and not issubclass(base, AdaptiveBatching):
                raise TypeError(
                    f"class {cls.__name__}: {base.__name__} comes before AdaptiveBatching in the bases, so its setup "
                    "and train would run instead of ours; put AdaptiveBatching first"
                )
            if "_loss_step" in vars(base):
                raise TypeError(
                    f"class {cls.__name__}: _loss_step of {base.__name__} would not be called; give the class a "
                    f"make_objective, whose objective computes the loss"
                )

    def __init__(self, cfg: DictConfig) -> None:
        type(self).check_settings(cfg)
        has_own_objective = type(self).make_objective not in OF_STOCK
        self._settings = read_settings(cfg, is_on=has_own_objective)
        self._increase = resolve_increase(self._settings)
        self._validation = read_validation(cfg)
        check_validation(self._validation, self._increase, type(self))
        self.is_on = self._settings.enabled or self._validation is not None or has_own_objective
        if self.is_on and cfg.device == "cpu":
            keep_little_on_the_host()
        if not self.is_on and cfg.resume_from_checkpoint and not cfg.get("enable_async_checkpointing", False):
            checkpoints.refuse_step_checkpoints(cfg)  # asynchronous ones have folders of their own
        self._validation_loader: SampleLoader | None = None
        self.watchers: list[Watcher] = []
        """Are notified of what happens while the recipe trains."""

        self._checkpoints = Path(cfg.checkpointer.output_dir)
        self._backward_optimizers = hosts.OptimizersInBackward()
        self._stored: dict[str, Any] = {}
        self._rates: list[float] | None = None
        self._planned_run: PlannedRun | None = None
        self._report: Report | None = None
        self._warned_of_logger = False
        super().__init__(cfg=cfg)  # type: ignore[call-arg]
        self.ranks = Ranks(self._device)

    @unless_off
    def setup(self, cfg: DictConfig) -> None:
        # First, as a folder that cannot be written would show only after minutes.
        directory, resume = report_dir(cfg, self._settings), bool(cfg.resume_from_checkpoint)
        about = describe(cfg, type(self).__name__, self._device, self.ranks.size)
        report = Report(directory, resume=resume, rank=self.ranks.rank, ranks=self.ranks.size, about=about)
        self._report = report
        with self._at_work(report):
            with checkpoints.from_last_checkpoint(cfg) if resume else contextlib.nullcontext():
                super().setup(cfg=cfg)  # type: ignore[misc]
            self._make_plan(cfg, report)

    def _make_plan(self, cfg: DictConfig, report: Report) -> None:
        if self._rates is None:  # stock has no schedule
            steps = self.total_epochs * self._steps_per_epoch
            self._rates = scheduled_rates(None, steps, hosts.initial_learning_rate(self))
        host = hosts.host_of(self, self.ranks, self._backward_optimizers, self.make_objective)
        stock_run = hosts.run_of(self, int(cfg.batch_size), self._rates)
        held_out = None
        if self._validation is not None and self._validation_loader is not None:
            objective = self.make_objective(hosts.parts_of(self, self.ranks, self._validation_loader))
            with unchanged_random_state(self._device):
                held_out = hold_out(self._validation, self._validation_loader, objective, host.model, self.ranks)
        run = Run(host, stock_run, self._settings, self._increase, report, self._stored, held_out)
        run.make_plan(self._cache_inputs(cfg))
        self._planned_run, self.global_step = run, run.run.first_step

    def _cache_inputs(self, cfg: DictConfig) -> CacheInputs:
        return CacheInputs(cfg, resumes=bool(self._stored), stored=stored_probe_in(self._stored))

    @unless_off
    def train(self) -> None:
        assert self._planned_run is not None and self._report is not None, "set up first"
        with self._at_work(self._report):
            self._planned_run.train(self, self.watchers)
        self._report.finish()

    @contextlib.contextmanager
    def _at_work(self, report: Report) -> Iterator[None]:
        """Collect little garbage, and show errors on the page of the run; ranks on other machines leave it alone."""
        with little_to_collect(), report.showing_errors() if self.ranks.is_next_to_first else contextlib.nullcontext():
            yield

    def note_progress(self, *, epochs_run: int, global_step: int, steps_per_epoch: int) -> None:
        """Let stock know how far the run is."""
        self.epochs_run, self.global_step, self._steps_per_epoch = epochs_run, global_step, steps_per_epoch

    def learning_rate(self) -> float:
        """Return the learning rate that stock would log."""
        return float(get_lr(self._rate_holder))

    @functools.cached_property
    def _rate_holder(self) -> Any:
        return hosts.learning_rate_holder(self)

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        """Hand metrics to stock's logger; a full disk there ends no training."""
        try:
            self._metric_logger.log_dict(metrics, step=step)
        except OSError as error:
            if not self._warned_of_logger:
                log.warning("metrics could not be logged (%s); training continues", error)
            self._warned_of_logger = True

    def save_epoch(self, epoch: int, *, is_last: bool) -> None:
        """Save the checkpoint that ends ``epoch``, as stock does."""
        self._save(epoch, f"epoch_{epoch}")

    def save_step(self, step: int, *, is_last: bool) -> None:
        """Save the checkpoint after the ``step``-th optimizer step; the last one has no state, as in stock."""
        self._save(self.total_epochs - 1 if is_last else checkpoints.WITHIN_TRAINING, f"step_{step}")

    def _save(self, epoch: int, name: str) -> None:
        assert self._planned_run is not None, "set up first"
        around: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.ranks.is_first and not hosts.saves_on_every_rank(self):
            around = checkpoints.saved_as(name, (hosts.checkpointer_of(self), self._checkpoints))
        self._planned_run.note_random_state()
        with checkpoints.unchanged_weights(hosts.model_in_checkpoint(self)), around:
            self.save_checkpoint(epoch=epoch)  # type: ignore[attr-defined]

    @unless_off
    def cleanup(self) -> None:
        self._backward_optimizers.release()
        try:
            super().cleanup()  # type: ignore[misc]
        except OSError as error:
            log.warning("the metric logger could not be closed (%s); training is complete and saved", error)

    @unless_off
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        except (FileNotFoundError, ValueError) as error:
            if self._resume_from_checkpoint:
                raise
            raise ConfigError(cannot_be_loaded(error)) from error

    @unless_off
    def _setup_data(self, *args: Any, **kwargs: Any) -> Any:
        sampler, stock_loader = self._load_data("dataset", *args, **kwargs)
        loader = SampleLoader(stock_loader, self._state_to_store)
        batches = self._batches_of_a_step or self._gradient_accumulation_steps
        check_data_fills_a_step(len(loader.sampler), loader.batch_size, batches)
        if self._validation is not None:
            size = self._validation.batch_size or loader.batch_size
            of_validation = {"cfg_dataset": self._validation.dataset, "shuffle": False, "batch_size": size}
            with unchanged_random_state(self._device):
                _, stock_loader = self._load_data("dataset_val", *args, **{**kwargs, **of_validation})
            self._validation_loader = SampleLoader(stock_loader)
        return loader if sampler is None else (sampler, loader)

    def _load_data(self, key: str, *args: Any, **kwargs: Any) -> tuple[Any, DataLoader[Any]]:
        """Return the sampler, where the recipe returns one of its own, and the loader that stock makes of ``key``."""
        try:
            loaders = super()._setup_data(*args, **kwargs)  # type: ignore[misc]
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{key} cannot be loaded: {in_short(error).rstrip('.!')}. Check {key}.source, its split and files"
            ) from error
        return loaders if isinstance(loaders, tuple) else (None, loaders)

    def _state_to_store(self) -> dict[str, Any] | None:
        return None if self._planned_run is None else self._planned_run.state_dict()

    @unless_off
    def _update_recipe_state(self, ckpt_dict: dict[str, Any]) -> None:
        super()._update_recipe_state(ckpt_dict)  # type: ignore[misc]
        self._check_that_epochs_are_left()
        self._stored = (ckpt_dict.get(training.DATALOADER_KEY) or {}).get(STATE_KEY, {})

    def _check_that_epochs_are_left(self) -> None:
        if self.epochs_run >= self.total_epochs:
            raise ConfigError(
                f"epochs={self.total_epochs} leaves nothing to train: the run being resumed has finished "
                f"{self.epochs_run}. Set epochs to at least {self.epochs_run + 1}, or resume_from_checkpoint=False"
            )

    @unless_off
    def _setup_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        with replaced_in_torchtune(register_optim_in_bwd_hooks=self._backward_optimizers.register):
            return super()._setup_optimizer(*args, **kwargs)  # type: ignore[misc]

    @unless_off
    def _setup_lr_scheduler(self, *, num_training_steps: int, last_epoch: int, **kwargs: Any) -> Any:
        # The stock LoRA recipe starts the schedule from its beginning on resume.
        last_epoch = scheduled_steps(self.epochs_run, self._stored, self._steps_per_epoch) - 1
        initial_lr = hosts.initial_learning_rate(self)
        rates = self._rates = scheduled_rates(kwargs["cfg_lr_scheduler"], num_training_steps, initial_lr)
        if last_epoch < 0:  # a new schedule starts from the present rate, which a checkpoint may have changed
            for group in hosts.groups_of(self):
                set_rate(group, initial_lr)
        kwargs |= {"num_training_steps": num_training_steps, "last_epoch": last_epoch}
        scheduler = super()._setup_lr_scheduler(**kwargs)  # type: ignore[misc]
        if last_epoch >= 0 and scheduler is not None:
            # Some of torch's schedulers take the step that they resume at a second time.
            for group in hosts.groups_of(self):
                set_rate(group, rates[last_epoch + 1])
        return scheduler
