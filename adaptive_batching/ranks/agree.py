"""Agreement among the ranks of a run.

Every collective that this package adds to a training program is in here or in :mod:`adaptive_batching.ranks.fsdp`.
All ranks call them in the same order; without a process group they return what they are given.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_TIMEOUT_OF_TRIAL = timedelta(seconds=20)

T = TypeVar("T")


class GroupError(RuntimeError):
    """Ranks that have to agree cannot: gloo does not start. The message names the remedy."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the ranks cannot talk to each other on the host, as gloo does not start ({reason}); set the environment "
            f"variable GLOO_SOCKET_IFNAME to the name of a network interface that all hosts share, such as eth0"
        )


class Ranks:
    """The ranks of the default process group, which talk to each other on the host.

    They have a group of their own, so that an agreement neither waits for the device nor gets between its collectives.
    It is made when ranks first have something to agree on: gloo cannot start on every host that NCCL can.

    Args:
        device: Where the default process group communicates.
        alone: Leave the process group out of it.
    """

    def __init__(self, device: torch.device | str = "cpu", *, alone: bool = False) -> None:
        in_group = dist.is_available() and dist.is_initialized() and not alone
        self.size: int = dist.get_world_size() if in_group else 1
        self.rank: int = dist.get_rank() if in_group else 0
        self._device = device
        self._own_group: dist.ProcessGroup | None = None
        self._failure = ""

    def connect(self) -> str:
        """Make the ranks' own group, if there is none yet. All ranks call it together.

        Returns:
            Why it cannot be made on some rank, on every rank the same or ``"on another rank"``; else nothing.
        """
        if self.size == 1 or self._own_group is not None or self._failure:
            return self._failure
        # First what a rank can find out alone: where that fails, the others would wait for it in vain.
        self._failure = self._together(_start_gloo)
        if not self._failure:
            self._failure = self._together(self._make_group)
        return self._failure

    def _make_group(self) -> None:
        if _spans_hosts():
            # Ranks that cannot reach each other are to find out soon: those that wait do so for several timeouts.
            dist.new_group(backend="gloo", timeout=_TIMEOUT_OF_TRIAL)
        self._own_group = dist.new_group(backend="gloo")

    def _together(self, function: Callable[[], object]) -> str:
        failure = ""
        try:
            function()
        except (RuntimeError, ValueError, OSError) as error:
            failure = str(error).strip().splitlines()[0]
        flag = torch.tensor([float(bool(failure))], device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return failure or ("on another rank" if flag.item() else "")

    @property
    def _group(self) -> dist.ProcessGroup | None:
        failure = self.connect()
        if failure:
            raise GroupError(failure)
        return self._own_group

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
        if self._own_group is not None:
            with contextlib.suppress(RuntimeError):  # one that has failed says so itself
                dist.barrier(group=self._own_group)


def _spans_hosts() -> bool:
    """True if a launcher says that there are ranks on other hosts, and no gloo group reaches them yet."""
    several = os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")
    return several and "gloo" not in dist.get_backend_config()


def _start_gloo() -> None:
    """Look for the network interface that gloo will use, as far as a rank can tell alone.

    Raises:
        RuntimeError, OSError: If there is none that other ranks can reach.
    """
    if not dist.is_gloo_available():
        raise RuntimeError("this torch was built without gloo")
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for interface in filter(None, named.split(",")):
        dist.ProcessGroupGloo.create_device(interface=interface)
    if not named and _spans_hosts():
        # gloo takes the address of the host's name, and the loopback device where that has none.
        name = socket.gethostname()
        address = socket.gethostbyname(name)
        if address.startswith("127."):
            raise RuntimeError(f"the host's name, {name}, has the address {address}, which other hosts cannot reach")
