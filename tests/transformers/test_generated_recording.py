"""The record and page of a run that generates say what TRL's logs say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adaptive_batching._report.events import Events, read_events
from tests.support.html import check_that_it_asks_for_nothing, read_page
from tests.support.records import check_the_schema
from tests.transformers.generating import BATCH, fails_in_backward, make, make_distilling, save_student_and_teacher

LONG: dict[str, Any] = {"max_steps": 4, "num_iterations": 1}


def record_of(trainer: Any) -> Events:
    return read_events(Path(trainer.args.output_dir) / "adaptive_batching" / "report.jsonl")


@pytest.mark.usefixtures("makes_pages")
def test_a_run_leaves_a_record_and_a_page_that_say_the_same_as_its_logs(tmp_path: Path) -> None:
    trainer = make(tmp_path, "auto", **LONG)
    fails_in_backward(trainer, [5])
    trainer.train()
    record = record_of(trainer)
    check_the_schema(record)
    logs = trainer.seen_logs
    assert [each["loss"] for each in record["step"]] == pytest.approx([each["loss"] for each in logs], abs=1e-6)
    for key, of_log in {"lr": "learning_rate", "recoveries": "oom_retries"}.items():
        assert [each[key] for each in record["step"]] == [each[of_log] for each in logs]
    assert {each["samples"] for each in record["step"]} == {2 * BATCH}
    last = [row for part in trainer.adaptive.parts_of_step for row in part.samples]
    assert record["step"][-1]["tokens"] == sum(row.tokens for row in last)
    assert all(each["padded_tokens"] == each["tokens"] and each["forwards"] > 0 for each in record["step"])
    [probe], [recovery] = record["probe"], record["recovery"]
    found = trainer.adaptive
    assert (probe["sequence_length"], probe["batch_size"]) == (found.longest, found.probe.batch_size)
    assert "completion" in recovery["failed"]
    page = read_page(Path(trainer.args.output_dir) / "adaptive_batching" / "report.html")
    check_that_it_asks_for_nothing(page)
    assert page.data["runs"][0]["columns"]["loss"] == pytest.approx([each["loss"] for each in logs], abs=1e-5)


def test_a_resumed_run_appends_and_one_of_distillation_has_a_record_too(tmp_path: Path) -> None:
    saves: dict[str, Any] = {**LONG, "save_strategy": "steps", "save_steps": 2}
    make(tmp_path, {"micro_batch_size": 2}, **{**saves, "max_steps": 2}).train()
    resumed = make(tmp_path, {"micro_batch_size": 2}, **saves)
    resumed.train(resume_from_checkpoint=True)
    record = record_of(resumed)
    assert [each["step"] for each in record["step"]] == [1, 2, 3, 4]
    assert [each["step"] for each in record["resume"]] == [2] and record["end"]
    assert [each["what"] for each in record["took"]] == ["checkpoint"] * 2
    save_student_and_teacher(tmp_path)
    distilled = make_distilling(tmp_path, "auto")
    distilled.train()
    assert len(record_of(distilled)["step"]) == distilled.state.global_step


def full_disk(*args: Any, **kwargs: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_what_goes_wrong_in_recording_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make(tmp_path / "whole", "auto", **LONG)
    whole.train()
    monkeypatch.setattr("adaptive_batching._report.record.written", full_disk)
    broken = make(tmp_path / "broken", "auto", **LONG)
    broken.train()
    assert torch.equal(*(next(each.model.parameters()) for each in (whole, broken)))
    assert sum("incomplete" in each.getMessage() for each in caplog.records) == 1
