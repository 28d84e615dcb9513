"""What every recipe shares: stock's set-up, the probe before training, growth while training, and the record of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import training

from adaptive_batching.config import AdaptiveBatchingConfig, ConfigError
from adaptive_batching.distributed import Ranks
from adaptive_batching.fsdp import MicroBatchCollectives
from adaptive_batching.growth import reads_noise_scale, resolve
from adaptive_batching.memory import memory_meter
from adaptive_batching.microbatch import ForwardCost, TokenLimit
from adaptive_batching.plan import BatchController, Course, Decision, RunShape, largest_divisor, learning_rate_scale
from adaptive_batching.report import Report
from adaptive_batching.torchtune.data import (
    STATE_KEY,
    SampleLoader,
    check_data_fills_a_step,
    random_state,
    set_random_state,
    sizes,
    worst_case_sample,
)
from adaptive_batching.torchtune.explore import explore_micro_batches, store
from adaptive_batching.torchtune.gradients import optimizers_of
from adaptive_batching.torchtune.growth import Growth
from adaptive_batching.torchtune.learning_rate import rule_for, scheduled_rates
from adaptive_batching.torchtune.loop import TrainingLoop
from adaptive_batching.torchtune.many_devices import record_collectives
from adaptive_batching.torchtune.maximum import probe
from adaptive_batching.torchtune.noise import NoiseMeter
from adaptive_batching.torchtune.settings import read_settings, report_dir
from adaptive_batching.torchtune.step import batch_dependent_module

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
        self._batch_dependent: str | None = _UNKNOWN
        self._increase_name, self._increase = "", None
        if self.settings.batch_increase_function is not None:
            self._increase_name, self._increase = resolve(self.settings.batch_increase_function)
        self._stored: dict[str, Any] = {}
        self._explored: int | str | None = None
        self._rates: list[float] = []
        self._random_states: list[dict[str, Any]] = []
        self.reference_batch_size: int = cfg.batch_size
        self.reference_accumulation: int = cfg.gradient_accumulation_steps
        self.reference_steps_per_epoch = 0
        self.samples_per_forward: int | None = None
        """Most samples of the longest length that fit in a forward; known where they bound micro-batches."""
        self.token_budget = 0
        """Most padded tokens of a micro-batch that fit, or samples where they are multimodal; known likewise."""
        self.forward_cost = ForwardCost()
        self.token_limit = TokenLimit()
        self.growth: Growth | None = None
        self.report: Report | None = None
        self._check_that_noise_can_be_measured(cfg)
        super().__init__(cfg=cfg)  # type: ignore[call-arg]
        self.ranks = Ranks()
        self.collectives: MicroBatchCollectives | None = None
        self.why_no_recovery = ""

    def setup(self, cfg: DictConfig) -> None:
        super().setup(cfg=cfg)  # type: ignore[misc]
        self.reference_steps_per_epoch = self._steps_per_epoch
        if self.ranks.size > 1:
            self.collectives = record_collectives(self)
        if not self.settings.enabled:
            return
        directory, resume = report_dir(cfg, self.settings), bool(cfg.resume_from_checkpoint)
        self.report = Report(directory, resume=resume, writes=self.ranks.is_first)
        self._check_that_cutting_is_exact()
        controller = self._make_controller(cfg)
        if self.settings.explores:
            self._explore(controller)
        if self._stored:
            self._restore(self._stored)
        self.growth = self._make_growth(cfg, controller)
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

    def record_step(self, epoch: int, loss: torch.Tensor, lr: float, recoveries: int) -> None:
        if self.report is not None:
            self.report.step(epoch, self.global_step, self.global_batch_size, float(loss), float(lr), recoveries)

    def batch_dependent_module(self) -> str | None:
        """A module of the model that computes over the batch dimension, so that cutting a batch changes the result."""
        if self._batch_dependent is _UNKNOWN:
            self._batch_dependent = batch_dependent_module(self)
        return self._batch_dependent

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
    def checkpointing(self) -> Iterator[None]:
        """Inside, stock saves a checkpoint."""
        if self.growth is None:
            yield
            return
        self._random_states = self.ranks.gather(random_state(self._device))  # only the first rank stores them
        with self.growth.learning_rate.unscaled():
            yield

    # Where stock's set-up is extended

    def _setup_data(self, *args: Any, **kwargs: Any) -> SampleLoader:
        loader = SampleLoader(super()._setup_data(*args, **kwargs), self._state_to_store)  # type: ignore[misc]
        check_data_fills_a_step(len(loader.sampler), loader.batch_size, self._gradient_accumulation_steps)
        return loader

    def _update_recipe_state(self, ckpt_dict: dict[str, Any]) -> None:
        super()._update_recipe_state(ckpt_dict)  # type: ignore[misc]
        if self.settings.enabled:
            self._stored = (ckpt_dict.get(training.DATALOADER_KEY) or {}).get(STATE_KEY, {})

    def _setup_lr_scheduler(self, *, num_training_steps: int, last_epoch: int, **kwargs: Any) -> Any:
        if self.settings.enabled:
            # The stock LoRA recipe starts the schedule anew on resume.
            last_epoch = self.epochs_run * self._steps_per_epoch - 1
            group = optimizers_of(self)[0].param_groups[0]
            initial_lr = float(group.get("initial_lr", group["lr"]))
            self._rates = scheduled_rates(kwargs["cfg_lr_scheduler"], num_training_steps, initial_lr)
        return super()._setup_lr_scheduler(  # type: ignore[misc]
            num_training_steps=num_training_steps, last_epoch=last_epoch, **kwargs
        )

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
        reads = self._increase is not None and reads_noise_scale(self._increase)
        return _STEPS_BETWEEN_MEASUREMENTS if reads else None

    def _check_that_noise_can_be_measured(self, cfg: DictConfig) -> None:
        if self.noise_scale_every is None:
            return
        what = f"the gradient noise scale, which {self._increase_name or 'noise_scale_every'} needs, cannot be measured"
        if cfg.get("optimizer_in_bwd", False):
            raise ConfigError(
                f"{what} with optimizer_in_bwd=True: a step has one gradient, and there is nothing to compare it with; "
                f"set optimizer_in_bwd=False"
            )
        if cfg.get("tensor_parallel_dim", 1) > 1:
            raise ConfigError(f"{what} with tensor_parallel_dim={cfg.tensor_parallel_dim}; set it to 1")

    def _check_that_cutting_is_exact(self) -> None:
        settings = self.settings
        if settings.micro_batch_size is not None:
            key, value = "micro_batch_size", settings.micro_batch_size
        elif settings.fills_memory:
            key, value = "adaptive_batching.grow_beyond_memory", True
        elif self.noise_scale_every is not None:
            key, value = "measuring the gradient noise scale every", f"{self.noise_scale_every} steps"
        else:
            return
        module = self.batch_dependent_module()
        if module is not None:
            raise ConfigError(
                f"{key}={value} would change the result: {module} computes over the batch, so that its parts do not "
                f"add up to it; leave {key} unset"
            )

    def _make_controller(self, cfg: DictConfig) -> BatchController:
        settings = self.settings
        if settings.grow_beyond_memory and self._increase is None:
            log.warning("adaptive_batching.grow_beyond_memory=True does nothing without batch_increase_function")
        maximum, reason = self._find_maximum(cfg)
        divides = None
        if settings.keep_global_batch:
            divides = self.reference_batch_size * self.reference_accumulation
            maximum = largest_divisor(divides, at_most=maximum)
        if self._increase is None:
            start = maximum if settings.use_maximum_batch_size else int(cfg.batch_size)
            maximum = start
            if start != cfg.batch_size:
                log.info("batch size %d -> %d (%s)", cfg.batch_size, start, reason)
        else:
            start = self._size_before_this_run(cfg)
            if self._stored and self._stored["maximum"] != maximum:
                log.info(
                    "the maximum was %d in the run that is resumed; now it is %d", self._stored["maximum"], maximum
                )
            if divides is not None:
                start = largest_divisor(divides, at_most=start)  # a stored one may be of another accumulation
            if start > maximum:
                log.warning(
                    "batch size %d is above the maximum %d (%s); starting at %d", start, maximum, reason, maximum
                )
                start = maximum
            elif settings.use_maximum_batch_size:
                log.info("batch size starts at %d and grows to at most %d (%s)", start, maximum, reason)
        # One rank alone is asked: a function that is random or keeps a state cannot split them.
        return BatchController(
            start, maximum, reason, self._increase, self._increase_name, divides, self.ranks.on_first
        )

    def _make_growth(self, cfg: DictConfig, controller: BatchController) -> Growth:
        settings = self.settings
        reference = self.reference_batch_size * self.reference_accumulation
        shape = RunShape(
            epochs=self.total_epochs,
            samples=len(self._dataloader.sampler),
            accumulation=self._gradient_accumulation_steps,
            replicas=self.num_replicas,
            max_steps=self.max_steps_per_epoch,
            decisions=settings.decisions_per_epoch,
            reference_steps=self.reference_steps_per_epoch,
            reference_samples=reference,
            kept_samples=reference if settings.keep_global_batch else None,
        )
        rule = rule_for(settings.lr_scaling, self)
        course = Course(
            controller,
            shape,
            self._rates,
            lambda window: learning_rate_scale(rule, window / reference, settings.max_lr_scale),
            initial_batch_size=min(int(cfg.batch_size), controller.maximum),
            grows_in_warmup=settings.grow_during_warmup,
        )
        every = self.noise_scale_every
        noise = None if every is None else NoiseMeter(self, every)
        return Growth(self, course, noise, self._stored.get("growth", {}))

    def _restore(self, stored: dict[str, Any]) -> None:
        """Go on where the run that is resumed was."""
        self.global_step = stored["global_step"]
        self.token_limit.load_state_dict(stored["token_limit"])
        if not self.settings.explores:
            self.forward_cost.load_state_dict(stored["forward_cost"])
        if len(stored["random_states"]) == self.ranks.size:
            set_random_state(stored["random_states"][self.ranks.rank], self._device)

    def _size_before_this_run(self, cfg: DictConfig) -> int:
        """The batch size that the next increase adds to: the stored one on resume, unless the user has changed it."""
        stored = self._stored.get("batch_size")
        if stored is None:
            return int(cfg.batch_size)
        if self._stored["configured_batch_size"] != cfg.batch_size:
            log.info(
                "batch_size=%d was %d in the run that is resumed; starting from %d, not from its last size %d",
                cfg.batch_size, self._stored["configured_batch_size"], cfg.batch_size, stored,
            )  # fmt: skip
            return int(cfg.batch_size)
        return int(stored)

    def _find_maximum(self, cfg: DictConfig) -> tuple[int, str]:
        """The largest batch size of this run, and what bounds it."""
        assert self.report is not None
        settings = self.settings
        samples = len(self._dataloader.sampler)
        upper, reason = samples // self._gradient_accumulation_steps, f"{samples} samples of data"
        if settings.keep_global_batch:
            upper = self.reference_batch_size * self.reference_accumulation
            reason = "the global batch, which is kept"
        if settings.max_batch_size is not None and settings.max_batch_size <= upper:
            upper, reason = settings.max_batch_size, f"max_batch_size={settings.max_batch_size}"
        if not settings.use_maximum_batch_size and self._increase is None:
            # All that a forward could take is what an optimizer step has.
            upper, reason = self.reference_global_batch_size, "the samples of an optimizer step"
        if not settings.probes:
            self.report.maximum(upper, reason)
            return upper, reason
        sample, length = worst_case_sample(
            self._dataloader.dataset,
            sequence_length=settings.sequence_length,
            tokenizer_max=getattr(self._tokenizer, "max_seq_len", None),
            model_max=getattr(self._model, "max_seq_len", None),
        )
        result = probe(self, cfg, sample, length, upper, reason)
        self.report.probe(result, sequence_length=length)
        if settings.fills_memory:
            self.samples_per_forward = result.batch_size
            self.token_budget = result.batch_size * sizes([sample])[0]
        if isinstance(settings.micro_batch_size, int) and settings.micro_batch_size > result.batch_size:
            self._lower_micro_batch_size(settings.micro_batch_size, int(cfg.batch_size), result.batch_size)
        if self._increase is not None and not settings.growth_is_bound_by_memory:
            return upper, reason  # what does not fit at once is cut
        if settings.fills_memory and settings.round_to_power_of_two:  # the probe has not rounded
            return 1 << (result.batch_size.bit_length() - 1), result.reason
        return result.batch_size, result.reason

    def _lower_micro_batch_size(self, wanted: int, batch_size: int, maximum: int) -> None:
        size = largest_divisor(batch_size, at_most=maximum)
        log.warning("micro_batch_size=%d does not fit, the maximum is %d; taking %d", wanted, maximum, size)
        self.settings = replace(self.settings, micro_batch_size=size)

    def _explore(self, controller: BatchController) -> None:
        """Settle on a ``micro_batch_size``: that of the run that is resumed, or the fastest."""
        assert self.report is not None and self.samples_per_forward is not None
        chosen = self._stored.get("explored")
        if isinstance(chosen, int) and chosen > self.samples_per_forward:
            chosen = None  # the device is another than in the run that is resumed
        if chosen is not None:
            log.info("micro_batch_size %s, explored by the run that is resumed", chosen)
        else:
            meter = memory_meter(self._device)
            # A batch that grows is explored at the size that fills memory, as far as it can grow.
            batch_size = max(controller.batch_size, min(controller.maximum, self.samples_per_forward))
            accumulation = self._gradient_accumulation_steps
            if self.settings.keep_global_batch:
                batch_size = largest_divisor(self.reference_global_batch_size, at_most=batch_size)
                accumulation = self.reference_global_batch_size // batch_size
            result = explore_micro_batches(self, batch_size, accumulation, meter)
            chosen = result.recommended.candidate
            path = self.report.directory / "explored.yaml"
            self.ranks.on_first(lambda: store(path, result, batch_size, meter.device_name))
            self.report.exploration(result)
            log.info("micro_batch_size %s is taken; to paste into the config: %s", chosen, path)
        self._explored = chosen
        self.settings = replace(self.settings, micro_batch_size=chosen)

    def _state_to_store(self) -> dict[str, Any] | None:
        if self.growth is None:
            return None  # off is stock, its checkpoints included
        return {
            "batch_size": self.growth.course.controller.batch_size,
            "maximum": self.growth.course.controller.maximum,
            "configured_batch_size": self.reference_batch_size,
            "global_step": self.global_step,
            "random_states": self._random_states,
            "explored": self._explored,
            "growth": self.growth.state_dict(),
            "forward_cost": self.forward_cost.state_dict(),
            "token_limit": self.token_limit.state_dict(),
        }
