"""What every recipe shares: stock's set-up, the probe before training, growth while training, and the record of it."""

from __future__ import annotations

import logging
import platform
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config

from adaptive_batching.config import AdaptiveBatchingConfig, ConfigError
from adaptive_batching.growth import BatchController, IncreaseFunctionError, resolve
from adaptive_batching.memory import memory_meter
from adaptive_batching.probe import DoesNotFitError, find_maximum_batch_size, memory_budget
from adaptive_batching.report import Report
from adaptive_batching.result import ProbeResult, load_result, store_result
from adaptive_batching.torchtune.data import (
    STATE_KEY,
    SampleLoader,
    check_data_fills_a_step,
    is_packed,
    random_state,
    set_random_state,
    worst_case_sample,
)
from adaptive_batching.torchtune.loop import TrainingLoop
from adaptive_batching.torchtune.settings import read_settings, report_dir
from adaptive_batching.torchtune.step import remedies, training_step

log = logging.getLogger(__name__)

# What the memory of a training step depends on, beside the length of the samples and the device.
_KEYS_OF_MEMORY = (
    "model", "optimizer", "loss", "dtype", "compile", "collate_fn", "optimizer_in_bwd", "clip_grad_norm",
    "gradient_accumulation_steps", "enable_activation_checkpointing", "enable_activation_offloading",
)  # fmt: skip
_VERSIONS = ("adaptive-batching", "torch", "torchtune", "torchao", "bitsandbytes")


class AdaptiveBatching:
    """Mixed into a stock single-device recipe, before it in the order of bases.

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

    def __init__(self, cfg: DictConfig) -> None:
        self.settings: AdaptiveBatchingConfig = read_settings(cfg)
        self._increase_name, self._increase = "", None
        if self.settings.batch_increase_function is not None:
            self._increase_name, self._increase = resolve(self.settings.batch_increase_function)
        self._stored: dict[str, Any] = {}
        self._controller: BatchController | None = None
        self.reference_batch_size: int = cfg.batch_size
        """The batch size that the learning-rate schedule is laid out for."""
        self.reference_steps_per_epoch = 0
        self.token_budget = 0
        """Most padded tokens of a micro-batch that fit; known where the step is cut by length."""
        self.report: Report | None = None
        super().__init__(cfg=cfg)  # type: ignore[call-arg]

    def setup(self, cfg: DictConfig) -> None:
        super().setup(cfg=cfg)  # type: ignore[misc]
        self.reference_steps_per_epoch = self._steps_per_epoch
        if not self.settings.enabled:
            return
        self.report = Report(report_dir(cfg, self.settings), resume=bool(cfg.resume_from_checkpoint))
        self._controller = self._make_controller(cfg)
        if "random_state" in self._stored:
            self.global_step = self._stored["global_step"]
            set_random_state(self._stored["random_state"], self._device)

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
        steps = len(self._dataloader) // self._gradient_accumulation_steps
        self._steps_per_epoch = min(steps, self.max_steps_per_epoch or steps)
        num_samples = len(self._dataloader.sampler)
        used = self._steps_per_epoch * decision.batch_size * self._gradient_accumulation_steps
        self.report.epoch(
            epoch=epoch, batch_size=decision.batch_size, global_batch_size=self._global_batch_size,
            steps=self._steps_per_epoch, samples=used, dropped_samples=num_samples - used, reason=decision.reason,
        )  # fmt: skip

    def batch_metrics(self) -> dict[str, int]:
        """Added to the metrics that stock logs."""
        if self._controller is None:
            return {}
        return {"batch_size": self._dataloader.batch_size, "global_batch_size": self._global_batch_size}

    def record_step(self, epoch: int, loss: float, lr: float) -> None:
        if self.report is not None:
            self.report.step(epoch, self.global_step, self._global_batch_size, loss, lr)

    @property
    def _global_batch_size(self) -> int:
        return int(self._dataloader.batch_size) * self._gradient_accumulation_steps

    # Where stock's set-up is extended

    def _setup_data(
        self, *args: Any, dataloader_state_dict: dict[str, Any] | None = None, **kwargs: Any
    ) -> SampleLoader:
        stock = super()._setup_data(*args, dataloader_state_dict=dataloader_state_dict, **kwargs)  # type: ignore[misc]
        loader = SampleLoader(stock, self._state_to_store)
        check_data_fills_a_step(len(loader.dataset), loader.batch_size, self._gradient_accumulation_steps)
        if self.settings.enabled:
            self._stored = (dataloader_state_dict or {}).get(STATE_KEY, {})
        return loader

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

    def _make_controller(self, cfg: DictConfig) -> BatchController:
        maximum, reason = self._find_maximum(cfg)
        if self._increase is None:
            start = maximum if self.settings.use_maximum_batch_size else int(cfg.batch_size)
            maximum = start
            if start != cfg.batch_size:
                log.info("batch size %d -> %d (%s)", cfg.batch_size, start, reason)
        else:
            start = self._size_before_this_run(cfg)
            if start > maximum:
                log.warning(
                    "batch size %d is above the maximum %d (%s); starting at %d", start, maximum, reason, maximum
                )
                start = maximum
            elif self.settings.use_maximum_batch_size:
                log.info("batch size starts at %d and grows to at most %d (%s)", start, maximum, reason)
        return BatchController(start, maximum, reason, self._increase, self._increase_name)

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
        samples = len(self._dataloader.sampler)
        upper, reason = samples // self._gradient_accumulation_steps, f"{samples} samples of data"
        if self.settings.max_batch_size is not None and self.settings.max_batch_size <= upper:
            upper, reason = self.settings.max_batch_size, f"max_batch_size={self.settings.max_batch_size}"
        if not self.settings.probes:
            self.report.maximum(upper, reason)
            return upper, reason
        sample, length = worst_case_sample(
            self._dataloader.dataset,
            sequence_length=self.settings.sequence_length,
            tokenizer_max=getattr(self._tokenizer, "max_seq_len", None),
            model_max=getattr(self._model, "max_seq_len", None),
        )
        result = self._probe(cfg, sample, length, upper, reason)
        self.report.probe(result, sequence_length=length)
        if self.settings.cuts_by_length:
            self.token_budget = result.batch_size * length
            if self._increase is not None:
                return upper, reason  # what does not fit at once is cut
            return _round_down(result.batch_size, self.settings.round_to_power_of_two), result.reason
        return result.batch_size, result.reason

    def _probe(self, cfg: DictConfig, sample: dict[str, Any], length: int, upper: int, reason: str) -> ProbeResult:
        assert self.report is not None
        try:
            meter = memory_meter(self._device)
        except NotImplementedError as error:
            raise ConfigError(str(error)) from error
        path = self.report.directory / "probe.json"
        key = self._cache_key(cfg, length, upper, meter.device_name, meter.total_bytes)
        stored = load_result(path, key)
        if stored is not None:
            available = memory_budget(self.settings, meter)
            if stored.peak_bytes <= available:
                log.info("maximum batch size %d, from the stored probe %s", stored.batch_size, path)
                return stored
            log.info("stored probe result ignored: it takes %d bytes, and %d are left", stored.peak_bytes, available)
        result = find_maximum_batch_size(
            training_step(self, sample),
            # A budget of tokens is no size to round.
            replace(self.settings, round_to_power_of_two=self._rounds),
            meter,
            upper=upper,
            upper_reason=reason,
            include=self.reference_batch_size if self._increase is not None else None,
            remedies=lambda: remedies(self, cfg, sample),
        )
        store_result(path, key, result)
        return result

    @property
    def _rounds(self) -> bool:
        return self.settings.round_to_power_of_two and not self.settings.cuts_by_length

    def _cache_key(self, cfg: DictConfig, length: int, upper: int, device: str, total_bytes: int) -> dict[str, Any]:
        key = {name: _plain(cfg.get(name)) for name in _KEYS_OF_MEMORY}
        key["optimizer"] = {k: v for k, v in key["optimizer"].items() if k != "lr"}  # what is tuned most often
        key |= {"round_to_power_of_two": self._rounds, "cuts_by_length": self.settings.cuts_by_length}
        for name in ("search", "memory_limit", "headroom"):
            value = getattr(self.settings, name)
            key[name] = value if isinstance(value, (str, bool)) or value is None else repr(value)
        key["include"] = self.reference_batch_size if self._increase is not None else None
        key |= {"recipe": type(self).__name__, "sequence_length": length, "upper": upper}
        key |= {"packed": is_packed(self._dataloader.dataset), "device": device, "total_bytes": total_bytes}
        key |= {"python": platform.python_version(), **{name: _version(name) for name in _VERSIONS}}
        return key

    def _state_to_store(self) -> dict[str, Any] | None:
        if self._controller is None:
            return None  # off is stock, its checkpoints included
        return {
            "batch_size": self._controller.batch_size,
            "configured_batch_size": self.reference_batch_size,
            "global_step": self.global_step,
            "random_state": random_state(self._device),
        }


def run_recipe(recipe_class: type[Any], cfg: DictConfig) -> None:
    """Set a recipe up and train it, as the ``recipe_main`` of a stock recipe does; a mistake ends in one line."""
    if not logging.getLogger().handlers:
        logger = logging.getLogger("adaptive_batching")
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s: %(message)s"))
            logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        config.log_config(recipe_name=recipe_class.__name__, cfg=cfg)
        recipe = recipe_class(cfg=cfg)
        recipe.setup(cfg=cfg)
        recipe.train()
        recipe.cleanup()
    except (ConfigError, IncreaseFunctionError, DoesNotFitError) as error:
        if error.__cause__ is not None:
            log.error("the cause, in full:", exc_info=error.__cause__)
        raise SystemExit(f"error: {error}") from None


def _round_down(size: int, to_power_of_two: bool) -> int:
    return 1 << (size.bit_length() - 1) if to_power_of_two else size


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
