"""Ranks and a micro-batch that runs out of memory, without a model."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._ranks.agree import GroupError, Ranks
from adaptive_batching._ranks.fsdp import CannotRecoverError, MicroBatchCollectives
from tests.integration.faults import Wait
from tests.support.toy_work import run_parts

ALONE = Ranks(alone=True)


class Group:
    """A process group that does not count what it issues."""

    def _get_backend(self, device: torch.device) -> Group:
        raise RuntimeError


class Sharded(FSDPModule, nn.Module):
    """As far as recording goes; its forwards issue what they are told to."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Sharded:
        return nn.Module.__new__(cls)

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def set_custom_all_gather(self, comm: Any) -> None:
        self.gather = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None: ...


def forward(model: Sharded, sizes: list[int], *, fails: bool = False) -> None:
    for size in sizes:
        model.gather(torch.zeros(2 * size), torch.zeros(size), Group())
    if fails:
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("varied_before", [False, True])
def test_a_sequence_that_varies_is_never_used_for_draining(
    varied_before: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    issued: list[int] = []

    def all_gather(output: torch.Tensor, given: torch.Tensor, group: Group, async_op: bool = False) -> Wait:
        issued.append(given.numel())
        return Wait()

    for name in ("all_gather_into_tensor", "all_gather_single"):
        monkeypatch.setattr(dist, name, all_gather, raising=False)
    model = Sharded()
    collectives = MicroBatchCollectives([model])
    run_parts([lambda: forward(model, [1, 2, 2, 2, 3])], ALONE, collectives)
    if varied_before:
        assert not run_parts([lambda: forward(model, [1, 2, 3])], ALONE, collectives).failed
        assert "forward and backward passes vary" in caplog.text
    breaks_off = [1, 2] if varied_before else [1, 3]
    issued.clear()
    with pytest.raises(CannotRecoverError, match="what they wait for is unknown") as error:
        run_parts([lambda: forward(model, breaks_off, fails=True)], ALONE, collectives)
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
