"""Run micro-batches so that all ranks come to know when one of them has run out of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from adaptive_batching.distributed import Ranks
from adaptive_batching.fsdp import MicroBatchCollectives
from adaptive_batching.memory import forget_frames, is_out_of_memory

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of a sequence of micro-batches."""

    results: list[T]
    """Of those that ran on this rank."""

    failed: bool
    """Whether a rank ran out of memory; it is the same on all of them."""

    retried: bool = False
    """Whether an allocator had to free its cache to find room; it is the same on all ranks."""

    failed_here: int | None = None
    """Number of the micro-batch that ran out of memory on this rank, from 0."""

    error: Exception | None = None
    """What it raised, without tracebacks, which would hold its tensors."""


def run_micro_batches(
    micro_batches: Sequence[Callable[[], T]],
    device: torch.device,
    ranks: Ranks,
    collectives: MicroBatchCollectives | None,
    count_retries: Callable[[], int] = lambda: 0,
) -> Outcome[T]:
    """Run forward and backward of each, and stop where memory runs out.

    Where a model is sharded, a rank that runs out of memory issues the collectives that its peers wait for, so that
    all ranks come to the end. All ranks run the same number of micro-batches.

    Args:
        micro_batches: Each a function that runs forward and backward.
        device: Where they run; what a failed one leaves in its cache is given back.
        ranks: The ranks of the run.
        collectives: Those of a sharded model; None: there is none, or none can be issued for the other ranks, so that
            they do not come to the end and the one that failed has to end the run.
        count_retries: How often the allocator of this rank has had to free its cache.

    Raises:
        Exception: Whatever a micro-batch raises, but for out-of-memory errors, which are returned.
    """
    results: list[T] = []
    retries_before = count_retries()
    failure: Exception | None = None
    for micro_batch in micro_batches:
        if collectives is not None:
            collectives.start()
        try:
            results.append(micro_batch())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error
        if failure is not None:
            forget_frames(failure)
            break
        if collectives is not None:
            collectives.finish()
    if failure is not None and collectives is not None:
        gc.collect()
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
        collectives.drain(len(micro_batches) - len(results) - 1)
    worst = 2 if failure is not None else 1 if count_retries() > retries_before else 0
    if collectives is not None:
        worst = int(ranks.largest(worst))
        if worst == 2:
            collectives.reset()
    return Outcome(results, worst == 2, worst == 1, len(results) if failure is not None else None, failure)
