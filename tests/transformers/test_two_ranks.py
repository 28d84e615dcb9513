"""Two processes with DDP or FSDP2 train as Trainer does, and one that runs out of memory takes the other along."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (the extra transformers)")

from adaptive_batching._report.events import find_record, read_events
from adaptive_batching.transformers import AdaptiveArguments
from tests.support.ranks import free_port, run_ranks, run_together
from tests.transformers import trainers
from tests.transformers.two_ranks import DOUBLE, SAMPLES, SHORT

pytestmark = pytest.mark.xdist_group("trainers_two_ranks")

Found = Mapping[str, Mapping[str, Any]]
KEYS = ("loss", "grad_norm", "learning_rate", "epoch")
PLACES = ("forward", "head", "backward", "gather", "reduce")
SEVERAL = ("short", "probed", *PLACES)
NEEDS_TRL = ("sft", "dpo", "reward", "lora")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Found]:
    run_ranks(["-m", "tests.transformers.two_ranks", str(folder)])
    return found_in(folder)


def found_in(folder: Path) -> list[Found]:
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


def of_run(name: str, ranks: list[Found]) -> Mapping[str, Any]:
    """Return what the first rank has found, when both have the same weights."""
    if name.split()[-1] in NEEDS_TRL:
        pytest.importorskip("trl", reason="trl is not installed")
    if name.endswith("lora"):
        pytest.importorskip("peft", reason="peft is not installed")
    first, second = (rank[name] for rank in ranks)
    assert first["digest"] == second["digest"], "both have the same weights"
    return first


def losses(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [each for each in found["logged"] if "loss" in each]


def assert_alike(found: Mapping[str, Any], expected: Mapping[str, Any], keys: Sequence[str] = KEYS) -> None:
    ours, theirs = losses(found), losses(expected)
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        for key in keys:
            assert one[key] == pytest.approx(other[key], rel=1e-5), key
    assert found["weights"] == pytest.approx(expected["weights"], rel=1e-5, abs=1e-6)


def in_one_process(folder: Path, ours: AdaptiveArguments | None = None, **settings: Any) -> dict[str, Any]:
    """Return what one process finds that has the samples of both."""
    settings = {**SHORT, "per_device_train_batch_size": 32, **settings}
    trainer = trainers.make_trainer(folder, ours, data=trainers.make_data(SAMPLES), **settings)
    trainer.train()
    sums = [float(value.double().abs().sum()) for value in trainers.weights(trainer).values()]
    return {"logged": trainers.logged(trainer), "weights": sums}


@pytest.mark.parametrize(
    "name", ["ddp parts", *(f"ddp {ours}" for ours in SEVERAL[:2]), *(f"fsdp {o}" for o in SEVERAL)]
)
def test_two_processes_train_as_one_does_with_the_whole_batch(name: str, ranks: list[Found], tmp_path: Path) -> None:
    found = of_run(f"{name} llama", ranks)
    assert_alike(found, in_one_process(tmp_path))
    recoveries = [rank[f"{name} llama"]["recoveries"] for rank in ranks]
    assert recoveries[0] == recoveries[1]
    assert (recoveries[0] > 0) == (name.split()[1] not in ("parts", "probed"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_first_process_records_what_all_have_done(strategy: str, ranks: list[Found], folder: Path) -> None:
    name = f"{strategy} short llama"
    record = read_events(find_record(folder / name.replace(" ", "_")))
    assert [each["ranks"] for each in record["run"]] == [2] and len(record["end"]) == 1
    assert [each["step"] for each in record["step"]] == [1, 2]
    assert [each["recoveries"] for each in record["step"]] == [each["oom_retries"] for each in losses(ranks[0][name])]
    assert [each["samples"] for each in record["step"]] == [32, 32]
    assert "on rank 1 with " in record["recovery"][0]["failed"]
    assert [sum(each["samples"] for each in plan["epochs"]) for plan in record["plan"]] == [64]


def test_a_loss_that_is_a_mean_over_samples_is_one_with_a_sharded_model(ranks: list[Found], tmp_path: Path) -> None:
    whole = in_one_process(tmp_path, model=trainers.make_classes(), collator=trainers.collate_classes)
    assert_alike(of_run("fsdp short classes", ranks), whole)


def test_parts_that_ran_out_of_memory_have_the_mean_of_others(ranks: list[Found]) -> None:
    """Trainer adds means of accumulated batches up, so that it is no reference for BERT."""
    found, parts = (of_run(f"ddp {ours} bert", ranks) for ours in ("short", "parts"))
    assert found["recoveries"] >= 1
    assert_alike(found, parts)


def test_with_none_set_a_sharded_model_trains_bit_for_bit_as_with_trainer(ranks: list[Found]) -> None:
    off, stock = (of_run(f"fsdp {ours} llama", ranks) for ours in ("off", "stock"))
    assert off["logged"] == stock["logged"]
    assert off["digest"] == stock["digest"]


def test_the_rank_with_the_least_memory_decides_on_the_size(ranks: list[Found]) -> None:
    """On the second, two samples of 24 tokens fit."""
    assert [rank["fsdp maximum llama"]["probed"] for rank in ranks] == [2, 2]
    assert {each["batch_size"] for each in losses(of_run("fsdp maximum llama", ranks))} == {2}


def test_a_sharded_model_grows_its_batch_and_goes_on_where_it_was_left(ranks: list[Found], tmp_path: Path) -> None:
    settings = AdaptiveArguments(
        batch_increase_function=DOUBLE, micro_batch_size=6, adaptive_batching={"max_batch_size": 64}
    )
    whole = in_one_process(tmp_path, settings, per_device_train_batch_size=16, num_train_epochs=3)
    grown = of_run("fsdp growing llama", ranks)
    assert [each["batch_size"] for each in losses(grown)] == [8] * 4 + [16] * 2 + [32]
    assert_alike(grown, whole)
    assert_alike(grown["resumed"], grown)


@pytest.mark.parametrize(
    "name",
    ["ddp parts sft", "ddp probed sft", *(f"{how} short {kind}" for how in ("ddp", "fsdp") for kind in NEEDS_TRL[:3])],
)
def test_two_processes_of_trl_train_as_before(name: str, ranks: list[Found]) -> None:
    found = of_run(name, ranks)
    stock = of_run(f"ddp stock {name.split()[-1]}", ranks)
    assert_alike(found, stock, (*KEYS, "num_tokens"))
    for ours, theirs in zip(losses(found), losses(stock), strict=True):
        assert ours.keys() == {*theirs, *trainers.OURS}
    assert (ranks[1][name]["recoveries"] > 0) == ("short" in name)


def test_lora_trains_sharded_as_before(ranks: list[Found]) -> None:
    found = of_run("fsdp short lora", ranks)
    assert found["recoveries"] >= 1
    assert_alike(found, of_run("fsdp stock lora", ranks), (*KEYS, "num_tokens"))


def test_a_reference_model_is_sharded_and_probed_with(ranks: list[Found]) -> None:
    assert of_run("fsdp probed dpo", ranks)["probed"] == 8
    assert_alike(of_run("fsdp probed dpo", ranks), of_run("ddp stock dpo", ranks))


@pytest.mark.slow
def test_two_nodes_train_together(tmp_path: Path) -> None:
    """Each with one process, over the loopback device."""
    nodes = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_id", "test", "--rdzv_backend", "c10d"]
    command = [sys.executable, "-m", "torch.distributed.run", *nodes, "--rdzv_endpoint", f"127.0.0.1:{free_port()}",
               "-m", "tests.transformers.two_ranks", str(tmp_path), "fsdp short llama", "ddp short llama"]  # fmt: skip
    run_together([(command, {})] * 2)
    for how in ("fsdp", "ddp"):
        found = of_run(f"{how} short llama", found_in(tmp_path))
        assert found["recoveries"] >= 1
        assert_alike(found, in_one_process(tmp_path / how))
