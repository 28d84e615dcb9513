"""Ranks that train one model together, each with a copy (DDP) or a shard of it (FSDP2), seen alike by an optimizer step.

No rank waits in vain for one that has run out of memory, or failed: copies communicate only when all ranks know that
their forwards and backwards have run, and for shards the failing rank issues what the others wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from adaptive_batching._device import unchanged_random_state
from adaptive_batching._micro_batches.run import Outcome, run_micro_batches
from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._ranks.agree import ALONE, Ranks
from adaptive_batching._ranks.fsdp import CannotRecoverError, MicroBatchCollectives
from adaptive_batching._ranks.gradients import GradientSum

T = TypeVar("T")


class DataParallel:
    """Runs the parts of a step on every rank, and makes their gradients those of all ranks.

    Args:
        ranks: That train together.
        parameters: Returns all that have gradients.
        roots: What FSDP2 shards, from the outside; none if every rank has a copy of the model.
        copy: The copy as DDP wraps it; None if the model is called without DDP.
    """

    def __init__(
        self,
        ranks: Ranks,
        parameters: Callable[[], Sequence[nn.Parameter]],
        roots: Sequence[nn.Module] = (),
        copy: nn.parallel.DistributedDataParallel | None = None,
    ) -> None:
        self.ranks = ranks
        self._parameters = parameters
        self._roots = list(roots)
        self._copy = copy
        self._collectives: MicroBatchCollectives | None = None
        self._sum = GradientSum(ranks, parameters) if ranks.size > 1 and not roots else None

    @property
    def is_sharded(self) -> bool:
        return bool(self._roots)

    def record(self, forward_backward: Callable[[], object], device: torch.device) -> None:
        """Learn which collectives shards need, from a forward and backward of a few tokens that leaves nothing behind.

        All ranks call it before they run parts. Only the first call runs anything.
        """
        if not self._roots or self._collectives is not None:
            return
        collectives = MicroBatchCollectives(self._roots)
        failure: Exception | None = None
        try:
            with unchanged_random_state(device), torch.compiler.set_stance("force_eager"):
                collectives.start()
                forward_backward()
                collectives.finish()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error
        for parameter in self._parameters():
            parameter.grad = None
        if failure is not None:
            raise DoesNotFitError(
                "out of memory in the first forward and backward, of a few tokens; nothing larger will fit. Use more "
                "devices, or checkpoint activations"
            ) from failure
        self._collectives = collectives

    def num_fillers(self, num_parts: int) -> int:
        """Return how many parts without weight follow those of this rank, so that all ranks run as many as shards need.

        A rank without samples runs one.
        """
        wanted = int(self.ranks.largest(num_parts)) if self._roots else 1
        return max(wanted - num_parts, 0)

    def run(
        self, parts: Sequence[Callable[[], T]], discard: Callable[[], None], count_retries: Callable[[], int]
    ) -> Outcome[T]:
        """Run forward and backward of each part, up to the first that runs out of memory on some rank.

        Arguments are those of :func:`run_micro_batches`.

        Raises:
            Exception: Any other error of a part; an :class:`OtherRankError` repeats it on all other ranks.
        """
        if self.ranks.size == 1:
            return run_micro_batches(parts, ALONE, None, discard, count_retries)
        broken: list[Exception] = []
        runs = [partial(_noting, part, broken) for part in parts]
        if self._sum is not None:
            runs[-1] = partial(_and_then, runs[-1], self._sum.prepare, broken)
        try:
            with self.without_sync():
                ranks = self.ranks if self._roots else ALONE
                outcome = run_micro_batches(runs, ranks, self._collectives, discard, count_retries)
            if not self._roots:
                outcome = self._agreed(outcome, discard)
            if outcome.failed:
                self.ranks.all_results(partial(_raise_first, broken))
        except Exception:
            if broken:  # whatever has happened while the others were told
                raise broken[0] from None
            raise
        return outcome

    def _agreed(self, outcome: Outcome[T], discard: Callable[[], None]) -> Outcome[T]:
        """Return the outcome with what happened on any rank."""
        worst = self.ranks.largest(2 if outcome.failed else 1 if outcome.retried else 0)
        if worst == 2 and not outcome.failed:
            discard()
        return replace(outcome, failed=worst == 2, retried=worst == 1)

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        """Keep DDP from communicating in forward and backward."""
        if self._copy is None:
            yield
            return
        broadcasts, self._copy.require_forward_param_sync = self._copy.require_forward_param_sync, False
        try:
            with self._copy.no_sync():
                yield
        finally:
            self._copy.require_forward_param_sync = broadcasts

    def sum_gradients(self, scale: torch.Tensor | float = 1.0) -> None:
        """Make each gradient its sum over ranks times ``scale``, after :meth:`run`; buffers are those of the first."""
        if self._sum is not None:
            self._sum.run(scale)
            for buffer in self._copy.modules_buffers if self._copy is not None and self._copy.broadcast_buffers else ():
                dist.broadcast(buffer, src=0)
            return
        factor = scale * (self.ranks.size if self._roots else 1)  # FSDP2 has taken the mean
        for parameter in self._parameters() if isinstance(factor, torch.Tensor) or factor != 1 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _noting(part: Callable[[], T], broken: list[Exception]) -> T:
    """Run a part; let an error that is not for lack of memory pass for one, so that the other ranks are told."""
    try:
        return part()
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, CannotRecoverError):
            raise
        broken.append(error)
    raise MemoryError("stands for an error that is raised when all ranks know of it")


def _and_then(part: Callable[[], T], prepare: Callable[[], None], broken: list[Exception]) -> T:
    result = part()
    _noting(prepare, broken)
    return result


def _raise_first(errors: Sequence[Exception]) -> None:
    if errors:
        raise errors[0]
