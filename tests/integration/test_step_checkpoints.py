"""Checkpoints at optimizer steps: a run that ends anywhere goes on as if it had not, and the last one always stands."""

from __future__ import annotations

from typing import Any

import pytest

from adaptive_batching._torchtune.data import Sample, index_of
from adaptive_batching._torchtune.loop import TrainingLoop
from tests.conftest import Run, TuneRun, assert_same_weights
from tests.integration.faults import disarm, plan
from tests.support.power_cut import FUNCTION
from tests.support.records import events, without_sizes

RESUME = "resume_from_checkpoint=True"
# 100 samples: 13 steps of 4 and 6 of 8 in the first epoch, then 6 of 16; cut off before the 23rd is saved.
GROW = [
    *FUNCTION, "adaptive_batching.increase_every=0.5", "adaptive_batching.max_batch_size=16",
    "dataset.split=train[:100]", "save_every_n_steps=4",
]  # fmt: skip
NOISE = [
    "adaptive_batching.noise_scale_every=3", "adaptive_batching.lr_scaling=sqrt",
    "adaptive_batching.keep_beta2_half_life=True",
]  # fmt: skip
DROPOUT = ["model.lora_dropout=0.1"]
PACKED = ["dataset.packed=True", "gradient_accumulation_steps=2", "micro_batch_size=1", "batch_size=2"]
RUNS = {
    "full": ("full", [*GROW, *NOISE]),
    "lora": ("lora", [*GROW, *NOISE, *DROPOUT]),
    "lora_dpo": ("lora_dpo", [*GROW, *DROPOUT]),
    "kd": ("kd", [*GROW, *DROPOUT]),
    "packs that are cut and gathered": ("full", [*GROW, *PACKED, "save_every_n_steps=2"]),
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int | None]]:
    """The numbers of the samples of each batch that is trained on, in order."""
    batches: list[list[int | None]] = []
    run_batch = TrainingLoop._run_batch

    def noted(self: TrainingLoop, batch: list[Sample], **options: Any) -> None:
        batches.append([index_of(sample) for sample in batch])
        run_batch(self, batch, **options)

    monkeypatch.setattr(TrainingLoop, "_run_batch", noted)
    return batches


def folders(run: Run) -> list[str]:
    """The folders of checkpoints, those that hold the state of the optimizer marked."""
    found = sorted(run.output_dir.glob("*_[0-9]*"), key=lambda path: int(path.name.split("_")[-1]))
    return [path.name + ("*" if (path / "recipe_state.pt").exists() else "") for path in found]


def cut_off(tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch, kind: str, *overrides: str) -> None:
    """End a run at one and a half epochs."""
    monkeypatch.setattr("tests.support.power_cut.fail_at_epoch", 1.5)
    with pytest.raises(SystemExit, match="the power went out"):
        tune_run(kind, *overrides)
    monkeypatch.setattr("tests.support.power_cut.fail_at_epoch", None)


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "kd")) for case in RUNS])
def test_a_run_that_is_cut_off_within_an_epoch_goes_on_as_if_it_had_not_been(
    case: str, tune_run: TuneRun, baseline: TuneRun, monkeypatch: pytest.MonkeyPatch, seen: list[list[int | None]]
) -> None:
    """Batches, their sizes, learning rates, losses and weights, dropout and the noise scale included."""
    kind, fields = RUNS[case]
    whole = baseline(kind, *fields)
    cut_off(tune_run, monkeypatch, kind, *fields)
    first = list(seen)
    resumed = tune_run(kind, *fields, RESUME)
    assert resumed.by_step == whole.by_step
    last = folders(whole)[-1]
    assert_same_weights(resumed.weights_in(last), whole.weights_in(last))
    [resume] = events(resumed, "resume")
    if case.startswith("packs"):
        assert resume["step"] == 22, "within the second epoch"
        return
    assert folders(resumed) == ["step_4", "step_8", "step_12", "step_16", "step_20", "step_24*", "step_25"]
    assert [s["batch_size_samples"] for s in whole.metrics] == [4] * 13 + [8] * 6 + [16] * 6
    of_epoch = [index for batch in first[19:20] + seen[len(first) :] for index in batch]
    assert len(of_epoch) == len(set(of_epoch)) == 96, "no sample is repeated, none but the last four left out"
    assert resume["step"] == 20 and [e["epoch"] for e in events(resumed, "epoch")] == [0, 1]


def test_saving_changes_nothing_but_the_folders(tune_run: TuneRun, baseline: TuneRun) -> None:
    saving = baseline("full", *GROW, *NOISE)
    not_saving = tune_run("full", *GROW, *NOISE, "save_every_n_steps=null")
    assert not_saving.metrics == saving.metrics
    assert_same_weights(not_saving.weights(1), saving.weights_in("step_25"))
    assert folders(not_saving) == ["epoch_0", "epoch_1"]


def test_saving_adapters_alone_leaves_distillation_alone(tune_run: TuneRun) -> None:
    """Stock merges them into the model all the same."""
    adapters = ["save_adapter_weights_only=True", "epochs=1"]
    often = tune_run("kd", *adapters, "save_every_n_steps=3", name="often")
    once = tune_run("kd", *adapters, "save_every_n_steps=100", name="once")
    assert often.metrics == once.metrics
    assert folders(often) == ["step_3", "step_6", "step_9*", "step_12"]


def test_a_size_that_the_user_changes_goes_on_at_the_same_sample(
    tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch, seen: list[list[int | None]]
) -> None:
    cut_off(tune_run, monkeypatch, "full", *GROW)
    first = [index for batch in seen[19:20] for index in batch]
    seen.clear()
    with pytest.raises(SystemExit, match=r"^error: epochs=1 leaves nothing to train: 1 of .* Set epochs to at least 2"):
        tune_run("full", *GROW, RESUME, "epochs=1")
    resumed = tune_run("full", *GROW, RESUME, "batch_size=10")
    assert [s["batch_size_samples"] for s in resumed.metrics][-8:] == [10] * 8
    assert resumed.metrics[-1]["lr"] == 0.0
    [change] = events(resumed, "change")[-1:]
    assert (change["step"], change["epoch"], change["batch_size"]) == (20, 1.16, 10), "not the size of the steps before"
    rest = [index for batch in seen for index in batch]
    assert len({*first, *rest}) == len(first) + len(rest) == 96


def test_another_size_that_leaves_no_room_for_a_step_begins_the_next_epoch(
    tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = [*GROW[:-1], "save_every_n_steps=18", "epochs=2"]
    cut_off(tune_run, monkeypatch, "full", *late)
    resumed = tune_run("full", *late, RESUME, "batch_size=16")
    assert [s["batch_size_samples"] for s in resumed.metrics][-6:] == [16] * 6
    assert resumed.metrics[-1]["lr"] == 0.0 and max(resumed.by_step) == 18 + 6


def test_a_checkpoint_without_state_is_refused(tune_run: TuneRun, baseline: TuneRun) -> None:
    whole = baseline("full", *GROW, *NOISE)
    named = "checkpointer.checkpoint_files=[step_8/model-00001-of-00001.safetensors]"
    with pytest.raises(SystemExit, match=r"of step_8 in checkpointer: that folder holds weights alone; .* is step_24"):
        tune_run("full", *GROW, *NOISE, RESUME, f"output_dir={whole.output_dir}", named)
    with pytest.raises(SystemExit, match="has no checkpoint to go on from; set output_dir"):
        tune_run("full", *GROW, *NOISE, RESUME, name="nowhere")


@pytest.mark.parametrize("fields", [["save_every_n_steps=4"], ["micro_batch_size=4"]], ids=["steps", "epochs"])
def test_a_run_that_has_ended_ends_alike_when_it_is_resumed(fields: list[str], tune_run: TuneRun) -> None:
    """Its last weights have no state, and its last state has other weights."""
    run = tune_run("lora", *fields)
    last = folders(run)[-1]
    before = run.weights_in(last)
    again = tune_run("lora", *fields, RESUME)
    assert folders(again)[-1] == last
    assert_same_weights(again.weights_in(last), before)


def test_a_resumed_run_knows_what_has_fitted_when_memory_runs_out_once(tune_run: TuneRun) -> None:
    """A sample alone, which cannot run in smaller parts, runs again as it was in the first step, too."""
    alone = [
        "model._component_=tests.integration.faults.full_model", "batch_size=1", "epochs=1", "save_every_n_steps=4",
        "dataset.split=train[:10]", "tokenizer.max_seq_len=32", "dataset.train_on_input=True",
    ]  # fmt: skip
    disarm()
    run = tune_run("full", *alone)
    before, weights = run.by_step, run.weights_in("step_10")
    plan.update(where="backward", call=1, calls=0, times=1)
    again = tune_run("full", *alone, RESUME)
    assert [event["step"] for event in events(again, "resume")] == [8] and plan["times"] == 0
    assert [step.pop("out_of_memory_recoveries") for step in again.metrics[-2:]] == [1, 1]
    assert without_sizes(list(again.by_step.values())) == without_sizes(list(before.values()))
    assert_same_weights(again.weights_in("step_10"), weights)


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        ("shuffle=False", "shuffle=False, where it was True in the run that is resumed: its epoch goes on in another "),
        ("dataset.split=train[:21]", "21 samples in dataset, where there were 20 in the run that is resumed"),
        ("epochs=2", ""),
    ],
)
def test_another_order_within_an_epoch_is_warned_of(
    changed: str, warning: str, tune_run: TuneRun, caplog: pytest.LogCaptureFixture
) -> None:
    short = ["epochs=1", "save_every_n_steps=4"]
    tune_run("full", *short, "dataset.split=train[:20]")
    kept = [each for each in [*short, "dataset.split=train[:20]"] if each.split("=")[0] != changed.split("=")[0]]
    caplog.clear()
    tune_run("full", *kept, changed, RESUME)
    warnings = [message for message in caplog.messages if "in another order" in message]
    assert len(warnings) == bool(warning) and all(message.startswith(warning) for message in warnings)
