"""What a run leaves: a record and a page that say what has happened, and nothing that changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from adaptive_batching._report.events import Events, read_events
from adaptive_batching.transformers import AdaptiveArguments
from tests.support.html import check_that_it_asks_for_nothing, read_page
from tests.support.records import check_the_schema
from tests.transformers import trainers
from tests.transformers.trainers import OutOfMemory, growing, logged, losses, make_trainer, weights


def record_of(folder: Path) -> Events:
    return read_events(folder / "adaptive_batching" / "report.jsonl")


def decided(record: Events) -> list[tuple[int, int, int, str]]:
    return [(each["epoch"], each["step"], each["batch_size"], each["reason"]) for each in record["epoch"]]


@pytest.mark.usefixtures("makes_pages")
def test_a_run_leaves_a_record_and_a_page_that_say_the_same_as_its_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "adaptive_batching")
    held_out: dict[str, Any] = dict(eval_dataset=trainers.make_data(5), eval_strategy="epoch", save_strategy="epoch")
    trainer = growing(tmp_path / "first", disable_tqdm=False, **held_out)
    OutOfMemory(trainer.model, 60)
    trainer.train()
    record, logs = record_of(tmp_path / "first"), losses(trainer)
    check_the_schema(record)
    assert [each["loss"] for each in record["step"]] == pytest.approx([each["loss"] for each in logs], rel=1e-6)
    for key, of_log in {"lr": "learning_rate", "recoveries": "oom_retries"}.items():
        assert [each[key] for each in record["step"]] == [each[of_log] for each in logs]
    assert [each["samples"] for each in record["step"]] == [12, 12, 12, 4, 24, 16, 40]
    assert [each["padded_tokens"] / each["tokens"] for each in record["step"]] == [each["padding"] for each in logs]
    added = "adaptive_batching.growth.step added"
    assert decided(record) == [(0, 0, 6, "kept"), (1, 4, 12, f"{added} 6"), (2, 6, 20, f"{added} 8")]
    [plan] = record["plan"]
    assert [(each["steps"], each["samples"], each["dropped_samples"]) for each in plan["epochs"]] == [
        (4, 40, 0), (2, 40, 0), (1, 40, 0)
    ]  # fmt: skip
    last_of = {each["epoch"]: each["lr"] for each in record["step"]}
    assert {each["epoch"]: each["last_lr"] for each in plan["epochs"]} == pytest.approx(last_of)
    assert [each["batch_size"] for each in record["maximum"]] == [20]
    evaluated = [each["eval_loss"] for each in logged(trainer) if "eval_loss" in each]
    assert [(each["step"], each["loss"]) for each in record["validation"]] == [*zip([4, 6, 7], evaluated, strict=True)]
    assert [each["what"] for each in record["took"]] == ["validation", "checkpoint"] * 3
    assert record["recovery"] and record["step"][0]["recoveries"] >= 1
    page = read_page(tmp_path / "first" / "adaptive_batching" / "report.html")
    check_that_it_asks_for_nothing(page)
    assert "<title>first · LlamaForCausalLM · adaptive batching</title>" in page.text
    assert page.data["runs"][0]["columns"]["loss"] == pytest.approx([each["loss"] for each in logs], rel=1e-5)
    assert '"per_device_train_batch_size": 6' in page.codes[0]
    assert f"recovered {trainer.adaptive.num_recoveries}" in capfd.readouterr().err, "in the progress bar"
    assert "what was decided, and why" in caplog.text
    assert [line.split() for line in str(trainer.adaptive).splitlines()][-1] == ["2", "20", "40", "1", "40", "0"]


def test_a_run_that_goes_on_leaves_the_record_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    growing(tmp_path / "whole").train()
    whole = record_of(tmp_path / "whole")

    class Interrupt(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise KeyboardInterrupt

    saves: dict[str, Any] = dict(save_strategy="steps", save_steps=3)
    with pytest.raises(KeyboardInterrupt):
        growing(tmp_path / "again", callbacks=[Interrupt()], **saves).train()
    [error] = record_of(tmp_path / "again")["error"]
    assert error["type"] == "KeyboardInterrupt"
    growing(tmp_path / "again", **saves).train(resume_from_checkpoint=True)
    again = record_of(tmp_path / "again")
    assert decided(again) == decided(whole)
    for key in ("step", "epoch", "samples", "loss", "lr"):
        assert [each[key] for each in again["step"]] == [each[key] for each in whole["step"]], key
    assert [each["resumed"] for each in again["run"]] == [False, True]
    assert [each["step"] for each in again["resume"]] == [3]
    assert again["end"] and not again["error"]
    growing(tmp_path / "again").train()
    assert [each["resumed"] for each in record_of(tmp_path / "again")["run"]] == [False], "a new run replaces it"


def full_disk(*args: Any, **kwargs: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("broken", ["record", "watching"])
def test_what_goes_wrong_in_recording_is_a_warning_and_changes_nothing(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = growing(tmp_path / "whole")
    whole.train()
    trainer = growing(tmp_path / "broken")
    if broken == "record":
        monkeypatch.setattr("adaptive_batching._report.record.written", full_disk)
    else:
        monkeypatch.setattr(trainer._recording, "_cost_of", full_disk)
    trainer.train()
    keys = ("loss", "grad_norm", "learning_rate", "epoch")
    for one, other in zip(logged(trainer), logged(whole), strict=True):
        assert all(one.get(key) == other.get(key) for key in keys)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(trainer).items())
    [warning] = [each for each in caplog.records if each.levelname == "WARNING" and "incomplete" in each.getMessage()]
    assert "No space left on device" in warning.getMessage() and "training continues" in warning.getMessage()


@pytest.mark.parametrize("where", ["step", "save"])
def test_an_error_that_ends_a_run_is_in_its_record(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = growing(tmp_path, save_strategy="epoch")
    if where == "save":
        monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", full_disk)
    else:
        monkeypatch.setattr(trainer, "_clip_grad_norm", full_disk)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    record = record_of(tmp_path)
    assert [(each["type"], each["rank"]) for each in record["error"]] == [("OSError", 0)]
    assert len(record["step"]) == (4 if where == "save" else 0) and not record["end"]


def test_before_training_the_run_says_what_it_is_to_do(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, AdaptiveArguments(micro_batch_size="auto", padding=True))
    before = "sizes and plan are determined when training begins"
    assert str(trainer.adaptive) == f"micro_batch_size=auto, padding=True; {before}"
    told: list[str] = []

    class Tell(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            told.extend(str(trainer.adaptive).splitlines())

    trainer.add_callback(Tell())
    trainer.train()
    probed = trainer.adaptive.probe
    assert told[1].split() == f"largest forward pass {probed.batch_size}, bound by {probed.bound}".split()
    assert "the plan: 10 steps" in told
    [recorded] = record_of(tmp_path)["probe"]
    assert recorded["batch_size"] == probed.batch_size and recorded["sequence_length"] == 24
    assert 0 < recorded["seconds"] <= recorded["waited"]
