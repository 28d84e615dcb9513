"""Two processes with DDP or FSDP2 train as Trainer does, and one that runs out of memory takes the other along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (the extra transformers)")

from adaptive_batching import ConfigError
from adaptive_batching._report.events import find_record, read_events
from adaptive_batching.transformers import AdaptiveArguments
from tests.support.ranks import run_ranks
from tests.transformers import architectures, trainers, two_ranks
from tests.transformers.two_ranks import DOUBLE, SAMPLES, SHORT

pytestmark = pytest.mark.xdist_group("trainers_two_ranks")

Found = Mapping[str, Mapping[str, Any]]
KEYS = ("loss", "grad_norm", "learning_rate", "epoch")
PLACES = ("head", "gather", "reduce")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Found]:
    return run_ranks(two_ranks.run_all, folder, two_ranks.runs(), folder=folder)


def of_run(name: str, ranks: Sequence[Found]) -> Mapping[str, Any]:
    """Return what the first rank has found, when both have the same weights."""
    if name.split()[-1] in two_ranks.OF_TRL:
        pytest.importorskip("trl", reason="trl is not installed")
    first, second = (rank[name] for rank in ranks)
    assert first["digest"] == second["digest"], "both have the same weights"
    return first


def losses(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [each for each in found["logged"] if "loss" in each]


def assert_alike(
    found: Mapping[str, Any], expected: Mapping[str, Any], keys: Sequence[str] = KEYS, rel: float = 1e-5
) -> None:
    ours, theirs = losses(found), losses(expected)
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        for key in keys:
            assert one[key] == pytest.approx(other[key], rel=rel), key
    assert found["weights"] == pytest.approx(expected["weights"], rel=rel, abs=1e-6)


def in_one_process(
    folder: Path, ours: AdaptiveArguments | None = None, checkpoint: Path | None = None, **settings: Any
) -> dict[str, Any]:
    """Return what one process finds that has the samples of both."""
    settings = {**SHORT, "per_device_train_batch_size": 32, **settings}
    trainer = trainers.make_trainer(folder, ours, data=trainers.make_data(SAMPLES), **settings)
    trainer.train(checkpoint and str(checkpoint))
    sums = [float(value.double().abs().sum()) for value in trainers.weights(trainer).values()]
    return {"logged": trainers.logged(trainer), "weights": sums}


@pytest.mark.parametrize("name", ["ddp parts", "ddp short", "ddp probed", *(f"fsdp {place}" for place in PLACES)])
def test_two_processes_train_as_one_does_with_the_whole_batch(name: str, ranks: list[Found], tmp_path: Path) -> None:
    found = of_run(f"{name} llama", ranks)
    assert_alike(found, in_one_process(tmp_path))
    recoveries = [rank[f"{name} llama"]["recoveries"] for rank in ranks]
    assert recoveries[0] == recoveries[1]
    assert (recoveries[0] > 0) == (name.split()[1] not in ("parts", "probed"))


def test_what_two_processes_have_found_before_training_they_train_with(ranks: list[Found]) -> None:
    found, probed = (of_run(f"ddp {ours} llama", ranks) for ours in ("found", "probed"))
    assert_alike(found, probed)
    assert 1 <= found["probed"] <= 16, "how many are enough is a matter of time"


def test_an_evaluation_that_runs_out_of_memory_on_one_rank_gives_what_it_would_have_given(ranks: list[Found]) -> None:
    for rank, failures in zip(ranks, (0, 2), strict=True):
        found = rank["ddp evaluated llama"]
        stock, ours, short = (found[name] for name in ("stock", "ours", "short"))
        assert ours == stock, "bit for bit as long as it fits"
        assert short["failures"] >= failures, "and some more when it is looked into how losses of parts add up"
        assert short["metrics"]["test_loss"] == pytest.approx(stock["metrics"]["test_loss"], rel=1e-6)
        assert short["labels"] == stock["labels"]
        for labels, *rows in zip(stock["labels"], stock["predicted"], short["predicted"], strict=True):
            expected, predicted = ([token for token, target in zip(row, labels) if target != -100] for row in rows)  # noqa: B905
            assert predicted == expected


def test_a_run_goes_on_with_another_number_of_devices_only_if_its_steps_stay(
    ranks: list[Found], folder: Path, tmp_path: Path
) -> None:
    def resume(accumulated: int) -> dict[str, Any]:
        settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": accumulated}
        checkpoint = folder / "ddp_parts_llama" / "checkpoint-1"
        return in_one_process(tmp_path, AdaptiveArguments(micro_batch_size=3), checkpoint, **settings)

    assert_alike(resume(4), of_run("ddp parts llama", ranks))
    with pytest.raises(ConfigError, match=r"checkpoint-1' is of a run on 2 devices, .*; resume on 2, or") as no:
        resume(2)
    assert "gradient_accumulation_steps=4" in str(no.value) and "\n" not in str(no.value)


def test_the_first_process_records_what_all_have_done(ranks: list[Found], folder: Path) -> None:
    name = "ddp short llama"
    record = read_events(find_record(folder / name.replace(" ", "_")))
    assert [each["ranks"] for each in record["run"]] == [2] and len(record["end"]) == 1
    assert [each["step"] for each in record["step"]] == [1, 2]
    assert [each["recoveries"] for each in record["step"]] == [each["oom_retries"] for each in losses(ranks[0][name])]
    assert [each["samples"] for each in record["step"]] == [32, 32]
    assert "on rank 1 with " in record["recovery"][0]["failed"]
    assert [sum(each["samples"] for each in plan["epochs"]) for plan in record["plan"]] == [64]


def test_a_loss_that_is_a_mean_over_samples_is_one_with_a_sharded_model(ranks: list[Found], tmp_path: Path) -> None:
    """On two devices Trainer multiplies it by two, because the model takes num_items_in_batch."""

    def double(model: Any, args: Any, output: Any) -> None:
        output["loss"] = 2 * output["loss"]

    model = trainers.make_classes()
    model.register_forward_hook(double)
    whole = in_one_process(tmp_path, model=model, collator=trainers.collate_classes)
    assert_alike(of_run("fsdp short classes", ranks), whole)


@pytest.mark.parametrize("name", ["ddp rows llama", "fsdp rows checkpointed"])
def test_samples_end_to_end_run_again_on_both_ranks_when_one_is_short(
    name: str, ranks: list[Found], tmp_path: Path
) -> None:
    found = of_run(name, ranks)
    assert_alike(found, in_one_process(tmp_path))
    assert found["in_rows"] and ranks[0][name]["recoveries"] == ranks[1][name]["recoveries"] >= 1


def test_samples_of_a_sharded_model_are_padded_if_it_would_not_keep_them_apart(
    ranks: list[Found], tmp_path: Path
) -> None:
    """It fails on a row, in the midst of a forward."""
    found = of_run("fsdp auto bloom", ranks)
    assert_alike(found, in_one_process(tmp_path, model=architectures.make("Bloom")))
    assert [rank["fsdp auto bloom"]["in_rows"] for rank in ranks] == [False, False]
    assert all(of_run(f"{name} probed {of}", ranks)["in_rows"] for name, of in (("ddp", "llama"), ("fsdp", "sft")))


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


@pytest.mark.parametrize("name", ["ddp short sft", "fsdp short dpo"])
def test_two_processes_of_trl_train_as_before(name: str, ranks: list[Found]) -> None:
    found = of_run(name, ranks)
    stock = of_run(f"ddp stock {name.split()[-1]}", ranks)
    assert_alike(found, stock, (*KEYS, "num_tokens"))
    for ours, theirs in zip(losses(found), losses(stock), strict=True):
        assert ours.keys() == {*theirs, *trainers.OURS}
    assert ranks[1][name]["recoveries"] > 0


def test_what_is_predicted_of_a_sharded_step_is_what_it_takes(ranks: list[Found]) -> None:
    found = of_run("fsdp probed sft", ranks)
    assert found["search"] == "predict" and not found["warned"]
    assert 1 <= found["probed"] <= 8, "how many are enough is a matter of time"
    for predicted, real in found["predicted"]:
        assert predicted == pytest.approx(real, rel=0.01)
    assert_alike(found, of_run("ddp stock sft", ranks))


@pytest.mark.parametrize(("name", "rel"), [("recompute checkpointed", 1e-5), ("short float16", 5e-3)])
def test_a_sharded_model_is_checkpointed_and_its_loss_scaled(
    name: str, rel: float, ranks: list[Found], tmp_path: Path
) -> None:
    found = of_run(f"fsdp {name}", ranks)
    assert found["recoveries"] >= 1
    assert_alike(found, in_one_process(tmp_path), rel=rel)


@pytest.mark.slow
def test_two_nodes_train_together(tmp_path: Path) -> None:
    """Each with one process."""
    names = [f"{how} short llama" for how in ("fsdp", "ddp")]
    ranks = run_ranks(two_ranks.run_all, tmp_path, names, folder=tmp_path, nodes=2)
    for name in names:
        found = of_run(name, ranks)
        assert found["recoveries"] >= 1
        assert_alike(found, in_one_process(tmp_path / name.split()[0]))
