"""How much memory training may take, and what to say where not even a batch of one sample fits in that."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence

import torch

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory.caching_allocator import allocator_advice
from adaptive_batching._memory.meter import MemoryMeter, memory_meter
from adaptive_batching._probe.paged_states import free_without_managed
from adaptive_batching._probe.sizes import Measurement
from adaptive_batching._ranks.agree import ALONE, Ranks
from adaptive_batching._values import AdaptiveBatchingError, ConfigError, MemoryAmount, memory_size

log = logging.getLogger(__name__)


class DoesNotFitError(AdaptiveBatchingError, RuntimeError):
    """Raised if training does not fit in memory, from the start or at a later step. The message names a remedy."""

    @classmethod
    def even_of_few(cls, less_memory: str) -> DoesNotFitError:
        """Return the error of a forward of a few tokens; ``less_memory`` says what to do."""
        return cls(
            f"out of memory in a forward pass of a few tokens; nothing larger will fit. What takes less: {less_memory}"
        )


def memory_budget(config: AdaptiveBatchingConfig, meter: MemoryMeter) -> int:
    """Return the peak bytes that training may take: used plus free, within ``memory_limit``, else less ``headroom``."""
    headroom = config.headroom.bytes_of(meter.total_bytes) if config.memory_limit is None else 0
    return max(memory_available(config, meter) - headroom, 0)


def memory_available(config: AdaptiveBatchingConfig, meter: MemoryMeter) -> int:
    """Return the bytes in use plus those free, within ``memory_limit``."""
    available = meter.used_bytes() + free_without_managed(meter)
    return available if config.memory_limit is None else min(_allowed(config.memory_limit, meter), available)


def _allowed(limit: MemoryAmount, meter: MemoryMeter) -> int:
    """Return what is left of ``limit`` for what the meter counts: it is for all that the process takes."""
    return limit.bytes_of(meter.total_bytes) - meter.outside_bytes()


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
    """Raise ConfigError if on any of the ranks the limits leave no room for a step, besides ``added`` bytes.

    A ``memory_limit`` above what the device has is said once.
    """
    total = meter.total_bytes
    if (limit := config.memory_limit) is not None and limit.bytes_of(total) > total:
        _say_that_limit_is_above(str(limit), memory_size(total))
    problem = ""
    free = free_without_managed(meter)  # first: what has left the device does not count as outside, either
    if limit is not None:
        taken = meter.used_bytes() + added + meter.outside_bytes()
        if limit.bytes_of(total) <= taken:
            problem = (
                f"adaptive_batching.memory_limit={limit} is used up before the first step: {memory_size(taken)} are in "
                f"use already; write how much training may use in total, out of the device's {memory_size(total)}"
            )
    else:
        headroom = config.headroom.bytes_of(total)
        if free <= max(headroom, added):
            problem = (
                f"adaptive_batching.headroom={config.headroom} is {memory_size(headroom)}, but only "
                f"{memory_size(free)} are free on the device; write less, or stop other programs there"
            )
    for of_rank in ranks.gather(problem):
        if of_rank:
            raise ConfigError(of_rank)


@functools.cache
def _say_that_limit_is_above(limit: str, total: str) -> None:
    log.warning("adaptive_batching.memory_limit=%s is more than the device has, which is %s", limit, total)


def explain(device: torch.device, budget: int, measurements: Sequence[Measurement], failure: str, remedy: str) -> str:
    """Return why a batch of one does not fit, and what to do; ``failure`` is the last error by which memory ran out."""
    message = f"a batch of one sample does not fit in {memory_size(budget)}"
    measured = next((m.peak_bytes for m in measurements if m.batch_size == 1 and m.peak_bytes is not None), None)
    if measured is not None:
        message += f": it took {memory_size(measured)}, {memory_size(max(measured - budget, 0))} too much"
    elif failure:
        message += f": it ran out of memory ({failure})"
    ways = [remedy] if remedy else []
    if (advice := allocator_advice(device)) is not None:
        ways.append(f"set the environment variable {advice}")
    return "; ".join([message, *ways, "or raise adaptive_batching.memory_limit, if set"])
