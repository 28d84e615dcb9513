"""Direct preference optimization: cut, grown, probed, recovered and resumed as supervised fine-tuning is."""

from __future__ import annotations

import pytest

from tests.conftest import TuneRun, assert_close
from tests.integration.faults import disarm, plan
from tests.support.overrides import DOUBLE, SGD
from tests.support.records import events

COMMON = [*SGD, "tokenizer.max_seq_len=96", "dataset.split=train[:48]", "epochs=1", "loss.beta=2.0"]


@pytest.fixture(autouse=True)
def no_plan() -> None:
    disarm()


@pytest.mark.parametrize("size", ["1", "2", "auto"])
def test_parts_of_a_batch_train_as_the_whole(size: str, tune_run: TuneRun, baseline: TuneRun) -> None:
    common = [*COMMON, "batch_size=6", "gradient_accumulation_steps=2"]
    whole = baseline("lora_dpo", *common)
    limit = ["adaptive_batching.memory_limit=8GiB"] if size == "auto" else []
    cut = tune_run("lora_dpo", *common, *limit, f"micro_batch_size={size}", name="cut")
    assert len(cut.metrics) == 4
    assert [step["loss"] for step in cut.metrics] != [step["loss"] for step in whole.metrics], "it was cut"
    assert_close(cut, whole, epoch=0)


def test_metrics_of_a_step_are_those_of_all_its_pairs(tune_run: TuneRun, baseline: TuneRun) -> None:
    """Stock logs those of the last batch of a step, which are all where there is one."""
    names = ["chosen", "rejected", "accuracies", "margins"]
    whole = baseline("lora_dpo", *COMMON, "batch_size=12")
    cut = tune_run("lora_dpo", *COMMON, "batch_size=12", "micro_batch_size=4", name="cut")
    in_batches = tune_run(
        "lora_dpo", *COMMON, "batch_size=6", "gradient_accumulation_steps=2", "micro_batch_size=6", name="in_batches"
    )
    for ours, of_batches, theirs in zip(cut.metrics, in_batches.metrics, whole.metrics, strict=True):
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
            assert of_batches[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("call", [1, 6])
@pytest.mark.parametrize("where", ["forward", "backward", "reference"])
def test_a_step_that_runs_out_of_memory_is_run_again(
    where: str, call: int, tune_run: TuneRun, baseline: TuneRun, caplog: pytest.LogCaptureFixture
) -> None:
    common = [*COMMON, "model._component_=tests.integration.faults.lora_model", "gradient_accumulation_steps=2"]
    undisturbed = baseline("lora_dpo", *common)
    of_reference = where == "reference"
    plan.update(where="forward" if of_reference else where, without_gradients=of_reference)
    times = 1 if of_reference else 2  # then parts of two pairs are left, which fit, as does what recovery tries out
    plan.update(layer=1, call=call, calls=0, times=times, fits=5 if of_reference else 0)
    recovered = tune_run("lora_dpo", *common, name="recovered")
    assert plan["times"] == 0
    assert caplog.text.count("running the step's samples again") == times
    assert_close(recovered, undisturbed, epoch=0)


def test_the_batch_grows_to_what_a_probe_finds(tune_run: TuneRun) -> None:
    run = tune_run(
        "lora_dpo", *COMMON, *DOUBLE, "epochs=3", "batch_size=4", "use_maximum_batch_size=True",
        "adaptive_batching.max_batch_size=16", "adaptive_batching.memory_limit=8GiB",
    )  # fmt: skip
    probe = events(run, "probe")[0]
    assert (probe["batch_size"], probe["sequence_length"]) == (16, 96)
    assert probe["search"] == "predict", "the step could be traced"
    assert [epoch["batch_size"] for epoch in events(run, "epoch")] == [4, 8, 16]
    assert [step["batch_size"] for step in run.metrics] == [4] * 12 + [8] * 6 + [16] * 3
