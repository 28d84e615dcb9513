"""Additions for the recipes for several devices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torchtune import training

from adaptive_batching._torchtune.stock.loading import replaced_in_torchtune
from adaptive_batching._values import ConfigError

log = logging.getLogger(__name__)


def _without_statistics(name: str) -> Callable[..., Any]:
    """Return stock's method of that name, kept from the memory of an accelerator that is not there."""
    no_stats: dict[str, Callable[..., Any]] = {
        "cleanup_before_training": lambda: None,
        "get_memory_stats": lambda *_, **__: {},
        "log_memory_stats": lambda *_, **__: None,
    }

    def run(recipe: ManyDevices, *args: Any, **kwargs: Any) -> Any:
        with replaced_in_torchtune(**no_stats if recipe._device.type == "cpu" else {}):
            return getattr(super(ManyDevices, recipe), name)(*args, **kwargs)

    return run


class ManyDevices:
    """Mixed into a stock distributed recipe, between ``AdaptiveBatching`` and the recipe."""

    # Set by the stock recipe
    _device: torch.device

    profiles_steps = True
    """Stock's profiler counts optimizer steps rather than batches."""

    def __init__(self, cfg: DictConfig) -> None:
        if not training.is_distributed():
            raise ConfigError("this recipe runs on several devices; launch it with tune run --nproc_per_node <number>")
        # With an offloaded optimizer the host takes part, and stock asks for gloo twice if both devices are the cpu.
        on_cpu = {"get_distributed_backend": lambda *args, **kwargs: "gloo"} if cfg.device == "cpu" else {}
        with replaced_in_torchtune(**on_cpu):
            super().__init__(cfg=cfg)  # type: ignore[call-arg]

    _setup_model = _without_statistics("_setup_model")
    _setup_teacher_model = _without_statistics("_setup_teacher_model")
    _setup_reference_model = _without_statistics("_setup_reference_model")
    train = _without_statistics("train")


def start_process_group(cfg: DictConfig) -> None:
    """Start the process group of a recipe that expects one, if there are several processes and no group yet."""
    if not training.is_distributed() or dist.is_initialized():
        return
    if cfg.get("fsdp_cpu_offload", False):
        training.set_torch_num_threads()  # as stock does: the optimizer runs on the host
    # Stock asks for NCCL whatever the device.
    gathers_on_host = cfg.device != "cpu"
    dist.init_process_group(training.get_distributed_backend(cfg.device, offload_ops_to_cpu=gathers_on_host))
