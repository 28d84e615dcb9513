"""A disk that is full: training ends only where a checkpoint cannot be written, and then says which one stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torchtune.training.checkpointing import _checkpointer

from tests.conftest import TuneRun, assert_same_weights

GROW = [
    "batch_increase_function._component_=adaptive_batching.growth.fixed_increase", "batch_increase_function.increase=4",
    "~batch_increase_function.every", "adaptive_batching.max_batch_size=16", "epochs=3",
]  # fmt: skip
STEPS = ["micro_batch_size=4", "save_every_n_steps=4", "epochs=1"]
RESUME = "resume_from_checkpoint=True"
FIRST = "checkpointer.checkpoint_files=[{}/model-00001-of-00001.safetensors]"


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


@pytest.mark.parametrize("what", ["weights", "state"])
@pytest.mark.parametrize("case", ["off", "growth", "steps"])
def test_the_last_checkpoint_stands_and_training_goes_on_from_it(
    what: str, case: str, tune_run: TuneRun, baseline: TuneRun, tmp_path: Path
) -> None:
    fields = {"off": ["epochs=3"], "growth": GROW, "steps": STEPS}[case]
    of_steps = case == "steps"
    gone, kept, last = ("step_8", "step_4", "step_12") if of_steps else ("epoch_1", "epoch_0", "epoch_2")
    whole = baseline("full", *fields)
    target, name = (_checkpointer, "save_file") if what == "weights" else (torch, "save")
    full = full_disk_from(2, getattr(target, name))
    with mock.patch.object(target, name, full), pytest.raises(SystemExit) as error:
        tune_run("full", *fields)
    message, output_dir = str(error.value), tmp_path / "out"
    of_gone = gone.replace("_", " ")
    assert f"error: the checkpoint of {of_gone} cannot be written: the disk of output_dir=" in message
    if of_steps:
        assert "The checkpoint step_4 stands; to go on from it, free some space and add resume_from_check" in message
        with pytest.raises(SystemExit, match="were saved within an epoch; set save_every_n_steps as in the run"):
            tune_run("full", RESUME, FIRST.format(kept))
    else:
        assert "The checkpoint of epoch 0 stands" in message and FIRST.format(kept) in message
    assert not (output_dir / gone).exists() and not (output_dir / "unfinished_checkpoint").exists()

    resumed = tune_run("full", *fields, RESUME, *([] if of_steps else [FIRST.format(kept)]))
    assert_same_weights(resumed.weights_in(last), whole.weights_in(last))
    assert [path.name for path in output_dir.glob("*/*.*") if "state" in path.name] == ["recipe_state.pt"]


def test_another_error_after_a_complete_checkpoint_leaves_it(
    tune_run: TuneRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another rank has died when all ranks meet after saving."""
    save = _checkpointer.FullModelHFCheckpointer.save_checkpoint

    def fails_after(self: Any, state: Any, epoch: int, **options: Any) -> None:
        save(self, state, epoch=epoch, **options)
        if epoch == 1:
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(_checkpointer.FullModelHFCheckpointer, "save_checkpoint", fails_after)
    with pytest.raises(RuntimeError, match="closed by peer"):
        tune_run("full", "epochs=3")
    assert list((tmp_path / "out" / "epoch_1").glob("model-*"))
    state = torch.load(tmp_path / "out" / "recipe_state" / "recipe_state.pt", weights_only=True)
    assert state["epochs_run"] == 2, "that of the new checkpoint"


def test_a_first_checkpoint_that_cannot_be_written_says_so(tune_run: TuneRun) -> None:
    full = full_disk_from(1, _checkpointer.save_file)
    with (
        mock.patch.object(_checkpointer, "save_file", full),
        pytest.raises(SystemExit, match=r"the checkpoint of epoch 0 cannot be written: .* No checkpoint stands"),
    ):
        tune_run("full", "max_steps_per_epoch=1")


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
    about = [
        "probe's result cannot be kept",
        "record of this run",
        "metrics are not logged",
        "logger of metrics cannot",
    ]
    assert all(any(text in warning for warning in warnings) for text in about), warnings
    assert len(warnings) == len(about), "each once"
