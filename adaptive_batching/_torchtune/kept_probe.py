"""Results of probes, kept in a run's folder and taken again while nothing that memory depends on has changed."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer
from torchtune import config

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory import MemoryMeter, memory_meter
from adaptive_batching._probe.does_not_fit import memory_budget, require_room
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._torchtune.data import is_packed
from adaptive_batching._torchtune.host import Host
from adaptive_batching._torchtune.stand_ins import without_kernels
from adaptive_batching._values import ByLength, ConfigError, Explore, Fixed, MemoryAmount, memory_size

log = logging.getLogger(__name__)

# Bytes of host memory that a recipe takes on top of its steps: samples, the record, the progress bar, metrics.
_ADDED_BY_TRAINING = 16 * 2**20
_VERSIONS = ("adaptive-batching", "torch", "torchtune", "torchao", "bitsandbytes")
# Keys of a config that the memory of a training step cannot depend on. Any other that changes calls for another probe,
# known here or not: a probe too many costs a minute, a stored result that is wrong costs the run.
_NOT_OF_MEMORY = frozenset(
    {
        "output_dir", "checkpointer", "value_checkpointer", "resume_from_checkpoint", "save_adapter_weights_only",
        "save_every_n_steps",
        "seed", "shuffle", "epochs", "max_steps_per_epoch", "lr_scheduler",
        "metric_logger", "log_every_n_steps", "log_level", "log_peak_memory_stats",
        "dataset_val", "batch_size_val", "run_val_every_n_steps",
        # What of these matters has entries of its own.
        "batch_size", "use_maximum_batch_size", "batch_increase_function", "micro_batch_size", "adaptive_batching",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Circumstances:
    """Facts of a run, besides its model and data, that the memory of a step depends on."""

    cfg: DictConfig
    measures_noise: bool = False

    def config(self) -> dict[str, Any]:
        """Return the entries of the config that call for another probe when they change."""
        cfg = OmegaConf.merge(self.cfg, {"output_dir": ""})  # others are interpolated from it
        plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
        found = {name: value for name, value in plain.items() if name not in _NOT_OF_MEMORY}
        found["optimizer"] = {k: v for k, v in found["optimizer"].items() if k != "lr"}  # what is tuned most often
        return found

    def make_optimizers(self, groups: Sequence[Sequence[nn.Parameter]]) -> list[Optimizer]:
        """Return an optimizer for each group of parameters, as the config has it, for a trace."""
        traced = without_kernels(self.cfg.optimizer)
        return [config.instantiate(traced, list(group)) for group in groups]


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
    ranks, shares_memory = host.ranks, meter.device.type == "cpu"
    require_room(settings, meter, ranks, added=_ADDED_BY_TRAINING if shares_memory else 0)
    if shares_memory:
        settings = _with_room_for_training(settings, meter)
    key = {
        **circumstances.config(),
        **settings_of_memory(settings),
        **facts,
        "measures_noise": circumstances.measures_noise,
        "packed": is_packed(host.loader.dataset),
        "device_name": meter.device_name,
        "total_bytes": meter.total_bytes,
        "allocator_settings": meter.allocator_settings(),
        "ranks": ranks.size,
        "sharded": host.collectives is not None,
        "python": platform.python_version(),
        **{name: _version(name) for name in _VERSIONS},
    }
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


def load_result(path: Path, key: dict[str, Any]) -> ProbeResult | None:
    """Return the result stored at ``path`` under the same ``key``; else None, and log why a stored one is ignored."""
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_text())
        result, stored_key = ProbeResult.from_dict(stored["result"]), stored["key"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("probe result %s cannot be read (%s); probing again", path, error)
        return None
    key = json.loads(json.dumps(key))  # convert tuples and the like as JSON does
    changed = sorted(k for k in {*key, *stored_key} if key.get(k, ...) != stored_key.get(k, ...))
    if changed:
        shown = ", ".join(f"{k}: {stored_key.get(k)!r} -> {key.get(k)!r}" for k in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        log.info("stored probe result ignored, because these changed: %s%s", shown, more)
        return None
    return result


def store_result(path: Path, key: dict[str, Any], result: ProbeResult) -> None:
    """Write ``result`` to ``path`` atomically; log a warning if that fails."""
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"key": key, "result": result.to_dict()}, indent=2) + "\n")
        partial.replace(path)
    except OSError as error:
        log.warning("the probe's result cannot be kept in %s (%s); the next run will probe again", path, error)
