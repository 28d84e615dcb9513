"""Ranks and a micro-batch that runs out of memory, without a model."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._ranks.agree import GroupError, Ranks
from adaptive_batching._ranks.fsdp import CannotRecoverError, MicroBatchCollectives
from tests.integration.faults import Wait
from tests.support.toy_work import run_parts

ALONE = Ranks(alone=True)


class Group:
    """A process group of gloo, which counts what it has issued."""

    def __init__(self) -> None:
        self.num_issued = 0

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self.num_issued


GROUP = Group()


class Sharded(FSDPModule, nn.Module):
    """As far as recording goes; its forwards issue what they are told to."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Sharded:
        return nn.Module.__new__(cls)

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def set_custom_all_gather(self, comm: Any) -> None:
        self.gather = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        self.scatter = comm

    def reset_iter_state(self) -> None:
        pass

    def _get_fsdp_state(self) -> Any:
        class State:
            _fsdp_param_groups: tuple[Any, ...] = ()

        return State


@pytest.fixture
def issued(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the all-gathers that were issued, in order; one of size 13 fails before that, one of 17 after it."""
    sizes: list[int] = []

    def all_gather(output: torch.Tensor, given: torch.Tensor, group: Group, async_op: bool = False) -> Wait:
        if given.numel() == 13:
            raise torch.OutOfMemoryError("CUDA out of memory")
        group.num_issued += 1
        sizes.append(given.numel())
        return Wait(lambda: exhaust() if given.numel() == 17 else None)

    def exhaust() -> None:
        raise RuntimeError("std::bad_alloc")

    for name in ("all_gather_into_tensor", "all_gather_single"):
        monkeypatch.setattr(torch.distributed, name, all_gather, raising=False)
    return sizes


def forward(model: Sharded, sizes: list[int], *, fails: bool = False) -> None:
    for size in sizes:
        model.gather(torch.zeros(2 * size), torch.zeros(size), GROUP)
    if fails:
        raise torch.OutOfMemoryError("CUDA out of memory")


def recorded(sizes: list[int]) -> tuple[Sharded, MicroBatchCollectives]:
    model = Sharded()
    collectives = MicroBatchCollectives([model])
    collectives.start()
    forward(model, sizes)
    collectives.finish()
    return model, collectives


def test_a_rank_that_fails_issues_what_is_left_of_the_step(issued: list[int]) -> None:
    model, collectives = recorded([1, 2, 3])
    issued.clear()
    discarded: list[list[int]] = []
    outcome = run_parts(
        [lambda: forward(model, [1, 2, 3]), lambda: forward(model, [1], fails=True), lambda: forward(model, [1, 2, 3])],
        ALONE, collectives, lambda: discarded.append(list(issued)),
    )  # fmt: skip
    assert (outcome.failed, outcome.failed_here) == (True, 1)
    assert issued == [1, 2, 3, 1, 2, 3, 1, 2, 3]
    assert discarded == [[1, 2, 3, 1], issued], "before anything more is issued, and at the end"


def test_a_collective_that_fails_is_issued_again_only_if_it_has_not_been_yet(issued: list[int]) -> None:
    model, collectives = recorded([1, 2, 3])
    issued.clear()

    def fails_within_a_call() -> None:
        forward(model, [1])
        model.gather(torch.zeros(26), torch.zeros(13), GROUP)  # instead of 2

    run_parts([fails_within_a_call], ALONE, collectives, lambda: None)
    assert issued == [1, 2, 3]
    issued.clear()
    with pytest.raises(CannotRecoverError, match="whether the other ranks got what they wait for is unknown") as error:
        run_parts([lambda: forward(model, [17])], ALONE, collectives, lambda: None)
    assert issued == [17]
    assert not is_out_of_memory(error.value), "or it would be recovered from"


@pytest.mark.parametrize("varied_before", [False, True])
def test_a_sequence_that_varies_is_never_used_for_draining(
    varied_before: bool, issued: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model, collectives = recorded([1, 2, 2, 2, 3])
    if varied_before:
        assert not run_parts([lambda: forward(model, [1, 2, 3])], ALONE, collectives, lambda: None).failed
        assert "forward and backward vary" in caplog.text
    breaks_off = [1, 2] if varied_before else [1, 3]
    issued.clear()
    with pytest.raises(CannotRecoverError, match="what they wait for is unknown") as error:
        run_parts([lambda: forward(model, breaks_off, fails=True)], ALONE, collectives, lambda: None)
    assert issued == breaks_off
    assert not is_out_of_memory(error.value), "or the probe would go on with ranks that are lost"


class TwoRanks:
    """A default process group with another rank in it, as this rank sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, other_fails: bool = False) -> None:
        self.groups: list[str] = []
        replaced: dict[str, Any] = {
            "is_initialized": lambda: True, "get_world_size": lambda: 2, "get_rank": lambda: 0,
            "get_backend_config": lambda: "cuda:nccl",
            "new_group": lambda backend, timeout=None: self.groups.append(backend) or "a group",  # type: ignore[func-returns-value]
            "all_reduce": lambda tensor, **kwargs: tensor.fill_(1.0) if other_fails else None,
        }  # fmt: skip
        for name, function in replaced.items():
            monkeypatch.setattr(dist, name, function)


def test_ranks_make_a_group_when_they_first_agree_on_something(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = TwoRanks(monkeypatch)
    ranks = Ranks()
    ranks.leave()
    assert (ranks.size, ranks.is_first, launch.groups) == (2, True, [])
    ranks.any(True), ranks.all(True)
    assert len(launch.groups) == 1


@pytest.mark.parametrize(
    ("address", "reason"), [("127.0.1.1", "which other hosts cannot reach"), (None, "Name or service not known")]
)
def test_a_host_that_others_cannot_find_by_name_is_noticed_before_they_wait_for_it(
    address: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo itself falls back on the loopback device, and finds out when a timeout of minutes is over."""

    def resolve(name: str) -> str:
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return address

    launch = TwoRanks(monkeypatch)
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, size in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, size)
    assert Ranks().connect() == "", "on one host the loopback device will do"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    launch.groups.clear()
    assert reason in Ranks().connect()
    assert not launch.groups


@pytest.mark.parametrize("where", ["here", "on another rank"])
def test_where_gloo_cannot_start_all_ranks_know_what_would_help(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = TwoRanks(monkeypatch, other_fails=where != "here")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface" if where == "here" else "lo")
    if where == "here":
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, **kwargs: None)
    ranks = Ranks()
    assert ("no_such_interface" if where == "here" else where) in ranks.connect()
    assert not launch.groups, "nor does the other rank wait for this one to join"
    with pytest.raises(GroupError, match="set the environment variable GLOO_SOCKET_IFNAME"):
        ranks.any(True)
