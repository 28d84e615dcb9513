"""How much memory training may take, and whether any of that is left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory import MemoryMeter, memory_meter
from adaptive_batching._ranks.agree import ALONE, Ranks
from adaptive_batching._trace.bits_and_bytes import move_to_host
from adaptive_batching._values import ConfigError, MemoryAmount, memory_size


def memory_budget(config: AdaptiveBatchingConfig, meter: MemoryMeter) -> int:
    """Return the peak bytes that training may take: used plus free, within ``memory_limit``, else less ``headroom``."""
    headroom = config.headroom.of(meter.total_bytes) if config.memory_limit is None else 0
    return max(memory_available(config, meter) - headroom, 0)


def memory_available(config: AdaptiveBatchingConfig, meter: MemoryMeter) -> int:
    """Return the bytes in use plus those free, within ``memory_limit``."""
    available = meter.used_bytes() + _free_bytes(meter)
    return available if config.memory_limit is None else min(_allowed(config.memory_limit, meter), available)


def _allowed(limit: MemoryAmount, meter: MemoryMeter) -> int:
    """Return what is left of ``limit`` for what the meter counts: it is for all that the process takes."""
    return limit.of(meter.total_bytes) - meter.outside_bytes()


def _free_bytes(meter: MemoryMeter) -> int:
    """Return what this process could take now in bytes; its own managed memory makes room, and does not count."""
    move_to_host(meter.device)
    return meter.free_bytes()


@contextlib.contextmanager
def within_memory_limit(config: AdaptiveBatchingConfig, device: torch.device) -> Iterator[None]:
    """Have this process run out of memory at ``memory_limit``, if there is one and the device can be limited."""
    with contextlib.ExitStack() as stack:
        if config.memory_limit is not None:
            with contextlib.suppress(NotImplementedError):
                meter = memory_meter(device)
                stack.enter_context(meter.limit(max(_allowed(config.memory_limit, meter), 0)))
        yield


def require_room(config: AdaptiveBatchingConfig, meter: MemoryMeter, ranks: Ranks = ALONE, *, added: int = 0) -> None:
    """Raise ConfigError if on any of the ranks the limits leave no room for a step, besides ``added`` bytes."""
    problem = _no_room(config, meter, added)
    problems = [each for each in ranks.gather(problem) if each]
    if problems:
        raise ConfigError(problems[0])


def _no_room(config: AdaptiveBatchingConfig, meter: MemoryMeter, added: int) -> str | None:
    used, free = meter.used_bytes(), _free_bytes(meter)
    if config.memory_limit is not None:
        outside = meter.outside_bytes()
        if config.memory_limit.of(meter.total_bytes) > used + added + outside:
            return None
        return (
            f"adaptive_batching.memory_limit={config.memory_limit} is used up before the first step, in which "
            f"{memory_size(used + added + outside)} are taken already; write what training may take in all, of the "
            f"{memory_size(meter.total_bytes)} that the device has"
        )
    headroom = config.headroom.of(meter.total_bytes)
    if free > max(headroom, added):
        return None
    return (
        f"adaptive_batching.headroom={config.headroom} is {memory_size(headroom)}, and only {memory_size(free)} are "
        f"free on the device; write less, or end what else runs there"
    )
