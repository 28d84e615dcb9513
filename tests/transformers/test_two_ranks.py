"""Two processes with DDP or FSDP2 train as Trainer does, and one that runs out of memory takes the other along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from adaptive_batching import ConfigError
from adaptive_batching._report.events import find_record, read_events
from adaptive_batching.transformers import AdaptiveArguments
from tests.support.ranks import run_ranks
from tests.support.wide import few
from tests.transformers import architectures, trainers, two_ranks
from tests.transformers.test_streams import Stream
from tests.transformers.two_ranks import SAMPLES, SHORT

pytestmark = pytest.mark.xdist_group("trainers_two_ranks")

Found = Mapping[str, Mapping[str, Any]]
KEYS = ("loss", "grad_norm", "learning_rate", "epoch")

CORE = [
    "ddp parts early", "ddp short llama", "ddp rows llama", "fsdp places twice", "fsdp rows checkpointed",
    "fsdp growing llama",
]  # fmt: skip
"""Runs of tests that are not wide."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path, request: pytest.FixtureRequest) -> list[Found]:
    here = [item for item in request.session.items if item.path == request.path]
    names = two_ranks.runs() if any(item.get_closest_marker("wide") for item in here) else CORE
    return run_ranks(two_ranks.run_all, folder, names, folder=folder)


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
    settings = {**SHORT, "per_device_train_batch_size": 32, "data": trainers.make_data(SAMPLES), **settings}
    trainer = trainers.make_trainer(folder, ours, **settings)
    trainer.train(checkpoint and str(checkpoint))
    sums = [float(value.double().abs().sum()) for value in trainers.weights(trainer).values()]
    return {"logged": trainers.logged(trainer), "weights": sums}


@pytest.mark.parametrize(
    "name",
    few(
        ["ddp parts early", "ddp short llama", "ddp probed llama", "fsdp places twice"],
        "ddp parts early",
        "ddp short llama",
        "fsdp places twice",
    ),
)
def test_two_processes_train_as_one_does_with_the_whole_batch(name: str, ranks: list[Found], tmp_path: Path) -> None:
    found = of_run(name, ranks)
    _, ours, model = name.split()
    assert_alike(found, in_one_process(tmp_path, **two_ranks.LLAMAS[model]))
    assert ranks[1][name]["recoveries"] == found["recoveries"]
    assert (found["recoveries"] > 0) == (ours not in ("parts", "probed"))
    if ours == "places":
        assert [each["oom_retries"] for each in losses(found)] == [0, 1, 2, 3], "once in each place"


@pytest.mark.wide
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
        checkpoint = folder / "ddp_parts_early" / "checkpoint-1"
        return in_one_process(tmp_path, AdaptiveArguments(micro_batch_size=3), checkpoint, **settings)

    assert_alike(resume(4), of_run("ddp parts early", ranks))
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


def classes_of_two_devices() -> Any:
    """Return a model whose loss is twice as large, as Trainer makes it, because it takes num_items_in_batch."""

    def double(model: Any, args: Any, output: Any) -> None:
        output["loss"] = 2 * output["loss"]

    model = trainers.make_classes()
    model.register_forward_hook(double)
    return model


@pytest.mark.parametrize("name", ["ddp rows llama", "fsdp rows checkpointed"])
def test_samples_end_to_end_run_again_on_both_ranks_when_one_is_short(
    name: str, ranks: list[Found], tmp_path: Path
) -> None:
    found = of_run(name, ranks)
    assert_alike(found, in_one_process(tmp_path))
    assert found["in_rows"] and ranks[0][name]["recoveries"] == ranks[1][name]["recoveries"] >= 1


@pytest.mark.wide
def test_a_compiled_model_runs_unlike_numbers_of_parts_and_recovers_on_both_ranks(
    ranks: list[Found], tmp_path: Path
) -> None:
    name = "ddp short compiled"
    assert_alike(of_run(name, ranks), in_one_process(tmp_path, model=trainers.make_bigrams()))
    first, second = (rank[name] for rank in ranks)
    assert first["recoveries"] == second["recoveries"] >= 1 and first["forwards"] != second["forwards"]
    assert min(first["compiled"], second["compiled"]) > 0


@pytest.mark.wide
def test_samples_of_a_sharded_model_are_padded_if_it_would_not_keep_them_apart(
    ranks: list[Found], tmp_path: Path
) -> None:
    """It fails on a row, in the midst of a forward."""
    found = of_run("fsdp auto bloom", ranks)
    assert_alike(found, in_one_process(tmp_path, model=architectures.make("Bloom")))
    assert [rank["fsdp auto bloom"]["in_rows"] for rank in ranks] == [False, False]
    assert all(of_run(f"{name} probed {of}", ranks)["in_rows"] for name, of in (("ddp", "llama"), ("fsdp", "sft")))


def steps_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return read_events(find_record(folder / name.replace(" ", "_")))["step"]


@pytest.mark.wide
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_samples_that_ranks_share_out_count_as_in_one_process(
    strategy: str, ranks: list[Found], folder: Path, tmp_path: Path
) -> None:
    name = f"{strategy} shared counted"
    found, keys = of_run(name, ranks), (*KEYS, "num_input_tokens_seen")
    assert_alike(found, in_one_process(tmp_path, **two_ranks.LLAMAS["counted"]), keys)
    assert_alike(found, of_run("ddp drawn counted", ranks), keys)
    steps = steps_of(folder, name)
    assert all(step["slowest"] <= step["slowest_unbalanced"] for step in steps)
    assert [step["moved"] > 0 for step in steps] == [step["slowest_unbalanced"] > 1.01 for step in steps]
    assert sum(step["moved"] > 0 for step in steps) == 3, "one is even as it is"
    assert all(step["moved"] is None for step in steps_of(folder, "ddp drawn counted"))


@pytest.mark.wide
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_samples_are_shared_out_again_when_a_rank_with_those_of_another_is_short(
    strategy: str, ranks: list[Found], folder: Path, tmp_path: Path
) -> None:
    name = f"{strategy} shared late"
    assert_alike(of_run(name, ranks), in_one_process(tmp_path))
    assert [rank[name]["recoveries"] for rank in ranks] == [1, 1]
    first, second = steps_of(folder, name)
    assert (first["recoveries"], second["recoveries"]) == (0, 1) and second["moved"] > 0


@pytest.mark.wide
def test_samples_with_a_label_each_are_shared_out(ranks: list[Found], folder: Path, tmp_path: Path) -> None:
    name, data = "ddp shared labelled", trainers.make_labelled(SAMPLES)
    model, collator = classes_of_two_devices(), trainers.collate_labelled
    assert_alike(of_run(name, ranks), in_one_process(tmp_path, model=model, collator=collator, data=data))
    assert all(step["moved"] > 0 for step in steps_of(folder, name))


@pytest.mark.wide
def test_what_would_balance_ranks_in_the_sampler_is_not_needed(
    ranks: list[Found], folder: Path, tmp_path: Path
) -> None:
    """Samples come in random order, and are shared out at the step."""
    found = of_run("ddp shared rebalanced", ranks)
    assert_alike(found, in_one_process(tmp_path))
    assert any(step["moved"] > 0 for step in steps_of(folder, "ddp shared rebalanced"))
    assert sum("'batch_rebalance' is not needed" in line for line in found["told"]) == 1


@pytest.mark.wide
@pytest.mark.parametrize("name", ["ddp short stream", "ddp shared stream"])
def test_ranks_that_each_read_their_part_of_a_stream_train_as_one_does(
    name: str, ranks: list[Found], tmp_path: Path
) -> None:
    """The third step is of the next pass."""
    found = of_run(name, ranks)
    assert_alike(found, in_one_process(tmp_path, data=Stream(SAMPLES), max_steps=3))
    assert (found["recoveries"] > 0) == ("short" in name)


@pytest.mark.wide
def test_a_stream_that_one_rank_reads_for_all_is_refused(ranks: list[Found]) -> None:
    for rank in ranks:
        assert "set accelerator_config={'dispatch_batches': False}" in rank["ddp refused stream"]["refusal"]


@pytest.mark.wide
def test_samples_stay_in_a_step_of_which_ranks_have_other_numbers(ranks: list[Found], folder: Path) -> None:
    """In the first step, each has as many, of which one counts nothing."""
    name = "ddp shared uneven"
    assert_alike(of_run(name, ranks), of_run("ddp drawn uneven", ranks))
    first, second = steps_of(folder, name)
    assert first["moved"] > 0 and second["moved"] is None
    assert len(stays(ranks[0][name])) == 1


def stays(found: Mapping[str, Any]) -> list[str]:
    return [line for line in found["told"] if line.startswith("samples are not balanced over ranks: ranks weight")]


@pytest.mark.wide
@pytest.mark.parametrize("model", ["bert", "apart"])
def test_samples_stay_where_a_mean_is_of_each_rank_by_itself(model: str, ranks: list[Found], folder: Path) -> None:
    found, drawn = (of_run(f"ddp {ours} {model}", ranks) for ours in ("shared", "drawn"))
    assert found["logged"] == drawn["logged"] and found["digest"] == drawn["digest"]
    assert all(step["moved"] is None for step in steps_of(folder, f"ddp shared {model}"))
    assert len(stays(found)) == 1 and not stays(drawn)
    if model == "bert":
        assert_alike(found, of_run("ddp stock bert", ranks))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "said"),
    [("reduce", "depends on what it gathers or sums"), ("all_reduce", "communicates in each forward")],
)
def test_a_loss_that_needs_other_ranks_is_refused_on_all_of_them(name: str, said: str, ranks: list[Found]) -> None:
    first, second = (rank[f"ddp refused {name}"]["refusal"] for rank in ranks)
    assert first == second and said in first, first


@pytest.mark.wide
@pytest.mark.parametrize("name", ["ddp shared sft", "fsdp shared dpo"])
def test_metrics_of_trl_are_those_of_all_samples_wherever_they_are_computed(
    name: str, ranks: list[Found], folder: Path
) -> None:
    model = name.split()[-1]
    found, stock = of_run(name, ranks), of_run(f"ddp stock {model}", ranks)
    keys = [*losses(stock)[0]]
    assert {"num_tokens", "rewards/margins" if model == "dpo" else "mean_token_accuracy"} <= {*keys}
    assert_alike(found, stock, keys)
    assert all(step["moved"] > 0 for step in steps_of(folder, name))


@pytest.mark.wide
def test_with_none_set_a_sharded_model_trains_bit_for_bit_as_with_trainer(ranks: list[Found]) -> None:
    off, stock = (of_run(f"fsdp {ours} llama", ranks) for ours in ("off", "stock"))
    assert off["logged"] == stock["logged"]
    assert off["digest"] == stock["digest"]


@pytest.mark.wide
def test_the_rank_with_the_least_memory_decides_on_the_size(ranks: list[Found]) -> None:
    """On the second, two samples of 24 tokens fit."""
    assert [rank["fsdp maximum llama"]["probed"] for rank in ranks] == [2, 2]
    assert {each["batch_size"] for each in losses(of_run("fsdp maximum llama", ranks))} == {2}


def test_a_sharded_model_grows_its_batch_and_goes_on_where_it_was_left(ranks: list[Found], tmp_path: Path) -> None:
    settings = AdaptiveArguments(batch_increase_function=trainers.DOUBLE, micro_batch_size=6, max_batch_size=64)
    whole = in_one_process(tmp_path, settings, per_device_train_batch_size=16, num_train_epochs=3)
    grown = of_run("fsdp growing llama", ranks)
    assert [each["batch_size"] for each in losses(grown)] == [8] * 4 + [16] * 2 + [32]
    assert_alike(grown, whole)
    assert_alike(grown["resumed"], grown)


@pytest.mark.wide
def test_the_first_rank_says_how_much_larger_a_batch_becomes(ranks: list[Found], tmp_path: Path) -> None:
    found = of_run("ddp asked llama", ranks)
    for rank in ranks:
        assert [each["batch_size"] for each in losses(rank["ddp asked llama"])] == [8] * 4 + [16] * 2 + [32]
    eight = AdaptiveArguments(batch_increase_function=lambda epoch, _: 16 * epoch, micro_batch_size=6)
    assert_alike(found, in_one_process(tmp_path, eight, per_device_train_batch_size=16, num_train_epochs=3))


@pytest.mark.wide
@pytest.mark.parametrize("name", ["ddp short sft", "fsdp short dpo"])
def test_two_processes_of_trl_train_as_before(name: str, ranks: list[Found]) -> None:
    found = of_run(name, ranks)
    stock = of_run(f"ddp stock {name.split()[-1]}", ranks)
    assert_alike(found, stock, (*KEYS, "num_tokens"))
    for ours, theirs in zip(losses(found), losses(stock), strict=True):
        assert ours.keys() == {*theirs, *trainers.OURS}
    assert ranks[1][name]["recoveries"] > 0


@pytest.mark.wide
def test_what_is_predicted_of_a_sharded_step_is_what_it_takes(ranks: list[Found]) -> None:
    found = of_run("fsdp probed sft", ranks)
    assert found["search"] == "predict" and not found["warned"]
    assert 1 <= found["probed"] <= 8, "how many are enough is a matter of time"
    assert_alike(found, of_run("ddp stock sft", ranks))


@pytest.mark.wide
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
