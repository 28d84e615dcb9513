"""Run micro-batches so that all ranks learn when one of them has run out of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from adaptive_batching._out_of_memory import forget_frames, is_out_of_memory
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._ranks.fsdp import CannotRecoverError, MicroBatchCollectives

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The outcome of running micro-batches; ``failed`` and ``retried`` are the same on all ranks."""

    results: list[T]  # of the micro-batches that ran on this rank
    failed: bool  # any rank ran out of memory
    retried: bool = False  # an allocator had to empty its cache to find room
    failed_here: int | None = None  # number of the micro-batch that ran out of memory on this rank, from 0
    error: Exception | None = None  # of that micro-batch, without tracebacks, which would keep its tensors alive


def run_micro_batches(
    micro_batches: Sequence[Callable[[], T]],
    ranks: Ranks,
    collectives: MicroBatchCollectives | None,
    discard: Callable[[], None],
    count_retries: Callable[[], int] = lambda: 0,
) -> Outcome[T]:
    """Run forward and backward of each micro-batch, and stop if memory runs out.

    If the model is sharded, a rank that runs out of memory issues the ``collectives`` that its peers wait for, so that
    all ranks come to the end of the same number of micro-batches. They are None if there are none, or if they cannot be
    issued for the others: the rank that failed then has to end the run. If what is left to issue is not known, or
    memory runs out again while only collectives are issued, raise CannotRecoverError.

    ``discard`` drops gradients and anything else that an aborted step leaves behind, and really releases its memory; on
    the rank that failed before it issues any more collectives, and on all ranks at the end. ``count_retries`` returns
    how often this rank's allocator has had to empty its cache.
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
                    "memory ran out, and the other ranks cannot be told: the collectives of a forward and backward "
                    "vary, so what they wait for is unknown. Set a smaller batch_size or micro_batch_size, or "
                    "sequences of one length (dataset.packed=True)"
                ) from failure
            _drain(collectives, len(micro_batches) - len(results) - 1)
    worst = 2 if failure is not None else 1 if count_retries() > retries_before else 0
    if collectives is not None:
        worst = int(ranks.largest(worst))
        if worst == 2:
            collectives.reset()
            # Also on the rank that failed: only now do the layers that it had gathered have their own parameters back,
            # with the gradients of earlier micro-batches.
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
            "memory ran out, and again while telling the other ranks, although this rank had released its memory: "
            "another process took it, or not even the smallest batch fits. Free the device, or set a smaller "
            "batch_size"
        ) from failure
