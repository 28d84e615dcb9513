"""Agreement among the ranks of a run.

Every collective that this package adds to a plain loop is in this module or one of its neighbours.
All ranks call them in the same order; without a process group they return their input.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from adaptive_batching._values import AdaptiveBatchingError

_TIMEOUT_OF_TRIAL = timedelta(seconds=20)
_SIZE, _AT_ONCE = 8, 1024  # bytes: the length prefix, and the payload that the first exchange carries

T = TypeVar("T")

ONLY_HERE = {"only_here": True}
"""The ``extra`` of a warning that one rank alone may know of; others are shown on the first."""


class GroupError(AdaptiveBatchingError, RuntimeError):
    """Raised if ranks that have to agree cannot, because gloo does not start. The message names the remedy."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the ranks cannot communicate on the host, because gloo does not start ({reason}); set the environment "
            f"variable GLOO_SOCKET_IFNAME to the name of a network interface that all hosts share, such as eth0"
        )


class OtherRankError(AdaptiveBatchingError, RuntimeError):
    """Raised where nothing is wrong, because another rank cannot go on. The message repeats its error."""


def is_lost_rank(error: Exception) -> bool:
    """Return True if ``error`` means that another rank has closed its connections, as it does when its process ends."""
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError) and "gloo" in str(error) and any(text in str(error) for text in lost)


def num_collectives(device: torch.device) -> int:
    """Return how many collectives the default group has issued on this rank; 0 if it does not count them."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    group: Any = dist.group.WORLD
    try:
        return int(group._get_backend(device)._get_sequence_number_for_group())
    except RuntimeError:  # of a backend other than gloo and NCCL
        return 0


class Ranks:
    """Ranks of the default process group, which communicate on the host.

    They use a separate process group, so that an agreement neither waits for the device nor gets between its
    collectives. The group is created when the ranks first have something to agree on, because gloo cannot start on
    every host where NCCL can. The default group communicates over ``device``, and is ignored if ``alone``.
    """

    def __init__(self, device: torch.device | str = "cpu", *, alone: bool = False) -> None:
        in_group = dist.is_available() and dist.is_initialized() and not alone
        self.size: int = dist.get_world_size() if in_group else 1
        self.rank: int = dist.get_rank() if in_group else 0
        self._device = device
        self._own_group: dist.ProcessGroup | None = None
        self._failure = ""

    def connect(self) -> str:
        """Create the ranks' own group if there is none; all must call this. Return why that failed, if it did."""
        if self.size == 1 or self._own_group is not None or self._failure:
            return self._failure
        # Start with what a rank can check alone: if that fails, the others would wait for it in vain.
        self._failure = self._together(_start_gloo) or self._together(self._make_group)
        return self._failure

    def _make_group(self) -> None:
        if _spans_hosts():
            # Use a short timeout to find unreachable ranks soon: a rank that waits does so for several timeouts.
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

    def _group(self) -> dist.ProcessGroup | None:
        if failure := self.connect():
            raise GroupError(failure)
        return self._own_group

    @property
    def is_first(self) -> bool:
        """True on the rank that writes and decides."""
        return self.rank == 0

    @property
    def bar_options(self) -> dict[str, bool]:
        """Arguments of a tqdm bar that the first rank alone shows."""
        return {} if self.is_first else {"disable": True}  # tqdm reads TQDM_DISABLE if disable is not given

    @property
    def is_next_to_first(self) -> bool:
        """True on the first rank, and where the launcher has put a rank on the same machine."""
        return self.is_first or os.environ.get("GROUP_RANK") == "0"

    # All ranks have to call what follows.

    def largest(self, value: float) -> float:
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group())
        return tensor.item()

    def smallest(self, value: float) -> float:
        return -self.largest(-value)

    def any(self, value: bool) -> bool:
        return self.largest(float(value)) > 0

    def all(self, value: bool) -> bool:
        return not self.any(not value)

    def gather(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        # As torch's all_gather_object does, but in one collective if little is sent, and in half the time.
        message = pickle.dumps(value)
        heads = self._gather_bytes(len(message).to_bytes(_SIZE, "big") + message[:_AT_ONCE], _SIZE + _AT_ONCE)
        sizes = [int.from_bytes(head[:_SIZE], "big") for head in heads]
        of_ranks = [head[_SIZE:] for head in heads]
        if max(sizes) > _AT_ONCE:
            of_ranks = self._gather_bytes(message, max(sizes))
        return [pickle.loads(message[:size]) for message, size in zip(of_ranks, sizes, strict=True)]

    def _gather_bytes(self, own: bytes, size: int) -> list[bytes]:
        """Return what each rank gives, with zeros at its end up to ``size``, which is the same on all."""
        sent = torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8)
        received = bytearray(self.size * size)
        dist.all_gather_into_tensor(torch.frombuffer(received, dtype=torch.uint8), sent, group=self._group())
        return [bytes(received[start : start + size]) for start in range(0, len(received), size)]

    def exchange(self, outgoing: Mapping[int, bytes], senders: Sequence[int]) -> list[bytes]:
        """Send bytes to other ranks, by their numbers, and return what ``senders`` have sent to this one.

        Only these ranks wait for each other. Each size comes first.
        """

        def post(transfer: Callable[..., dist.Work | None], tensor: torch.Tensor, rank: int) -> None:
            work = transfer(tensor, rank, group=group)
            assert work is not None
            waiting.append(work)

        waiting, group = list[dist.Work](), self._group()
        for rank, sent in outgoing.items():
            post(dist.isend, torch.tensor([len(sent)]), rank)
            if sent:
                post(dist.isend, torch.frombuffer(bytearray(sent), dtype=torch.uint8), rank)
        incoming = []
        for rank in senders:
            size = torch.empty(1, dtype=torch.int64)
            dist.recv(size, rank, group=group)
            incoming.append(bytearray(int(size)))  # tensors give their bytes to numpy alone, which is optional
            if size:
                post(dist.irecv, torch.frombuffer(incoming[-1], dtype=torch.uint8), rank)
        for work in waiting:
            work.wait()
        return [*map(bytes, incoming)]

    def all_results(self, function: Callable[[], T]) -> list[T]:
        """Run ``function`` on every rank, and return all results; if it fails on one, raise an error on every rank.

        That is the error itself where it happened, and an :class:`OtherRankError` with its words elsewhere.
        """
        if self.size == 1:
            return [function()]
        result: Any = None
        failure: Exception | None = None
        try:
            result = function()
        except Exception as error:
            failure = error
        answers = self.gather((result, None if failure is None else f"{type(failure).__name__}: {failure}"))
        if failure is not None:
            raise failure
        for rank, (_, words) in enumerate(answers):
            if words is not None:
                raise OtherRankError(f"on rank {rank}, {words}")
        return [answer for answer, _ in answers]

    def on_first(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the first rank only, and return its result, or raise its error, on every rank."""
        if self.size == 1:
            return function()
        answer: tuple[Any, str | None] = None, None
        failure: Exception | None = None
        if self.is_first:
            try:
                answer = function(), None
            except Exception as error:
                failure = error
                answer = None, f"on the first rank, {type(error).__name__}: {error}"
        result, words = self.gather(answer)[0]  # torch's broadcast of objects needs numpy
        if words is not None:
            raise failure if failure is not None else OtherRankError(words)
        return result  # type: ignore[no-any-return]

    def leave(self) -> None:
        """Wait for all ranks, because one that leaves its process group early can abort the others."""
        if self._own_group is not None:
            with contextlib.suppress(RuntimeError):  # a rank that failed reports its own error
                dist.barrier(group=self._own_group)


ALONE = Ranks(alone=True)


def _spans_hosts() -> bool:
    """Return True if a launcher reports ranks on other hosts that no gloo group reaches yet."""
    several = os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")
    return several and "gloo" not in dist.get_backend_config()


def _start_gloo() -> None:
    """Raise an error if, as far as a rank can tell alone, gloo has no network interface that others can reach."""
    if not dist.is_gloo_available():
        raise RuntimeError("this torch was built without gloo")
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for interface in filter(None, named.split(",")):
        dist.ProcessGroupGloo.create_device(interface=interface)
    if not named and _spans_hosts():
        # gloo uses the address that the host name resolves to, or the loopback device if there is none.
        name = socket.gethostname()
        address = socket.gethostbyname(name)
        if address.startswith("127."):
            raise RuntimeError(f"the host name {name} resolves to {address}, which other hosts cannot reach")
