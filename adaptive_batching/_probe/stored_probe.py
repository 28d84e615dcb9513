"""The stored result of a probe, and the conditions under which it can be used again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import platform
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

import adaptive_batching
from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory.meter import MemoryMeter
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._probe.sizing import ProbeRequest
from adaptive_batching._values import memory_size

log = logging.getLogger(__name__)

T = TypeVar("T")

# Memory by which two equal runs were seen to differ, as a share of it: no more than that is no reason to probe again.
_NOISE = 1.02


@dataclass(frozen=True)
class Conditions:
    """Everything that the memory of a training step depends on. Plain values, which JSON leaves as they are."""

    settings: Mapping[str, Any]
    """Of adaptive batching, as far as memory depends on them."""

    run: Mapping[str, Any]
    """Entries of the run's config that memory may depend on, and its data."""

    model: Mapping[str, Any]
    """By their names, the models that take part: see :func:`described`."""

    versions: Mapping[str, str]
    devices: Mapping[str, Any]

    def changes(self, now: Conditions) -> str:
        """Return what is different ``now``, in words; empty if nothing is."""
        before, after = dict(_leaves(dataclasses.asdict(self))), dict(_leaves(dataclasses.asdict(now)))
        changed = sorted(key for key in {*before, *after} if before.get(key, ...) != after.get(key, ...))
        shown = [f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in changed[:3]]
        return ", ".join(shown) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")


@dataclass(frozen=True)
class StoredProbe:
    """The result of a probe, and what it depends on."""

    result: ProbeResult
    conditions: Conditions
    upper: int
    """Largest size that the probe was to try."""

    tokens: int = 1
    """Of each sample in the probe."""

    @property
    def samples(self) -> int:
        """The largest forward that is known to fit and of use, in samples as long as those of the probe."""
        return self.result.enough or self.result.batch_size

    @property
    def peak_bytes(self) -> int:
        """The most memory that any size takes which the result names."""
        of_enough = [peak for size, peak in self.result.predicted if size <= (self.result.enough or 0)]
        return max([self.result.peak_bytes, *of_enough])

    @property
    def ends_at_bound(self) -> bool:
        """True if a larger :attr:`upper` could have had a larger answer."""
        if self.result.enough is not None:
            return self.result.enough == self.upper
        return self.result.reason != "memory"

    def next_that_fits(self, available: int) -> int | None:
        """Return the next larger size if memory was too little for it, and ``available`` bytes would do."""
        result = self.result
        if result.enough is not None or self.ends_at_bound or available <= _NOISE * result.budget_bytes:
            return None
        rounds = self.conditions.settings["round_to_power_of_two"]
        larger = 1 << self.samples.bit_length() if rounds else self.samples + max(self.samples // 8, 1)
        larger = min(larger, self.upper)
        sizes = [size for size, _ in result.predicted]
        at = min(bisect_left(sizes, larger), len(sizes) - 1)
        # Without a curve, what a sample takes at most: memory that does not depend on their number is in it.
        size, peak = result.predicted[at] if at >= 0 else (self.samples, result.peak_bytes)
        return larger if max(peak, result.peak_bytes) * max(larger / size, 1) <= available else None

    def within(self, upper: int) -> StoredProbe | None:
        """Return this as a probe up to ``upper`` would find it; None if that is to be measured."""
        result = self.result
        if result.batch_size > upper or (self.ends_at_bound and upper > self.upper):
            return None
        if result.enough is not None and result.enough > upper:
            result = dataclasses.replace(result, enough=upper)
        return dataclasses.replace(self, result=result, upper=upper)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> StoredProbe:
        """Rebuild it from :meth:`to_dict`.

        Raises:
            TypeError, KeyError, ValueError: If ``values`` is something else.
        """
        result = ProbeResult.from_dict(values["result"])
        conditions = Conditions(**values["conditions"])
        read = cls(**{**values, "result": result, "conditions": conditions})
        numbers = (result.batch_size, result.budget_bytes, read.upper, read.tokens, read.samples)
        if not all(isinstance(number, int) and number >= 1 for number in numbers):
            raise ValueError(f"sizes of {numbers}")
        if result.batch_size not in [m.batch_size for m in result.measurements if m.peak_bytes is not None]:
            raise ValueError(f"a batch size of {result.batch_size}, which has not run")
        return read


def taken_again(
    stored: StoredProbe | None, now: Conditions, upper: int, available: int, *, stays: bool, source: str
) -> StoredProbe | None:
    """Return what was found before if it still holds; else None, and say in one line why it does not.

    Args:
        stored: What was found; None if nothing was.
        now: The conditions of this run.
        upper: Largest size of use in this run.
        available: Bytes that training may take.
        stays: True for a run that goes on: sizes that it has trained with stay, although more would fit now.
        source: Where it was found, for messages.
    """
    if stored is None:
        return None
    if changes := stored.conditions.changes(now):
        log.info("probing again: %s does not hold, because these changed: %s", source, changes)
        return None
    bounded = stored.within(upper)
    if bounded is None:
        fewer = upper < stored.upper
        limit = f"found {stored.samples}" if fewer else f"looked no further than {stored.upper}"
        log.info("probing again: %s %s, and now %s %d are of use", source, limit, "only" if fewer else "up to", upper)
        return None
    if bounded.peak_bytes > available:
        needed, left = memory_size(bounded.peak_bytes), memory_size(available)
        log.info("probing again: what %s found takes %s, but only %s are left", source, needed, left)
        return None
    if (larger := bounded.next_that_fits(available)) is not None:
        before, free = memory_size(bounded.result.budget_bytes), memory_size(available)
        if not stays:
            log.info("probing again: %s had %s, and now there are %s", source, before, free)
            return None
        log.info(
            "%s had %s, and now there are %s: about %d would fit instead of %d; a run that goes on keeps its sizes",
            source, before, free, larger, bounded.samples,
        )  # fmt: skip
    return bounded


def settings_of_memory(settings: AdaptiveBatchingConfig, request: ProbeRequest) -> dict[str, Any]:
    """Return what an answer depends on in the settings and in what was asked of the probe."""
    return {
        "search": settings.search,
        "round_to_power_of_two": request.rounds,
        "memory_limit": None if (limit := settings.memory_limit) is None else [limit.num_bytes, limit.fraction],
        "headroom": [settings.headroom.num_bytes, settings.headroom.fraction],
        "coarse": request.coarse,
        "in_parts": request.in_parts,
        "may_stop_early": request.may_stop_early,
    }


def described(model: nn.Module) -> dict[str, Any]:
    """Return the class of a model, its parameters, and the implementations of attention that it has chosen."""
    parameters = list(model.named_parameters())
    lines = [
        f"{name} {list(parameter.shape)} {parameter.dtype} {parameter.requires_grad}" for name, parameter in parameters
    ]
    configs = [getattr(module, "config", None) for module in model.modules()]
    attention = {
        str(implementation)
        for config in configs
        if (implementation := getattr(config, "_attn_implementation", None)) is not None
    }
    return {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for _, parameter in parameters),
        "trained": sum(parameter.numel() for _, parameter in parameters if parameter.requires_grad),
        "names, shapes and dtypes": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
        "attention": sorted(attention),
    }


def described_devices(meter: MemoryMeter, ranks: int, *, is_sharded: bool) -> dict[str, Any]:
    return {
        "name": meter.device_name,
        "total_bytes": meter.total_bytes,
        "allocator_settings": meter.allocator_settings(),
        "ranks": ranks,
        "sharded": is_sharded,
    }


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, this package, torch, and those of ``packages`` that are installed."""
    versions = {"Python": platform.python_version(), "adaptive_batching": adaptive_batching.__version__}
    for name in ("torch", *packages):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def plain(values: Any) -> Any:
    """Return ``values`` as JSON gives them back; what it does not know is written as text that holds in any process."""
    return json.loads(json.dumps(values, default=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value))))


def read_stored(read: Callable[[], T], source: str) -> T | None:
    """Return what ``read`` does; None if there is no such file, or if it has something else in it, which is logged."""
    try:
        return read()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.info("probing again: %s cannot be read (%s: %s)", source, type(error).__name__, error)
        return None


def store_probe(path: Path, stored: StoredProbe) -> None:
    """Write ``stored`` to ``path`` atomically; log a warning if that fails."""
    unfinished = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(stored.to_dict(), indent=2) + "\n")
        unfinished.replace(path)
    except OSError as error:
        log.warning("the probe's result could not be saved to %s (%s); the next run will probe again", path, error)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested mappings with its dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
