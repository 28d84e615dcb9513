"""A plain loop on two processes, with DDP and FSDP2, trains as one process does with the samples of both."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.loop.test_step import collate, loss
from tests.loop.two_ranks import BATCHES, CLIP, FAULTS, KINDS, OF_SUMS, Faulty, make_model, run_cases
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("loop_two_ranks")

Found = list[dict[str, Any]]  # of each rank
TRAINED = [*(f"{kind}, {fault}" for kind in KINDS for fault in FAULTS), *(f"ddp, {fault}" for fault in OF_SUMS)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(run_cases, folder=tmp_path_factory.mktemp("two_ranks"))


def plain_loop(kind: str) -> tuple[Faulty, list[float], list[list[torch.Tensor | None]]]:
    """Train in one process on the samples of both ranks; return the model, the losses and the clipped gradients."""
    model = make_model()
    if kind == "fsdp2":
        model.use_every_parameter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, gradients = [], []
    for batch in BATCHES:
        total, number = loss(model, collate([*batch[0], *batch[1]]))
        (total / number).backward()
        losses.append((total / number).item())
        gradients.append([None if each.grad is None else each.grad.clone() for each in model.parameters()])
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return model, losses, gradients


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_train_as_one_process_with_all_samples(name: str, ranks: Found) -> None:
    kind, fault = name.split(", ")
    model, losses, _ = plain_loop(kind)
    for found in (rank[name] for rank in ranks):
        assert found["losses"] == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(found["weights"], [each.detach() for each in model.parameters()])
        assert found["recoveries"] == ranks[0][name]["recoveries"]
        assert (found["recoveries"] > 0) == (fault not in ("none", "in parts"))
    if kind == "ddp":
        assert torch.equal(ranks[0][name]["seen"], ranks[1][name]["seen"]), "buffers are those of the first rank"
    if kind == "fsdp2":
        assert len(ranks[0][name]["forwards"]) == len(ranks[1][name]["forwards"])
    if fault == "in parts":
        assert all(b * s <= 64 for rank in ranks for b, s in rank[name]["forwards"])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_for_a_step_of_one_s_own_are_those_of_all_samples(kind: str, ranks: Found) -> None:
    _, losses, gradients = plain_loop(kind)
    for found in (rank[f"{kind}, gradients"] for rank in ranks):
        assert [found["loss"], found["again"]] == pytest.approx(losses[:1] * 2, rel=1e-9)
        torch.testing.assert_close(found["gradients"], gradients[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_with_least_room_decides_how_many_samples_fit(kind: str, ranks: Found) -> None:
    for found in (rank[f"{kind}, probe"] for rank in ranks):
        assert found == {"found": [3, 3, 20], "search": ["predict"] * 3, "same": True}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mistake", "first", "second"),
    [
        ("mean", "OtherRankError: on rank 1, ConfigError: loss returned", "ConfigError: loss returned a tensor of sh"),
        ("backward", "OtherRankError: on rank 1, KeyError: 'labels'", "KeyError: 'labels'"),
        ("gathering", *["ConfigError: (loss communicates with other ranks|.* collectives that are not FSDP's)"] * 2),
        ("collated", "OtherRankError: on rank 1, ConfigError: samples is", "ConfigError: samples is a dict, which lo"),
        ("empty", "ConfigError: samples is empty", "ConfigError: samples is empty"),
        ("long", "DoesNotFitError: out of memory on another rank", "DoesNotFitError: out of memory with 1 sample of "),
        *(
            (f"{norm}, {most}", *[rf"{error}: .* would change the result: (module\.)?norm \({norm}\) computes"] * 2)
            for norm in ("BatchNorm1d", "Centred")
            for most, error in ((64, "ConfigError"), (None, "DoesNotFitError"))
        ),
    ],
)  # fmt: skip
def test_an_error_of_one_rank_ends_both_in_words(
    kind: str, mistake: str, first: str, second: str, ranks: Found
) -> None:
    for found, expected in zip(ranks, (first, second), strict=True):
        assert re.match(expected, found[f"{kind}, mistakes"][mistake]), found[f"{kind}, mistakes"][mistake]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("plain", "2 processes train together; wrap the model in DistributedDataParallel, or shard it by fully_shard"),
        ("fsdp1", "FullyShardedDataParallel (FSDP1) leaves ranks waiting for one that runs out of memory; use fully_s"),
        ("static", "DistributedDataParallel communicates by itself with static_graph=True; leave static_graph out"),
        ("group", "DistributedDataParallel has a process_group of its own; AdaptiveStep trains with all 2 processes"),
        ("hsdp", "AdaptiveStep trains with FSDP2 over all 2 processes, without HSDP or tensor parallelism"),
        ("layers", "2 parameters are not sharded; call fully_shard on the model itself, after its layers"),
        ("factor", "set_gradient_divide_factor scales gradients that AdaptiveStep scales itself; leave it out"),
        ("of the loss", "1 parameters are not sharded"),
        ("old torch", f"torch {torch.__version__} cannot reset FSDP2 after an error (2.13 can)"),
        ("sync batch norm", "SyncBatchNorm communicates within a forward"),
    ],
)
def test_ways_in_which_one_rank_would_leave_others_waiting_are_refused(way: str, message: str, ranks: Found) -> None:
    for rank in ranks:
        assert rank["refusals"][way].startswith(f"ConfigError: {message}")


def test_running_out_of_memory_among_the_sums_of_gradients_ends_both(ranks: Found) -> None:
    assert "Connection" in ranks[0]["in a collective"]
    assert ranks[1]["in a collective"].startswith("CannotRecoverError: memory ran out inside a collective that sums")
