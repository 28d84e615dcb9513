"""What every recipe shares: stock's set-up, the probe before training, growth while training, and the record of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import training

from adaptive_batching.config import AdaptiveBatchingConfig, ConfigError
from adaptive_batching.distributed import Ranks
from adaptive_batching.fsdp import MicroBatchCollectives
from adaptive_batching.growth import BatchController, IncreaseFunction, largest_divisor, resolve
from adaptive_batching.memory import memory_meter
from adaptive_batching.microbatch import ForwardCost
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
from adaptive_batching.torchtune.loop import TrainingLoop
from adaptive_batching.torchtune.many_devices import record_collectives
from adaptive_batching.torchtune.maximum import probe
from adaptive_batching.torchtune.settings import read_settings, report_dir
from adaptive_batching.torchtune.step import batch_dependent_module

log = logging.getLogger(__name__)

_UNKNOWN = "not looked for yet"


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
        self._controller: BatchController | None = None
        self._random_states: list[dict[str, Any]] = []
        self.reference_batch_size: int = cfg.batch_size
        self.reference_accumulation: int = cfg.gradient_accumulation_steps
        self.reference_steps_per_epoch = 0
        self.samples_per_forward: int | None = None
        """Most samples of the longest length that fit in a forward; known where they bound micro-batches."""
        self.token_budget = 0
        """Most padded tokens of a micro-batch that fit, or samples where they are multimodal; known likewise."""
        self.forward_cost = ForwardCost()
        self.report: Report | None = None
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
        self._controller = self._make_controller(cfg)
        if self.settings.explores:
            self._explore(self._controller)
        if self._stored:
            self.global_step = self._stored["global_step"]
            if len(self._stored["random_states"]) == self.ranks.size:
                set_random_state(self._stored["random_states"][self.ranks.rank], self._device)

    def train(self) -> None:
        TrainingLoop(self).run()
        if self.report is not None:
            self.report.finish()

    # What the loop asks for

    def start_epoch(self, epoch: int) -> None:
        """Choose the batch size of ``epoch`` and make loader and step count follow it."""
        if self._controller is None or self.report is None:
            return
        decision = self._controller.start_epoch(epoch)
        self._dataloader.set_batch_size(decision.batch_size)
        if self.settings.keep_global_batch:
            samples = self.reference_batch_size * self.reference_accumulation
            self._gradient_accumulation_steps = samples // decision.batch_size
        steps = len(self._dataloader) // self._gradient_accumulation_steps
        self._steps_per_epoch = min(steps, self.max_steps_per_epoch or steps)
        num_samples = len(self._dataloader.sampler) * self._num_replicas
        used = self._steps_per_epoch * self.global_batch_size
        self.report.epoch(
            epoch=epoch, batch_size=decision.batch_size, global_batch_size=self.global_batch_size,
            steps=self._steps_per_epoch, samples=used, dropped_samples=num_samples - used, reason=decision.reason,
        )  # fmt: skip

    def batch_metrics(self) -> dict[str, int]:
        """Added to the metrics that stock logs."""
        if self._controller is None:
            return {}
        return {"batch_size": self._dataloader.batch_size, "global_batch_size": self.global_batch_size}

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
        return int(self._dataloader.batch_size) * self._gradient_accumulation_steps * self._num_replicas

    @property
    def reference_global_batch_size(self) -> int:
        """What the optimizer sees at the configured sizes, which the learning-rate schedule is laid out for."""
        return self.reference_batch_size * self.reference_accumulation * self._num_replicas

    @property
    def _num_replicas(self) -> int:
        """Ranks that see samples of their own."""
        return int(getattr(self, "dp_size", self.ranks.size))  # fewer than ranks under tensor parallelism

    def prepare_checkpoint(self) -> None:
        """Collect from all ranks what only the first one stores."""
        if self._controller is not None:
            self._random_states = self.ranks.gather(random_state(self._device))

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
        return super()._setup_lr_scheduler(  # type: ignore[misc]
            num_training_steps=num_training_steps, last_epoch=last_epoch, **kwargs
        )

    def _loss_step(self, batch: dict[str, Any]) -> torch.Tensor:
        batch_size = batch["labels"].shape[0]
        if batch_size > self.ignore_labels_cache.shape[0]:  # stock sizes it for the configured batch
            self.ignore_labels_cache = self.ignore_labels_cache[:1].repeat(batch_size, 1)
        return super()._loss_step(batch)  # type: ignore[misc, no-any-return]

    # The decisions before training

    def _check_that_cutting_is_exact(self) -> None:
        settings = self.settings
        if settings.micro_batch_size is None and not settings.fills_memory:
            return
        module = self.batch_dependent_module()
        if module is not None:
            key = "adaptive_batching.grow_beyond_memory" if settings.micro_batch_size is None else "micro_batch_size"
            raise ConfigError(
                f"{key}={settings.micro_batch_size or True} would change the result: {module} computes over the batch, "
                f"so that its parts do not add up to it; leave {key} unset"
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
            if divides is not None:
                start = largest_divisor(divides, at_most=start)  # a stored one may be of another accumulation
            if start > maximum:
                log.warning(
                    "batch size %d is above the maximum %d (%s); starting at %d", start, maximum, reason, maximum
                )
                start = maximum
            elif settings.use_maximum_batch_size:
                log.info("batch size starts at %d and grows to at most %d (%s)", start, maximum, reason)
        return BatchController(start, maximum, reason, self._agreed_increase(), self._increase_name, divides)

    def _agreed_increase(self) -> IncreaseFunction | None:
        """The increase function, asked on one rank alone: one that is random or keeps a state cannot split them."""
        increase = self._increase
        if increase is None:
            return None
        return lambda epoch, batch_size: self.ranks.on_first(lambda: increase(epoch, batch_size))

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
        if self._controller is None:
            return None  # off is stock, its checkpoints included
        return {
            "batch_size": self._controller.batch_size,
            "configured_batch_size": self.reference_batch_size,
            "global_step": self.global_step,
            "random_states": self._random_states,
            "explored": self._explored,
        }
