"""Run micro-batches so that all ranks come to know when one of them has run out of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from adaptive_batching.memory import forget_frames, is_out_of_memory
from adaptive_batching.ranks.agree import Ranks
from adaptive_batching.ranks.fsdp import MicroBatchCollectives

T = TypeVar("T")


class CannotRecoverError(RuntimeError):
    """Memory ran out on a rank that does not know what its peers wait for. The message says what would help."""


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
    ranks: Ranks,
    collectives: MicroBatchCollectives | None,
    discard: Callable[[], None],
    count_retries: Callable[[], int] = lambda: 0,
) -> Outcome[T]:
    """Run forward and backward of each, and stop where memory runs out.

    Where a model is sharded, a rank that runs out of memory issues the collectives that its peers wait for, so that
    all ranks come to the end. All ranks run the same number of micro-batches.

    Args:
        micro_batches: Each a function that runs forward and backward.
        ranks: The ranks of the run.
        collectives: Those of a sharded model; None: there is none, or none can be issued for the other ranks, so that
            they do not come to the end and the one that failed has to end the run.
        discard: Drops gradients and whatever else a step that broke off leaves behind, and really releases its memory.
            Where a rank has failed it is called on all of them in the end, and on that rank before it issues anything
            more.
        count_retries: How often the allocator of this rank has had to free its cache.

    Raises:
        CannotRecoverError: If memory runs out in a micro-batch whose collectives are not those that were recorded, or
            again where only these are issued.
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
    if failure is not None:
        discard()
        if collectives is not None:
            if not collectives.can_drain:
                raise CannotRecoverError(
                    "memory ran out, and the other ranks cannot be told: the collectives of a forward and backward are "
                    "not always the same, so what they wait for is not known. Set a smaller batch_size or "
                    "micro_batch_size, or sequences of one length (dataset.packed=True)"
                ) from failure
            _drain(collectives, len(micro_batches) - len(results) - 1)
    worst = 2 if failure is not None else 1 if count_retries() > retries_before else 0
    if collectives is not None:
        worst = int(ranks.largest(worst))
        if worst == 2:
            collectives.reset()
            # On the rank that failed, too: layers that it had gathered have only now their own parameters again, with
            # the gradients of earlier micro-batches.
            discard()
    return Outcome(results, worst == 2, worst == 1, len(results) if failure is not None else None, failure)


def _drain(collectives: MicroBatchCollectives, num_micro_batches: int) -> None:
    failure: Exception | None = None
    try:
        collectives.drain(num_micro_batches)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = error
    if failure is not None:
        raise CannotRecoverError(
            "memory ran out, and again in telling the other ranks, although this one had given its own back: another "
            "process has taken it, or there is too little for the smallest batch. Free the device, or set a smaller "
            "batch_size"
        ) from failure
