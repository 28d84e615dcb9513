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
    """Record CUDA's allocations inside, if batch number ``index`` of ``epoch``, both from 0, is one to record."""
    if history is None or epoch > 0:
        yield
        return
    if index == history.first:
        torch.cuda.memory._record_memory_history()
    yield
    if index == history.last:
        torch.cuda.memory._record_memory_history(enabled=None)
