"""CUDA's allocations, recorded for the profiler as stock does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MemoryHistory:
    """Batches of the first epoch during which CUDA's allocations are recorded for the profiler."""

    first: int
    last: int


@contextlib.contextmanager
def recorded_memory(history: MemoryHistory | None, epoch: int, index: int) -> Iterator[None]:
    """Record CUDA's allocations while the profiler is active in the first epoch, if it is asked to.

    Args:
        history: When to record; None for never.
        epoch: The epoch, from 0.
        index: Number of the batch that runs inside, from 0 in each epoch.
    """
    if history is None or epoch > 0:
        yield
        return
    if index == history.first:
        torch.cuda.memory._record_memory_history()
    yield
    if index == history.last:
        torch.cuda.memory._record_memory_history(enabled=None)
