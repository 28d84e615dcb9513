"""Checkpoints: a run that ends anywhere goes on as if it had not, and a full disk leaves the last one."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torchtune.training.checkpointing import _checkpointer

from adaptive_batching._torchtune.stock.data import index_of
from adaptive_batching._torchtune.train.run import TrainingLoop
from tests.conftest import Run, TuneRun, assert_same_weights
from tests.integration.faults import disarm, plan
from tests.support.overrides import RECOVER
from tests.support.power_cut import FUNCTION
from tests.support.records import events, without_sizes
from tests.support.wide import few

RESUME = "resume_from_checkpoint=True"
# 100 samples: 13 steps of 4 and 6 of 8 in the first epoch, then 6 of 16; cut off before the 23rd is saved.
GROW = [
    *FUNCTION, "adaptive_batching.increase_every=0.5", "adaptive_batching.max_batch_size=16",
    "dataset.split=train[:100]", "save_every_n_steps=4", "adaptive_batching.lr_scaling=sqrt",
]  # fmt: skip
SHRINKS = ["batch_increase_function.shrinks=True", "model.lora_dropout=0.1"]
PACKED = ["dataset.packed=True", "gradient_accumulation_steps=2", "micro_batch_size=1", "batch_size=2"]
RUNS = {
    "full": ("full", GROW),
    "lora, which shrinks after the cut": ("lora", [*GROW, *SHRINKS]),
    "packs that are split and gathered": ("full", [*GROW, *PACKED, "save_every_n_steps=2"]),
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int | None]]:
    """The numbers of the samples of each batch that is trained on, in order."""
    batches: list[list[int | None]] = []
    run_window = TrainingLoop._run_window

    def noted(self: TrainingLoop, *arguments: Any) -> Any:
        done = run_window(self, *arguments)
        batches.extend([index_of(sample) for sample in batch] for batch in self._window)
        return done

    monkeypatch.setattr(TrainingLoop, "_run_window", noted)
    return batches


def folders(run: Run) -> list[str]:
    """The folders of checkpoints, those that hold the state of the optimizer marked."""
    found = sorted(run.output_dir.glob("*_[0-9]*"), key=lambda path: int(path.name.split("_")[-1]))
    return [path.name + ("*" if (path / "recipe_state.pt").exists() else "") for path in found]


@pytest.mark.parametrize("case", few(RUNS, "full"))
def test_a_run_that_is_cut_off_within_an_epoch_goes_on_as_if_it_had_not_been(
    case: str, tune_run: TuneRun, baseline: TuneRun, tmp_path: Path
) -> None:
    """Batches, their sizes, learning rates, losses and weights, dropout included."""
    kind, fields = RUNS[case]
    whole = baseline(kind, *fields, cut_off_at=1.5)
    whole.copy_when_cut_off(tmp_path / "out")
    resumed = tune_run(kind, *fields, RESUME)
    assert resumed.by_step == whole.by_step
    last = folders(whole)[-1]
    assert_same_weights(resumed.weights_in(last), whole.weights_in(last))
    [resume] = events(resumed, "resume")
    if case.startswith("packs"):
        assert resume["step"] == 22, "within the second epoch"
        return
    shrinks = "shrinks" in case
    end = ["step_24", "step_28*", "step_32"] if shrinks else ["step_24*", "step_25"]
    assert folders(resumed) == ["step_4", "step_8", "step_12", "step_16", "step_20", *end]
    second_epoch = [16] * 4 + [4] * 9 if shrinks else [16] * 6
    assert [s["batch_size"] for s in whole.metrics] == [4] * 13 + [8] * 6 + second_epoch
    assert resume["step"] == 20 and [e["epoch"] for e in events(resumed, "epoch")] == [0, 1]


def test_saving_changes_nothing_but_the_folders(tune_run: TuneRun, baseline: TuneRun) -> None:
    saving = baseline("full", *RUNS["full"][1], cut_off_at=1.5)
    not_saving = tune_run("full", *GROW, "save_every_n_steps=null")
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
    tune_run: TuneRun, tmp_path: Path, seen: list[list[int | None]], caplog: pytest.LogCaptureFixture
) -> None:
    tune_run("full", *GROW, name="whole", cut_off_at=1.5).copy_when_cut_off(tmp_path / "out")
    first = [index for batch in seen[19:20] for index in batch]
    seen.clear()
    with pytest.raises(SystemExit, match=r"^error: epochs=1 leaves nothing to train: .* 1. Set epochs to at least 2"):
        tune_run("full", *GROW, RESUME, "epochs=1")
    caplog.set_level("INFO", "adaptive_batching")
    resumed = tune_run("full", *GROW, RESUME, "batch_size=5")
    assert "batch_size=5 was 4 in the run being resumed" in caplog.text
    assert [s["batch_size"] for s in resumed.metrics][-11:] == [5] * 7 + [10] * 4
    assert resumed.metrics[-1]["lr"] == 0.0
    changes = [(change["step"], change["epoch"], change["batch_size"]) for change in events(resumed, "change")]
    assert changes[-2:] == [(20, 1.16, 5), (27, 1.5, 10)], "not from the size of the steps before"
    rest = [index for batch in seen for index in batch]
    assert len({*first, *rest}) == len(first) + len(rest) == 16 + 75


def test_a_checkpoint_without_state_is_refused(tune_run: TuneRun, baseline: TuneRun) -> None:
    whole = baseline("full", *RUNS["full"][1], cut_off_at=1.5)
    with pytest.raises(SystemExit, match=r"of step_8 in checkpointer: that folder has only weights; .* is step_24"):
        tune_run("full", *GROW, RESUME, f"output_dir={whole.output_dir}", WEIGHTS_OF.format("step_8"))
    with pytest.raises(SystemExit, match="has no checkpoint to resume from; set output_dir"):
        tune_run("full", *GROW, RESUME, name="nowhere")


def test_a_run_that_has_ended_ends_alike_when_it_is_resumed(tune_run: TuneRun) -> None:
    """Its last weights have no state, and its last state has other weights."""
    run = tune_run("lora", "save_every_n_steps=4")
    last = folders(run)[-1]
    before = run.weights_in(last)
    again = tune_run("lora", "save_every_n_steps=4", RESUME)
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
    before, weights = list(run.by_step.values()), run.weights_in("step_10")
    plan.update(where="backward", call=1, calls=0, times=1)
    again = tune_run("full", *alone, RESUME)
    assert [event["step"] for event in events(again, "resume")] == [8] and plan["times"] == 0
    assert [step.pop("oom_retries") for step in again.metrics[-2:]] == [1, 1]
    assert without_sizes(list(again.by_step.values())) == without_sizes(before)
    assert_same_weights(again.weights_in("step_10"), weights)


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        ("shuffle=False", "shuffle=False, where it was True in the run being resumed: the epoch continues in another "),
        ("dataset.split=train[:21]", "21 samples in dataset, where there were 20 in the run being resumed"),
        ("epochs=2", ""),
    ],
)
def test_another_order_within_an_epoch_is_warned_of(
    changed: str, warning: str, tune_run: TuneRun, baseline: TuneRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = ["epochs=1", "save_every_n_steps=4", "dataset.split=train[:20]"]
    shutil.copytree(baseline("full", *short).output_dir, tmp_path / "out")
    caplog.clear()
    tune_run("full", *short, changed, RESUME)
    warnings = [message for message in caplog.messages if "in another order" in message]
    assert len(warnings) == bool(warning) and all(message.startswith(warning) for message in warnings)


def full_disk_from(call: int, function: Any) -> Any:
    """``function(values, path)``, which from its ``call``-th call on writes a part of them and then has no room."""
    calls = 0

    def save(values: Any, path: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls < call:
            function(values, path, **options)
            return
        Path(path).write_bytes(bytes(1000))
        if function is save_file:  # it would replace a device by a file
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        function(values, "/dev/full", **options)

    return save


WEIGHTS_OF = "checkpointer.checkpoint_files=[{}/model-00001-of-00001.safetensors]"
STEPS = ["micro_batch_size=4", "save_every_n_steps=4", "epochs=1"]
FULL = {  # fields, the checkpoint that the disk has no room for, the one before, the last one of the run
    "epochs": ([*RECOVER, "epochs=3"], "epoch_1", "epoch_0", "epoch_2"),
    "steps": (STEPS, "step_8", "step_4", "step_12"),
}


def file_of(what: str) -> tuple[Any, str]:
    """The function that writes the weights, or the state, of a checkpoint: its owner and its name."""
    return (_checkpointer, "save_file") if what == "weights" else (torch, "save")


@pytest.mark.parametrize("what", few(["weights", "state"], "state"))
@pytest.mark.parametrize("case", few(FULL, "steps"))
def test_a_full_disk_leaves_the_last_checkpoint_to_go_on_from(
    what: str, case: str, tune_run: TuneRun, baseline: TuneRun, tmp_path: Path
) -> None:
    fields, gone, kept, last = FULL[case]
    whole = baseline("full", *fields)
    target, name = file_of(what)
    full = full_disk_from(2, getattr(target, name))
    with mock.patch.object(target, name, full), pytest.raises(SystemExit) as error:
        tune_run("full", *fields)
    message, output_dir = str(error.value), tmp_path / "out"
    of_gone, weights = gone.replace("_", " "), WEIGHTS_OF.format(kept)
    assert f"error: the checkpoint of {of_gone} cannot be written: the disk of output_dir=" in message
    assert not (output_dir / gone).exists() and not (output_dir / "unfinished_checkpoint").exists()
    if case == "steps":
        assert (
            "The checkpoint step_4 is intact; to resume from it, free some space and add resume_from_check" in message
        )
        with pytest.raises(SystemExit, match="were saved within an epoch; set save_every_n_steps as in the run"):
            tune_run("full", RESUME, weights)
    else:
        assert "The checkpoint of epoch 0 in " in message and weights in message
    resumed = tune_run("full", *fields, RESUME, *([weights] if case != "steps" else []))
    assert_same_weights(resumed.weights_in(last), whole.weights_in(last))
    assert [path.name for path in output_dir.glob("*/*.*") if "state" in path.name] == ["recipe_state.pt"]


@pytest.mark.parametrize(("what", "error"), [("weights", KeyboardInterrupt), ("state", RuntimeError)])
@pytest.mark.parametrize("case", few(FULL, "steps"))
def test_a_run_that_ends_while_it_saves_goes_on_from_the_checkpoint_before(
    what: str, error: type[BaseException], case: str, tune_run: TuneRun, baseline: TuneRun, tmp_path: Path
) -> None:
    """It is killed, which leaves no time to clear, or another rank has died."""
    fields, gone, kept, last = FULL[case]
    whole, output_dir = baseline("full", *fields), tmp_path / "out"
    target, name = file_of(what)
    save, calls = getattr(target, name), itertools.count(1)

    def ends(values: Any, path: Any, **options: Any) -> None:
        if next(calls) == 1:
            return save(values, path, **options)
        Path(path).write_bytes(bytes(1000))
        raise error("connection closed by peer")

    with mock.patch.object(target, name, ends), pytest.raises(error, match="closed by peer"):
        tune_run("full", *fields)
    assert (output_dir / "unfinished_checkpoint").exists() and not (output_dir / gone).exists()
    resumed = tune_run("full", *fields, RESUME, *([WEIGHTS_OF.format(kept)] if case != "steps" else []))
    assert_same_weights(resumed.weights_in(last), whole.weights_in(last))
    assert not (output_dir / "unfinished_checkpoint").exists()


def test_a_first_checkpoint_that_cannot_be_written_says_so(tune_run: TuneRun) -> None:
    full = full_disk_from(1, _checkpointer.save_file)
    said = pytest.raises(SystemExit, match=r"the checkpoint of epoch 0 cannot be written: .* There is no checkpoint")
    with mock.patch.object(_checkpointer, "save_file", full), said:
        tune_run("full", *RECOVER, "max_steps_per_epoch=1")


def test_a_full_disk_under_reports_and_metrics_ends_nothing(
    tune_run: TuneRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    for name in ("report.jsonl", "probe.partial"):
        (reports / name).symlink_to("/dev/full")
    full = [f"adaptive_batching.report_dir={reports}", "metric_logger.log_dir=/dev", "metric_logger.filename=full"]
    probe = ["use_maximum_batch_size=True", "adaptive_batching.max_batch_size=8", "epochs=1"]
    run = tune_run("full", *probe, *full)
    assert run.weights(0)
    warnings = [record.getMessage() for record in caplog.records if "No space left on device" in record.getMessage()]
    about = (
        "probe's result could not be saved",
        "record of this run",
        "metrics could not be logged",
        "metric logger could not",
    )
    assert [sum(text in warning for warning in warnings) for text in about] == [1] * 4 == [1] * len(warnings)
