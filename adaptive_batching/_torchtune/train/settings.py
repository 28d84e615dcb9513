"""From a torchtune config to settings: the only reader of our keys in a ``DictConfig``."""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune import training

from adaptive_batching._config import SECTION, TOP_LEVEL, AdaptiveBatchingConfig
from adaptive_batching._device import device_name
from adaptive_batching._report.about import about
from adaptive_batching._values import ConfigError, Fixed, Whole, require_positive_int

log = logging.getLogger(__name__)

_OF_GROWTH = ["increase_every", "grow_during_warmup", "grow_beyond_memory"]
_OF_SIZE = ["lr_scaling", "keep_global_batch"]
FIELDS = (*TOP_LEVEL, "adaptive_batching")
VALIDATION = ("dataset_val", "batch_size_val", "run_val_every_n_steps")  # as on torchtune's main branch


def read_settings(
    cfg: DictConfig, *, warns: bool = True, is_distributed: bool | None = None, is_on: bool = False
) -> AdaptiveBatchingConfig:
    """Read and validate what a config says about adaptive batching.

    Args:
        cfg: The config.
        warns: Log the settings that do nothing.
        is_distributed: True for a recipe that shards its model; None to ask this process, which may not be running it.
        is_on: True for a recipe that is not stock's own whatever the config says.
    """
    if is_distributed is None:
        is_distributed = training.is_distributed()
    for key in map(str, cfg):
        _check_owner(key, cfg)
    check_names(cfg, {*FIELDS, *VALIDATION})
    values: dict[str, Any] = {key: _plain(cfg, key) for key in TOP_LEVEL}
    if values["use_maximum_batch_size"] is None:
        values["use_maximum_batch_size"] = False
    if _is_taken_away(values["batch_increase_function"]):
        values["batch_increase_function"] = None
    section = _plain(cfg, "adaptive_batching")
    settings = AdaptiveBatchingConfig.from_mapping(section, **values, batch_size=cfg.batch_size)
    collate_fn = cfg.get("collate_fn", "")
    if "left_pad" in str(collate_fn):
        raise ConfigError(
            f"collate_fn={collate_fn!r} pads on the left, which is for inference; use torchtune.data.padded_collate_sft"
        )
    if cfg.get("optimizer_in_bwd", False) and is_distributed:
        _check_against_optimizer_in_backward(cfg, settings)
    is_on = is_on or settings.enabled or cfg.get("run_val_every_n_steps") is not None
    if is_on and settings.keep_global_batch and cfg.get("gradient_accumulation_steps", 1) == 1:
        raise ConfigError(
            "adaptive_batching.keep_global_batch=True with gradient_accumulation_steps=1 leaves batch_size no room to "
            "grow; raise gradient_accumulation_steps and lower batch_size, or set keep_global_batch=False"
        )
    if is_on and cfg.get("enable_async_checkpointing", False):
        raise ConfigError(
            "enable_async_checkpointing=True: asynchronous checkpoints lack what adaptive batching resumes from; "
            "set enable_async_checkpointing=False, or leave its fields unset"
        )
    if warns:
        _warn_of_what_does_nothing(settings, is_on=is_on)
    return settings


@dataclass(frozen=True)
class ValidationSettings:
    dataset: Any  # a component, or a list of them
    every: int  # optimizer steps from one validation to the next
    batch_size: int | None = None  # samples of a forward; None to follow the training batch


def read_validation(cfg: DictConfig, *, warns: bool = True) -> ValidationSettings | None:
    """Read and validate what a config says about validation; None for no validation."""
    dataset, batch_size, every = (cfg.get(key) for key in VALIDATION)
    for key in VALIDATION[1:]:
        if cfg.get(key) is not None:
            require_positive_int(key, cfg[key])
    if _is_taken_away(dataset):
        dataset = None
    parts = dataset if isinstance(dataset, ListConfig) else [] if dataset is None else [dataset]
    if any(not isinstance(part, DictConfig) or "_component_" not in part for part in parts):
        raise ConfigError(
            f"dataset_val={_plain(cfg, 'dataset_val')!r} is not a component; write it like dataset, with "
            "dataset_val._component_"
        )
    if every is None:
        for key, value in zip(VALIDATION, (dataset, batch_size), strict=False):
            if warns and value is not None:
                log.warning("%s=%s does nothing without run_val_every_n_steps", key, _plain(cfg, key))
        return None
    if not parts:
        raise ConfigError(
            f"run_val_every_n_steps={every} has no data to validate on; set dataset_val, a component like dataset, or "
            "run_val_every_n_steps=null"
        )
    return ValidationSettings(dataset, every, batch_size)


def check_names(cfg: DictConfig, known: set[str]) -> None:
    """Refuse keys at the top level that are all but one of ``known``, and that the config does not use itself."""
    for key in map(str, cfg):
        close = () if key in known else difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.85)
        if close and f"${{{key}}}" not in OmegaConf.to_yaml(cfg):
            raise ConfigError(f"{key} is unknown; did you mean {close[0]!r}?")


def _check_owner(key: str, cfg: DictConfig) -> None:
    """Refuse a setting of ours that stands outside its section."""
    if key in SECTION and f"${{{key}}}" not in OmegaConf.to_yaml(cfg):  # else it is a name that the config uses itself
        raise ConfigError(
            f"{key}={cfg.get(key)!r} does nothing at the top level; it belongs to a section: write "
            f"adaptive_batching.{key}={cfg.get(key)}"
        )


def _warn_of_what_does_nothing(settings: AdaptiveBatchingConfig, *, is_on: bool) -> None:
    if settings.grows:
        return
    default, keys, without = AdaptiveBatchingConfig(), _OF_GROWTH, "batch_increase_function"
    if not is_on:
        without = "any other field set"
        keys = [key for key in SECTION if key != "recover_from_oom"]
    elif not settings.resizes:
        keys, without = _OF_GROWTH + _OF_SIZE, "a field that changes the batch"
    for key in keys:
        if getattr(settings, key) != getattr(default, key):
            log.warning("adaptive_batching.%s=%s does nothing without %s", key, getattr(settings, key), without)


def _check_against_optimizer_in_backward(cfg: DictConfig, settings: AdaptiveBatchingConfig) -> None:
    size = settings.micro_batch_size
    runs_whole = isinstance(size, Whole) or (not settings.resizes and size == Fixed(cfg.batch_size))
    if runs_whole and not (settings.enabled and settings.grow_beyond_memory):
        return
    what = "adaptive_batching.grow_beyond_memory=True" if runs_whole else f"micro_batch_size={size}"
    raise ConfigError(
        f"optimizer_in_bwd=True cannot accumulate micro-batches on several devices ({what}, "
        f"batch_size={cfg.batch_size}); set optimizer_in_bwd=False"
    )


def report_dir(cfg: DictConfig, settings: AdaptiveBatchingConfig) -> Path:
    return Path(settings.report_dir) if settings.report_dir else Path(cfg.output_dir) / "adaptive_batching"


def describe(cfg: DictConfig, recipe: str, device: torch.device, num_ranks: int) -> dict[str, Any]:
    config = _whole(cfg)
    model = str((config.get("model") or {}).get("_component_", "")).rpartition(".")[2]
    return about(recipe, model, config, device=device_name(device), ranks=num_ranks, packages=("torch", "torchtune"))


def _whole(cfg: Any) -> Any:
    try:
        return OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException:  # a value that cannot be resolved, and that nothing has asked for
        return OmegaConf.to_container(cfg, resolve=False)


def _is_taken_away(value: Any) -> bool:
    """Return True for what torchtune makes of key=null on the command line, over a component in the YAML."""
    return isinstance(value, (dict, DictConfig)) and value.get("_component_", ...) is None


def _plain(cfg: DictConfig, key: str) -> Any:
    value = cfg.get(key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
