"""Preferences and distillation: split, grown, probed and recovered as supervised fine-tuning is."""

from __future__ import annotations

import re

import pytest

from tests.conftest import Run, TuneRun, assert_close
from tests.integration.faults import disarm, plan
from tests.support.overrides import DOUBLE, RECOVER, SGD
from tests.support.records import events
from tests.support.wide import few

FEW = [*SGD, "tokenizer.max_seq_len=96", "dataset.split=train[:48]", "epochs=1"]
COMMON = {"lora_dpo": [*FEW, "loss.beta=2.0"], "kd": [*FEW, "clip_grad_norm=1.0"]}
KINDS = pytest.mark.parametrize("kind", COMMON)


@pytest.fixture(autouse=True)
def no_plan() -> None:
    disarm()


def assert_same_metrics(ours: Run, theirs: Run, names: set[str]) -> None:
    for here, there in zip(ours.metrics, theirs.metrics, strict=True):
        for name in names:
            assert here[name] == pytest.approx(there[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("kind", few(COMMON, "lora_dpo"))
@pytest.mark.parametrize("size", few(["2", "auto"], "auto"))
def test_parts_of_a_batch_train_as_the_whole(kind: str, size: str, tune_run: TuneRun, baseline: TuneRun) -> None:
    common = [*COMMON[kind], "batch_size=6", "gradient_accumulation_steps=2"]
    whole = baseline(kind, *common, "micro_batch_size=6")  # stock's gradient of a distillation shrinks with its tokens
    limit = ["adaptive_batching.memory_limit=8GiB"] if size == "auto" else []
    split = tune_run(kind, *common, *limit, f"micro_batch_size={size}", name="split")
    assert len(split.metrics) == 4
    assert [step["loss"] for step in split.metrics] != [step["loss"] for step in whole.metrics], "it was split"
    assert_close(split, whole, epoch=0)
    assert_same_metrics(split, whole, {"class_loss", "kd_loss", "margins", "accuracies"} & split.metrics[0].keys())


def test_a_distillation_in_parts_has_the_gradient_of_its_mean_loss(tune_run: TuneRun, baseline: TuneRun) -> None:
    """Without a teacher's share it is supervised fine-tuning."""
    common = [*FEW, "micro_batch_size=2", "model.lora_dropout=0.0"]
    assert_close(tune_run("kd", *common, "kd_ratio=0.0", name="alone"), baseline("lora", *common), epoch=0)


@pytest.mark.wide
def test_metrics_of_a_step_are_those_of_all_its_pairs(tune_run: TuneRun, baseline: TuneRun) -> None:
    """Stock logs those of the last batch of a step, which are all where there is one; means of logits count padding."""

    def logged(run: Run) -> list[dict[str, float]]:
        [log] = (run.output_dir / "logs").glob("*.txt")
        named = [re.findall(r"((?:rewards|log_probs)/\w+):(\S+)", line) for line in log.read_text().splitlines()]
        return [{name: float(value) for name, value in step} for step in named]

    whole = baseline("lora_dpo", *COMMON["lora_dpo"], "batch_size=12")
    in_parts = ["batch_size=12", "micro_batch_size=4"]
    in_batches = ["batch_size=6", "gradient_accumulation_steps=2", "micro_batch_size=6"]
    for how in (in_parts, in_batches):
        ours = tune_run("lora_dpo", *COMMON["lora_dpo"], *how, name=f"out_{len(how)}")
        for here, there in zip(logged(ours), logged(whole), strict=True):
            assert len(there) == 6 and here == pytest.approx(there, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("kind", few(COMMON, "kd"))
def test_a_step_whose_frozen_model_runs_out_of_memory_is_run_again(
    kind: str, tune_run: TuneRun, baseline: TuneRun, caplog: pytest.LogCaptureFixture
) -> None:
    common = [*COMMON[kind], "model._component_=tests.integration.faults.lora_model", "gradient_accumulation_steps=2"]
    if kind == "kd":
        common.append("teacher_model._component_=tests.integration.faults.full_model")
    # Stock's gradient of a distillation is another.
    undisturbed = baseline(kind, *common, *(RECOVER if kind == "kd" else []))
    # Of the frozen model once: then parts are left that fit, as does what recovery tries out.
    fits = 5 if kind == "lora_dpo" else 3
    plan.update(where="forward", without_gradients=True, layer=1, call=6, calls=0, times=1, fits=fits)
    recovered = tune_run(kind, *common, *RECOVER, name="recovered")
    assert plan["times"] == 0
    assert caplog.text.count("running the step's samples again") == 1
    assert_close(recovered, undisturbed, epoch=0)


@pytest.mark.wide
@KINDS
def test_the_batch_grows_to_what_a_probe_finds(kind: str, tune_run: TuneRun) -> None:
    run = tune_run(
        kind, *COMMON[kind], *DOUBLE, "epochs=3", "batch_size=4", "use_maximum_batch_size=True",
        "adaptive_batching.max_batch_size=16", "adaptive_batching.memory_limit=8GiB",
    )  # fmt: skip
    probe = events(run, "probe")[0]
    assert (probe["batch_size"], probe["sequence_length"]) == (16, 96)
    assert probe["search"] == "predict", "the step could be traced"
    assert [epoch["batch_size"] for epoch in events(run, "epoch")] == [4, 8, 16]
    assert [step["batch_size"] for step in run.metrics] == [4] * 12 + [8] * 6 + [16] * 3
