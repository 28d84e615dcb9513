"""Agreement among the ranks of a run.

Every collective that this package adds to those of a training program is in here or in :mod:`adaptive_batching.fsdp`.
All ranks call them in the same order; without a process group they return what they are given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """The ranks of the default process group, which talk to each other on the host.

    They have a group of their own, so that an agreement neither waits for the device nor gets between its collectives.

    Args:
        alone: Leave the process group out of it.
    """

    def __init__(self, *, alone: bool = False) -> None:
        in_group = dist.is_available() and dist.is_initialized() and not alone
        self.size: int = dist.get_world_size() if in_group else 1
        self.rank: int = dist.get_rank() if in_group else 0
        self._group = dist.new_group(backend="gloo") if self.size > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and decides."""
        return self.rank == 0

    def largest(self, value: float) -> float:
        """The largest ``value`` of all ranks."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def smallest(self, value: float) -> float:
        """The smallest ``value`` of all ranks."""
        return self._reduced(value, dist.ReduceOp.MIN)

    def any(self, value: bool) -> bool:
        """Whether ``value`` is true on at least one rank."""
        return self.largest(float(value)) > 0

    def all(self, value: bool) -> bool:
        """Whether ``value`` is true on every rank."""
        return self.smallest(float(value)) > 0

    def gather(self, value: T) -> list[T]:
        """The ``value`` of every rank, in their order."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def on_first(self, function: Callable[[], T]) -> T:
        """What ``function`` returns on the first rank, where alone it runs; what it raises is raised on every rank."""
        if self._group is None:
            return function()
        answer: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_first:
            try:
                answer[0] = function()
            except Exception as error:
                failure = error
                answer[1] = f"on the first rank, {type(error).__name__}: {error}"
        dist.broadcast_object_list(answer, src=0, group=self._group)
        if answer[1] is not None:
            raise failure if failure is not None else RuntimeError(answer[1])
        return answer[0]  # type: ignore[no-any-return]

    def _reduced(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        if self._group is None:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, op=operation, group=self._group)
        return tensor.item()

    def leave(self) -> None:
        """Wait for all ranks; one that leaves its process group early can abort the others."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):  # one that has failed says so itself
                dist.barrier(group=self._group)
