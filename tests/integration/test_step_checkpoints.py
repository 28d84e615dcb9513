"""Checkpoints at optimizer steps: a run that ends anywhere goes on as if it had not, and the last one always stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torchtune.training.checkpointing import _checkpointer

from adaptive_batching._torchtune.data import Sample, index_of
from adaptive_batching._torchtune.loop import TrainingLoop
from tests import conftest
from tests.conftest import ROOT, Run, TuneRun, assert_same_weights
from tests.integration.faults import disarm, plan
from tests.integration.test_full_disk import full_disk_from
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
KINDS = {
    "full": NOISE,
    "lora": [*NOISE, "model.lora_dropout=0.1"],
    "lora_dpo": ["model.lora_dropout=0.1"],
    "kd": ["model.lora_dropout=0.1"],
}
STATE = "recipe_state.pt"


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
    return [path.name + ("*" if (path / STATE).exists() else "") for path in found]


def cut_off(tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch, kind: str, *overrides: str) -> None:
    """End a run at one and a half epochs."""
    monkeypatch.setattr("tests.support.power_cut.fail_at_epoch", 1.5)
    with pytest.raises(SystemExit, match="the power went out"):
        tune_run(kind, *overrides)
    monkeypatch.setattr("tests.support.power_cut.fail_at_epoch", None)


@pytest.mark.parametrize("kind", ["full", "lora", "lora_dpo", pytest.param("kd", marks=pytest.mark.slow)])
def test_a_run_that_is_cut_off_within_an_epoch_goes_on_as_if_it_had_not_been(
    kind: str,
    tune_run: TuneRun,
    baseline: TuneRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seen: list[list[int | None]],
) -> None:
    """Batches, their sizes, learning rates, losses and weights, dropout and the noise scale included."""
    whole = baseline(kind, *GROW, *KINDS[kind])
    cut_off(tune_run, monkeypatch, kind, *GROW, *KINDS[kind])
    assert folders(Run(tmp_path / "out")) == ["step_4", "step_8", "step_12", "step_16", "step_20*"]
    first = list(seen)
    resumed = tune_run(kind, *GROW, *KINDS[kind], RESUME)
    assert folders(resumed) == ["step_4", "step_8", "step_12", "step_16", "step_20", "step_24*", "step_25"]
    assert resumed.by_step == whole.by_step and len(whole.metrics) == 25
    assert [s["batch_size_samples"] for s in whole.metrics] == [4] * 13 + [8] * 6 + [16] * 6
    assert_same_weights(resumed.weights_in("step_25"), whole.weights_in("step_25"))
    of_epoch = [index for batch in first[19:20] + seen[len(first) :] for index in batch]
    assert len(of_epoch) == len(set(of_epoch)) == 96, "no sample is repeated, none but the last four left out"
    assert [e["step"] for e in events(resumed, "resume")] == [20]
    assert [e["epoch"] for e in events(resumed, "epoch")] == [0, 1]


def test_saving_changes_nothing_but_the_folders(tune_run: TuneRun, baseline: TuneRun) -> None:
    saving = baseline("full", *GROW, *KINDS["full"])
    not_saving = tune_run("full", *GROW, *KINDS["full"], "save_every_n_steps=null")
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


def test_packs_that_are_cut_and_gathered_go_on_at_the_same_sample(
    tune_run: TuneRun, baseline: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = [*GROW, "dataset.packed=True", "gradient_accumulation_steps=2", "micro_batch_size=1", "batch_size=2"]
    packed += ["dataset.split=train[:100]", "save_every_n_steps=2"]
    whole = baseline("full", *packed)
    cut_off(tune_run, monkeypatch, "full", *packed)
    resumed = tune_run("full", *packed, RESUME)
    assert [event["step"] for event in events(resumed, "resume")] == [22], "within the second epoch"
    assert resumed.by_step == whole.by_step
    last = folders(whole)[-1]
    assert_same_weights(resumed.weights_in(last), whole.weights_in(last))


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


KILLED_WITHIN_THE_STATE = """
import os, signal, sys, torch
from torchtune._cli.tune import main

save, calls = torch.save, 0

def killed(values, path, **options):
    global calls
    calls += 1
    if calls == 2:
        open(path, "wb").write(bytes(1000))
        os.kill(os.getpid(), signal.SIGKILL)
    save(values, path, **options)

torch.save = killed
main()
"""


def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_checkpoint_before(
    tune_run: TuneRun, baseline: TuneRun, tmp_path: Path
) -> None:
    def in_another_process(*arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", KILLED_WITHIN_THE_STATE, *arguments], cwd=ROOT, check=False, capture_output=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, text=True,
        )  # fmt: skip
        assert done.returncode == -9, done.stderr

    whole = baseline("full", *GROW, *KINDS["full"])
    with mock.patch.object(conftest, "_main", in_another_process):
        tune_run("full", *GROW, *KINDS["full"])
    assert (tmp_path / "out" / "unfinished_checkpoint" / "epoch_-1").exists()
    assert folders(Run(tmp_path / "out")) == ["step_4*"]
    resumed = tune_run("full", *GROW, *KINDS["full"], RESUME)
    assert resumed.by_step == whole.by_step
    assert_same_weights(resumed.weights_in("step_25"), whole.weights_in("step_25"))
    assert not (tmp_path / "out" / "unfinished_checkpoint").exists()


@pytest.mark.parametrize("what", ["weights", "state"])
def test_a_full_disk_leaves_the_checkpoint_before(
    what: str, tune_run: TuneRun, baseline: TuneRun, tmp_path: Path
) -> None:
    whole = baseline("full", *GROW, *KINDS["full"])
    target, name = (_checkpointer, "save_file") if what == "weights" else (torch, "save")
    full = full_disk_from(2, save_file if what == "weights" else torch.save)
    with mock.patch.object(target, name, full), pytest.raises(SystemExit) as error:
        tune_run("full", *GROW, *KINDS["full"])
    message = str(error.value)
    assert "error: the checkpoint of step 8 cannot be written: the disk of output_dir=" in message
    assert "The checkpoint step_4 stands; to go on from it, free some space and add resume_from_check" in message
    assert folders(Run(tmp_path / "out")) == ["step_4*"]
    assert not (tmp_path / "out" / "unfinished_checkpoint").exists()
    if what == "weights":
        with pytest.raises(SystemExit, match="were saved within an epoch; set save_every_n_steps as in the run"):
            tune_run("full", RESUME, "checkpointer.checkpoint_files=[step_4/model-00001-of-00001.safetensors]")
        return
    resumed = tune_run("full", *GROW, *KINDS["full"], RESUME)
    assert resumed.by_step == whole.by_step


def test_a_checkpoint_that_is_named_is_taken_or_refused(tune_run: TuneRun, baseline: TuneRun, tmp_path: Path) -> None:
    whole = baseline("full", *GROW, *KINDS["full"])
    named = "checkpointer.checkpoint_files=[step_{}/model-00001-of-00001.safetensors]"
    there = f"output_dir={whole.output_dir}"
    with pytest.raises(SystemExit, match=r"of step_8 in checkpointer: that folder holds weights alone; .* is step_24"):
        tune_run("full", *GROW, *KINDS["full"], RESUME, there, named.format(8))
    with pytest.raises(SystemExit, match="has no checkpoint to go on from; set output_dir"):
        tune_run("full", *GROW, *KINDS["full"], RESUME, name="nowhere")


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
