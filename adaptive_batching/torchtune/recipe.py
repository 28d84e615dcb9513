"""What every recipe shares: stock's set-up, the probe before training, growth while training, and the record of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torchtune import training
from tqdm import tqdm

from adaptive_batching.config import AdaptiveBatchingConfig, ConfigError
from adaptive_batching.growth.controller import Decision
from adaptive_batching.growth.increase import reads_noise_scale, resolve
from adaptive_batching.host_memory import keep_little_on_the_host
from adaptive_batching.memory import memory_meter
from adaptive_batching.micro_batches.cut import Capacity, length_in_chunks
from adaptive_batching.micro_batches.forward_cost import ForwardCost
from adaptive_batching.micro_batches.limits import TokenLimit
from adaptive_batching.random_state import random_state, set_random_state
from adaptive_batching.ranks.agree import Ranks
from adaptive_batching.ranks.fsdp import MicroBatchCollectives
from adaptive_batching.report.record import Report
from adaptive_batching.torchtune import compiling
from adaptive_batching.torchtune.checkpoints import kept_if_disk_is_full, restore_state
from adaptive_batching.torchtune.data import STATE_KEY, Sample, SampleLoader, check_data_fills_a_step, pad_to
from adaptive_batching.torchtune.exploring import settle_micro_batch_size
from adaptive_batching.torchtune.gradients import gathered_chunks, optimizers_of
from adaptive_batching.torchtune.growing import Growth, make_controller, make_growth
from adaptive_batching.torchtune.in_backward import Gate
from adaptive_batching.torchtune.learning_rate import scheduled_rates, set_rate
from adaptive_batching.torchtune.loop import TrainingLoop
from adaptive_batching.torchtune.many_devices import record_collectives
from adaptive_batching.torchtune.noise_meter import check_that_noise_can_be_measured
from adaptive_batching.torchtune.settings import read_settings, report_dir
from adaptive_batching.torchtune.step import batch_dependent_module
from adaptive_batching.torchtune.stock import replaced_in_torchtune

log = logging.getLogger(__name__)

_UNKNOWN = "not looked for yet"
_STEPS_BETWEEN_MEASUREMENTS = 5


class AdaptiveBatching:
    """Mixed into a stock fine-tuning recipe, before it in the order of bases.

    With none of ``use_maximum_batch_size``, ``batch_increase_function`` and ``micro_batch_size`` set, the recipe trains
    as stock, bit for bit.
    """

    # Set by the stock recipe
    _dataloader: Any
    _device: torch.device
    _gradient_accumulation_steps: int
    _steps_per_epoch: int
    _tokenizer: Any
    _loss_fn: Any
    _metric_logger: Any
    _model: torch.nn.Module
    ignore_labels_cache: torch.Tensor
    epochs_run: int
    global_step: int
    max_steps_per_epoch: int | None
    total_epochs: int

    profiles_steps = False
    """Whether stock's profiler takes optimizer steps, rather than batches, for its steps."""

    def __init__(self, cfg: DictConfig) -> None:
        self.settings: AdaptiveBatchingConfig = read_settings(cfg)
        if self.settings.enabled and cfg.device == "cpu":
            keep_little_on_the_host()
        self._batch_dependent: str | None = _UNKNOWN
        self.increase_name, self.increase = "", None
        if self.settings.batch_increase_function is not None:
            self.increase_name, self.increase = resolve(self.settings.batch_increase_function)
        self._checkpoints = Path(cfg.checkpointer.output_dir)
        self._warned_of_logger = False
        self.stored: dict[str, Any] = {}
        """What the run that is resumed has left to this one; empty if there is none."""
        self.explored: int | str | None = None
        """The ``micro_batch_size`` that was found the fastest."""
        self.rates: list[float] = []
        """Learning rates of the stock run; see :func:`~adaptive_batching.torchtune.learning_rate.scheduled_rates`."""
        self._random_states: list[dict[str, Any]] = []
        self.reference_batch_size: int = cfg.batch_size
        self.reference_accumulation: int = cfg.gradient_accumulation_steps
        self.reference_steps_per_epoch = 0
        self.capacity: Capacity | None = None
        """What fits in a forward, where that bounds micro-batches; multimodal samples are taken for single tokens."""
        self.probed_tokens = 0
        """Padded tokens of the largest forward that the probe has seen to fit."""
        self.forward_cost = ForwardCost()
        self.token_limit = TokenLimit()
        self.gate = Gate()
        self.growth: Growth | None = None
        self.report: Report | None = None
        if self.settings.keep_global_batch and self.increase is not None and reads_noise_scale(self.increase):
            raise ConfigError(
                f"batch_increase_function={self.increase_name!r} decides on the global batch, and "
                f"adaptive_batching.keep_global_batch=True keeps it; set keep_global_batch=False"
            )
        if self.noise_scale_every is not None:
            check_that_noise_can_be_measured(cfg, self.increase_name or "noise_scale_every")
        super().__init__(cfg=cfg)  # type: ignore[call-arg]
        self.ranks = Ranks(self._device)
        self.collectives: MicroBatchCollectives | None = None
        self.why_no_recovery = ""

    def setup(self, cfg: DictConfig) -> None:
        if self.settings.enabled:  # first, as a folder that cannot be written would show only after minutes
            directory, resume = report_dir(cfg, self.settings), bool(cfg.resume_from_checkpoint)
            self.report = Report(directory, resume=resume, writes=self.ranks.is_first)
        if cfg.resume_from_checkpoint:
            if self.ranks.is_first:
                restore_state(self._checkpoints)
            if self.ranks.size > 1:
                dist.barrier()
        super().setup(cfg=cfg)  # type: ignore[misc]
        self.reference_steps_per_epoch = self._steps_per_epoch
        if self.ranks.size > 1:
            self.collectives = record_collectives(self)
        if self.report is None:
            return
        # Before memory is measured: the thread that watches progress bars takes some, and Python waits for it for good
        # if it cannot start.
        tqdm(disable=True).close()
        self._check_that_cutting_is_exact()
        compiling.prepare(self)
        controller = make_controller(self, cfg)
        if self.stored:
            self._restore(self.stored)
        if self.settings.explores:
            settle_micro_batch_size(self, controller)
            compiling.prepare(self)
        self.growth = make_growth(self, cfg, controller)
        plan = self.growth.course.plan(self.epochs_run)
        self.report.plan(plan, decided=controller.decides_early)

    def train(self) -> None:
        TrainingLoop(self).run()
        if self.report is not None:
            self.report.finish()

    # What the loop asks for

    def start_epoch(self, epoch: int) -> None:
        """Choose the batch size of ``epoch`` and make all that depends on it follow."""
        if self.growth is None or self.report is None:
            return
        decision = self.growth.start_epoch(epoch)
        expected = self.growth.course.expected()
        self.report.epoch(
            epoch=epoch, step=self.global_step, batch_size=decision.batch_size,
            global_batch_size=self.global_batch_size, steps=expected.steps, samples=expected.samples,
            dropped_samples=expected.dropped_samples, reason=decision.reason,
        )  # fmt: skip

    def record_change(self, decision: Decision) -> None:
        """Record what was decided within an epoch."""
        if self.report is not None and decision.batch_size != decision.previous:
            self.report.change(
                epoch=decision.epoch, batch_size=decision.batch_size, global_batch_size=self.global_batch_size,
                step=self.global_step, reason=decision.reason,
            )  # fmt: skip

    def batch_metrics(self) -> dict[str, float]:
        """Added to the metrics that stock logs."""
        if self.growth is None:
            return {}
        metrics: dict[str, float] = {
            "batch_size": self._dataloader.batch_size,
            "global_batch_size": self.global_batch_size,
        }
        noise_scale = self.growth.noise.scale.samples if self.growth.noise is not None else None
        return metrics if noise_scale is None else {**metrics, "gradient_noise_scale": noise_scale}

    def record_step(self, epoch: int, loss: torch.Tensor | float, lr: float, recoveries: int) -> None:
        if self.report is not None:
            self.report.step(epoch, self.global_step, self.global_batch_size, float(loss), float(lr), recoveries)

    def batch_dependent_module(self) -> str | None:
        """A module of the model that computes over the batch dimension, so that cutting a batch changes the result."""
        if self._batch_dependent is _UNKNOWN:
            self._batch_dependent = batch_dependent_module(self)
        return self._batch_dependent

    def collate(self, samples: list[Sample]) -> dict[str, Any]:
        """The batch that a forward takes."""
        batch: dict[str, Any] = self._dataloader.collate(samples)
        return pad_to(batch, self.length_in_forward(batch["tokens"].shape[1]), self._loss_fn.ignore_index)

    def length_in_forward(self, length: int) -> int:
        """Tokens that the longest sample of a forward takes there, of its own ``length``.

        They are padded where forwards would gather layers more or less often, which ranks have to do alike. Stock does
        not see to that; nor does this recipe with all fields unset, until a step has run out of memory.
        """
        as_stock = not self.settings.enabled and self.token_limit.num_recoveries == 0
        return length if as_stock else length_in_chunks(length, gathered_chunks(self._model))

    @property
    def samples_per_forward(self) -> int | None:
        """Most samples of the longest length that fit in a forward; known where they bound micro-batches."""
        return None if self.capacity is None else self.capacity.points[0][1]

    @property
    def global_batch_size(self) -> int:
        """Samples that the optimizer sees in a step of this epoch."""
        return int(self._dataloader.batch_size) * self._gradient_accumulation_steps * self.num_replicas

    @property
    def reference_global_batch_size(self) -> int:
        """What the optimizer sees at the configured sizes, which the learning-rate schedule is laid out for."""
        return self.reference_batch_size * self.reference_accumulation * self.num_replicas

    @property
    def num_replicas(self) -> int:
        """Ranks that see samples of their own."""
        return int(getattr(self, "dp_size", self.ranks.size))  # fewer than ranks under tensor parallelism

    @contextlib.contextmanager
    def within_memory_limit(self) -> Iterator[None]:
        """Inside, training runs out of memory at ``memory_limit``, as the probe does, rather than taking it from others
        on the device. Checkpoints are saved outside: nothing is to come in their way."""
        with contextlib.ExitStack() as stack:
            if self.growth is not None and self.settings.memory_limit is not None:
                with contextlib.suppress(NotImplementedError):  # a device that cannot be limited
                    meter = memory_meter(self._device)
                    stack.enter_context(meter.limit(self.settings.memory_limit.of(meter.total_bytes)))
            yield

    @contextlib.contextmanager
    def checkpointing(self, epoch: int) -> Iterator[None]:
        """Inside, stock saves the checkpoint of ``epoch``."""
        with contextlib.ExitStack() as stack:
            if self.growth is not None:
                self._random_states = self.ranks.gather(random_state(self._device))  # only the first rank stores them
                stack.enter_context(self.growth.learning_rate.unscaled())
            if self.ranks.is_first:
                stack.enter_context(kept_if_disk_is_full(self._checkpoints, epoch))
            yield

    def log_metrics(self, metrics: dict[str, Any]) -> None:
        """Hand ``metrics`` to stock's logger; with adaptive batching on, a full disk there ends no training."""
        try:
            self._metric_logger.log_dict(metrics, step=self.global_step)
        except OSError as error:
            if self.growth is None:
                raise
            if not self._warned_of_logger:
                log.warning("metrics are not logged (%s); training goes on", error)
            self._warned_of_logger = True

    def cleanup(self) -> None:
        try:
            super().cleanup()  # type: ignore[misc]
        except OSError as error:
            if self.growth is None:
                raise
            log.warning("the logger of metrics cannot be closed (%s); training has ended, and is saved", error)

    # Where stock's set-up is extended

    def _setup_data(self, *args: Any, **kwargs: Any) -> SampleLoader:
        loader = SampleLoader(super()._setup_data(*args, **kwargs), self._state_to_store)  # type: ignore[misc]
        check_data_fills_a_step(len(loader.sampler), loader.batch_size, self._gradient_accumulation_steps)
        return loader

    def _update_recipe_state(self, ckpt_dict: dict[str, Any]) -> None:
        super()._update_recipe_state(ckpt_dict)  # type: ignore[misc]
        if self.settings.enabled:
            self.stored = (ckpt_dict.get(training.DATALOADER_KEY) or {}).get(STATE_KEY, {})

    def _setup_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        with replaced_in_torchtune(register_optim_in_bwd_hooks=self.gate.register):
            return super()._setup_optimizer(*args, **kwargs)  # type: ignore[misc]

    def _setup_lr_scheduler(self, *, num_training_steps: int, last_epoch: int, **kwargs: Any) -> Any:
        if self.settings.enabled:
            # The stock LoRA recipe starts the schedule anew on resume.
            last_epoch = self.epochs_run * self._steps_per_epoch - 1
            group = optimizers_of(self)[0].param_groups[0]
            initial_lr = float(group.get("initial_lr", group["lr"]))
            self.rates = scheduled_rates(kwargs["cfg_lr_scheduler"], num_training_steps, initial_lr)
        scheduler = super()._setup_lr_scheduler(  # type: ignore[misc]
            num_training_steps=num_training_steps, last_epoch=last_epoch, **kwargs
        )
        if self.settings.enabled and self.epochs_run > 0 and scheduler is not None:
            # Some of torch's schedulers take the step that they resume at a second time.
            for optimizer in optimizers_of(self):
                for group in optimizer.param_groups:
                    set_rate(group, self.rates[last_epoch + 1])
        return scheduler

    def _loss_step(self, batch: dict[str, Any]) -> torch.Tensor:
        batch_size = batch["labels"].shape[0]
        if batch_size > self.ignore_labels_cache.shape[0]:  # stock sizes it for the configured batch
            self.ignore_labels_cache = self.ignore_labels_cache[:1].repeat(batch_size, 1)
        return super()._loss_step(batch)  # type: ignore[misc, no-any-return]

    # The decisions before training

    @property
    def noise_scale_every(self) -> int | None:
        """Optimizer steps from one measurement of the gradient noise scale to the next; None: it is not measured."""
        if self.settings.noise_scale_every is not None and self.settings.enabled:
            return self.settings.noise_scale_every
        reads = self.increase is not None and reads_noise_scale(self.increase)
        return _STEPS_BETWEEN_MEASUREMENTS if reads else None

    def _check_that_cutting_is_exact(self) -> None:
        settings = self.settings
        if settings.micro_batch_size is not None:
            what, remedy = f"micro_batch_size={settings.micro_batch_size}", "leave micro_batch_size unset"
        elif settings.fills_memory:
            what, remedy = "adaptive_batching.grow_beyond_memory=True", "set grow_beyond_memory=False"
        elif self.noise_scale_every is not None:
            what = f"measuring the gradient noise scale, for {self.increase_name or 'noise_scale_every'},"
            remedy = "take an increase function that does not read it, and leave noise_scale_every unset"
        else:
            return
        module = self.batch_dependent_module()
        if module is not None:
            raise ConfigError(
                f"{what} would change the result: {module} computes over the batch, so that its parts do not add up to "
                f"it; {remedy}"
            )

    def _restore(self, stored: dict[str, Any]) -> None:
        """Go on where the run that is resumed was."""
        self.global_step = stored["global_step"]
        self.token_limit.load_state_dict(stored["token_limit"])
        self.forward_cost.load_state_dict(stored["forward_cost"])
        if len(stored["random_states"]) == self.ranks.size:
            set_random_state(stored["random_states"][self.ranks.rank], self._device)

    def _state_to_store(self) -> dict[str, Any] | None:
        if self.growth is None:
            return None  # off is stock, its checkpoints included
        return {
            "batch_size": self.growth.course.controller.batch_size,
            "maximum": self.growth.course.controller.maximum,
            "configured_batch_size": self.reference_batch_size,
            "global_step": self.global_step,
            "random_states": self._random_states,
            "explored": self.explored,
            "growth": self.growth.state_dict(),
            "forward_cost": self.forward_cost.state_dict(),
            "token_limit": self.token_limit.state_dict(),
        }
