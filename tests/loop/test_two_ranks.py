"""A plain loop on two processes, with DDP and FSDP2, trains as one process does with the samples of both."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptive_batching._step.sharing import pickled
from tests.conftest import ROOT
from tests.loop import shared_steps
from tests.loop.shared_steps import CANNOT_BE_SENT, SETTINGS
from tests.loop.test_step import PlainLoop, Text
from tests.loop.two_ranks import BATCHES, CLIP, FAULTS, KINDS, OF_SUMS, make_model
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("loop_two_ranks")

Found = list[dict[str, Any]]  # of each rank
TRAINED = [*(f"{kind}, {fault}" for kind in KINDS for fault in FAULTS), *(f"ddp, {fault}" for fault in OF_SUMS)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(shared_steps.run_all, folder=tmp_path_factory.mktemp("two_ranks"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(shared_steps.run_all, folder=tmp_path_factory.mktemp("four_ranks"), size=4)


def plain_loop(
    kind: str, batches: Sequence[Sequence[Sequence[Text]]] = BATCHES
) -> tuple[PlainLoop, list[float], list[list[torch.Tensor | None]]]:
    """Train in one process on the samples of all ranks; return the loop, the losses and the gradients."""
    model = make_model()
    if kind == "fsdp2":
        model.use_every_parameter()
    plain = PlainLoop(model, CLIP)
    losses, gradients = [], []
    for batch in batches:
        losses.append(plain.step([sample for own in batch for sample in own]).item())
        gradients.append(plain.gradients)
    return plain, losses, gradients


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_train_as_one_process_with_all_samples(name: str, ranks: Found) -> None:
    kind, fault = name.split(", ")
    plain, losses, _ = plain_loop(kind)
    for found in (rank[name] for rank in ranks):
        assert found["losses"] == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(found["weights"], plain.weights())
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
def test_what_is_looked_at_before_training_is_no_part_of_what_a_loss_counts(kind: str, ranks: Found) -> None:
    for rank, found in enumerate(ranks):
        assert found[f"{kind}, totals"] == [0, len(BATCHES[0][rank])]


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
        *(
            (name, *["ConfigError: (loss communicates with other ranks|.* collectives that are not FSDP's)"] * 2)
            for name in ("gathering", "gathering in a probe")
        ),
        ("collated", "OtherRankError: on rank 1, ConfigError: samples is", "ConfigError: samples is a dict, which lo"),
        ("collating", "OtherRankError: on rank 1, KeyError: 'labels'", "KeyError: 'labels'"),
        ("balanced", *["ConfigError: samples are balanced over ranks on rank 0 and not on rank 1; give"] * 2),
        ("long", "DoesNotFitError: out of memory on another rank", "DoesNotFitError: out of memory with 1 sample of "),
        ("batch norm", *[r"ConfigError: max_tokens=32 would change the result: (module\.)?norm \(BatchNorm1d\)"] * 2),
        *((f"Centred, {most}", *["GradientsDifferError: the gradient of a batch in two "] * 2) for most in (64, None)),
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
        ("sync batch norm", "SyncBatchNorm communicates within a forward pass"),
        ("before the group", "2 processes train together, and when AdaptiveStep was made it was 1; make it after"),
    ],
)
def test_ways_in_which_one_rank_would_leave_others_waiting_are_refused(way: str, message: str, ranks: Found) -> None:
    for rank in ranks:
        assert rank["refusals"][way].startswith(f"ConfigError: {message}")


def test_running_out_of_memory_among_the_sums_of_gradients_ends_both(ranks: Found) -> None:
    assert "Connection" in ranks[0]["in a collective"]
    assert ranks[1]["in a collective"].startswith("CannotRecoverError: memory ran out inside a collective that sums")


def test_ranks_tell_each_other_little_and_much(ranks: Found) -> None:
    for rank in ranks:
        assert rank["told"] == [["x" * size for size in sizes] for sizes in ((1, 10), (1, 5000), (5000, 6000))]


def assert_as_one_process(name: str, ranks: Found) -> dict[str, Any]:
    """A run with samples shared out has trained as one process with all of them; return what the first rank found."""
    kind, what = name.split(", ")
    plain, losses, _ = plain_loop(kind, shared_steps.drawn(len(ranks), what))
    for found in (rank[name] for rank in ranks):
        assert not isinstance(found, str), found
        assert found["losses"] == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(found["weights"], plain.weights())
        assert found["recoveries"] == ranks[0][name]["recoveries"]
        assert (found["recoveries"] > 0) == (what in shared_steps.FAULTS)
        assert kind == "ddp" or found["recoveries"] or len(found["forwards"]) == len(ranks[0][name]["forwards"])
        assert what != "no limit on 1" or found["sent"] == 0
        assert what in SETTINGS or all(b * s <= shared_steps.MAX_TOKENS for b, s in found["forwards"])
    first: dict[str, Any] = ranks[0][name]
    return first


def named(whats: Sequence[str]) -> list[str]:
    return [name for name in shared_steps.runs(2) if name.split(", ", 1)[1] in whats]


@pytest.mark.parametrize("name", named(["shared", *shared_steps.FAULTS]))
def test_samples_that_move_to_another_rank_count_as_those_that_stay(name: str, ranks: Found) -> None:
    """Also after running out of memory with some of them, and in the next steps; and if a rank has none."""
    assert all(moved > 0 for moved in assert_as_one_process(name, ranks)["moved"])


def test_samples_of_any_type_are_sent_and_a_slice_without_what_it_is_cut_from(ranks: Found) -> None:
    found = assert_as_one_process("ddp, types", ranks)
    assert all(moved > 0 for moved in found["moved"]) and found["sent"] < 10**6
    tensors = [torch.tensor(2.5), torch.empty(0, 3), torch.ones(2, 3).bfloat16().T, torch.tensor([True, False])]
    for tensor in [*tensors, torch.ones(2, requires_grad=True), torch.ones(2, 2).to_sparse()]:
        torch.testing.assert_close(pickle.loads(pickled({"a": tensor}))["a"], tensor)


@pytest.mark.parametrize("name", named(CANNOT_BE_SENT))
def test_samples_that_cannot_be_sent_stay_and_it_is_said_once(name: str, ranks: Found) -> None:
    found = assert_as_one_process(name, ranks)
    why = "AttributeError: Can't pickle" if "lambda" in name else "KeyError: 'from another version'"
    assert not any(found["moved"])
    for [line] in (rank[name]["told"] for rank in ranks):
        assert line.startswith(f"samples are not balanced over ranks: they cannot be sent ({why}")


def test_a_rank_without_samples_cannot_go_without_one_of_another(ranks: Found) -> None:
    for rank in ranks:
        error = rank[f"ddp, {shared_steps.NO_FILLER}"]
        assert error.startswith("ConfigError: a rank without samples runs one of another's, and they cannot be sent (")
        assert "\n" not in error


@pytest.mark.parametrize("name", named(SETTINGS))
def test_nothing_is_shared_out_without_a_limit_on_each_rank_or_if_ranks_are_not_balanced(
    name: str, ranks: Found
) -> None:
    found = assert_as_one_process(name, ranks)
    assert not any(found["moved"]) and not found["told"]


def test_samples_do_not_move_where_a_module_computes_over_the_batch(ranks: Found) -> None:
    for rank in ranks:
        assert rank["ddp, Centred"].startswith("GradientsDifferError: the gradient of a batch in two parts")
        assert not any(rank["ddp, Centred off"]["moved"])


@pytest.mark.slow
@pytest.mark.parametrize("name", shared_steps.runs(4))
def test_four_ranks_share_out_a_step_as_two_do(name: str, four_ranks: Found) -> None:
    found = assert_as_one_process(name, four_ranks)
    if name.split(", ")[1] in CANNOT_BE_SENT:
        assert not any(found["moved"][1:]), "rank 0 gets nothing in the first step"
        assert [len(rank[name]["told"]) for rank in four_ranks] == [1] * 4
    else:
        assert all(moved > 0 for moved in found["moved"])


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None  # as if it were not installed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from adaptive_batching import AdaptiveStep

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)))

def loss(model, batch):
    if torch.is_grad_enabled() and rank and len(batch) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
    targets = batch[:, 1:]
    return cross_entropy(model(batch[:, :-1]).mT, targets, ignore_index=0, reduction="sum"), targets.ne(0).sum()

def collate(samples):
    seen.append(max(map(len, samples)))
    return pad_sequence(samples, batch_first=True)

seen = []
generator = torch.Generator().manual_seed(0)
lengths = [[600, 700, 650, 550, 500], [4, 5, 3, 6]]
of_ranks = [[torch.randint(1, 20, (n,), generator=generator) for n in of_rank] for of_rank in lengths]
with torch.no_grad():
    total, number = loss(model.module, collate([*of_ranks[0], *of_ranks[1]]))
step = AdaptiveStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, collate, length=len)
step.max_tokens = 1400
seen.clear()
losses = [step(of_ranks[rank]).item() for _ in range(2)]
print(step.num_recoveries, *losses, (total / number).item(), max(seen))
"""


@pytest.mark.wide
def test_several_ranks_share_samples_and_recover_where_numpy_is_not_installed(tmp_path: Path) -> None:
    """A plain loop needs torch alone."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_NUMPY, str(rank), str(tmp_path / "store")],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    printed = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    for recoveries, first, _, expected, longest in (map(float, out.split()) for out, _ in printed):
        assert recoveries > 0 and longest >= 500, "samples of the first rank ran on both"
        assert first == pytest.approx(expected, rel=1e-5)
