"""Results of probes, kept in a run's folder and taken again while nothing that memory depends on has changed."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory import MemoryMeter, memory_meter
from adaptive_batching._probe.budget import memory_budget, require_room
from adaptive_batching._probe.result import ProbeResult, load_result, store_result
from adaptive_batching._torchtune.data import is_packed
from adaptive_batching._torchtune.host import Host
from adaptive_batching._torchtune.step import MakeOptimizers
from adaptive_batching._values import ByLength, ConfigError, Explore, Fixed, MemoryAmount, memory_size

log = logging.getLogger(__name__)

# Bytes of host memory that a recipe takes on top of its steps: samples, the record, the progress bar, metrics.
_ADDED_BY_TRAINING = 16 * 2**20
_VERSIONS = ("adaptive-batching", "torch", "torchtune", "torchao", "bitsandbytes")


@dataclass(frozen=True)
class Circumstances:
    """Facts of a run, besides its model and data, that the memory of a step depends on."""

    config: Callable[[], Mapping[str, Any]]
    """Returns the config's entries that memory may depend on."""

    make_optimizers: MakeOptimizers
    measures_noise: bool = False


def kept_probe(
    host: Host,
    settings: AdaptiveBatchingConfig,
    circumstances: Circumstances,
    facts: Mapping[str, Any],
    path: Path,
    find: Callable[[AdaptiveBatchingConfig, MemoryMeter], ProbeResult],
) -> ProbeResult:
    """Take the result that an earlier run has stored at ``path``, or find one and store it.

    ``facts`` are what memory depends on in this probe alone; ``find`` keeps within the settings that it is given. A
    device whose memory cannot be measured, or limits that leave none of it, are a :class:`ConfigError`.
    """
    try:
        meter = memory_meter(host.device)
    except NotImplementedError as error:
        raise ConfigError(str(error)) from error
    shares_memory = meter.device.type == "cpu"
    require_room(settings, meter, host.ranks, added=_ADDED_BY_TRAINING if shares_memory else 0)
    if shares_memory:
        settings = _with_room_for_training(settings, meter)
    ranks = host.ranks
    key = {**circumstances.config(), **settings_of_memory(settings), **facts}
    key |= {"measures_noise": circumstances.measures_noise}
    key |= {"packed": is_packed(host.loader.dataset)}
    key |= {"device_name": meter.device_name, "total_bytes": meter.total_bytes}
    key |= {"allocator_settings": meter.allocator_settings()}
    key |= {"ranks": ranks.size, "sharded": host.collectives is not None}
    key |= {"python": platform.python_version(), **{name: _version(name) for name in _VERSIONS}}
    stored = ranks.on_first(lambda: load_result(path, key))
    if stored is not None:
        available = int(ranks.smallest(memory_budget(settings, meter)))
        of_enough = [peak for size, peak in stored.predicted if size <= (stored.enough or 0)]
        peak = max([stored.peak_bytes, *(peak for *_, peak in stored.shorter), *of_enough])
        if peak <= available:
            log.info("maximum batch size %d, from the stored probe %s", stored.batch_size, path)
            return stored
        log.info("stored probe result ignored: it takes %s, and %s are left", memory_size(peak), memory_size(available))
    result = find(settings, meter)
    ranks.on_first(lambda: store_result(path, key, result))
    return result


def settings_of_memory(settings: AdaptiveBatchingConfig) -> dict[str, Any]:
    """Return what calls for another probe when it changes in the settings of adaptive batching."""
    return {
        "search": settings.search,
        "round_to_power_of_two": settings.round_to_power_of_two,
        "memory_limit": repr(settings.memory_limit),
        "headroom": repr(settings.headroom),
        "fills_memory": settings.fills_memory,
        # A forward then runs while the gradients of the one before are held.
        "runs_in_parts": runs_in_parts(settings),
        "cuts_by_length": isinstance(settings.micro_batch_size, (ByLength, Explore)),
        "only_cuts": only_cuts(settings),
    }


def only_cuts(settings: AdaptiveBatchingConfig) -> bool:
    """Return True if the batch stays as it is, and is only cut."""
    return isinstance(settings.micro_batch_size, ByLength) and not settings.use_maximum_batch_size


def runs_in_parts(settings: AdaptiveBatchingConfig) -> bool:
    return settings.fills_memory or isinstance(settings.micro_batch_size, Fixed)


def _with_room_for_training(settings: AdaptiveBatchingConfig, meter: MemoryMeter) -> AdaptiveBatchingConfig:
    """Leave room for what the program adds while it trains, where tensors and program share the memory measured."""
    log.info("%s are kept free for what training takes besides its steps", memory_size(_ADDED_BY_TRAINING))
    least = MemoryAmount(num_bytes=_ADDED_BY_TRAINING)
    if settings.memory_limit is None:
        headroom = max(settings.headroom, least, key=lambda amount: amount.of(meter.total_bytes))
        return replace(settings, headroom=headroom)
    limit = max(settings.memory_limit.of(meter.total_bytes) - _ADDED_BY_TRAINING, 1)
    return replace(settings, memory_limit=MemoryAmount(num_bytes=limit))


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
