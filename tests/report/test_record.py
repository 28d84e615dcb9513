from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaptive_batching._growth.batch_size_schedule import PlannedEpoch
from adaptive_batching._report.events import read_events
from adaptive_batching._report.page import finish_page
from adaptive_batching._report.record import Report
from adaptive_batching._values import ConfigError
from tests.support import runs
from tests.support.examples import RESULT
from tests.support.html import read_page
from tests.support.runs import start_epoch

MEAN_LOSSES = ("7.625", "7.125")  # of the first two epochs


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path)


def write_run(report: Report, epochs: range) -> None:
    runs.write_run(report, epochs, steps=2, all_there_is=False, ends=False)


def kinds(report: Report) -> list[str]:
    return [json.loads(line)["event"] for line in report.path.read_text().splitlines()]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_the_table_says_what_was_decided_and_why(report: Report) -> None:
    report.maximum(16, "max_batch_size=16")
    assert report.table()[-1].endswith("report.jsonl"), "a run that had nothing to do has a table"
    report.probe(RESULT, sequence_length=64, waited=1.5)
    write_run(report, range(2))
    report.change(epoch=1.5, step=4, batch_size=8, global_batch_size=8, reason="added")
    report.step(1, 5, 4, 4.5, 0.1)
    table = "\n".join(report.table())
    for words in (
        "8, bound by memory", "3 training steps, 1 out of memory",
        "64 tokens per sample; 16 would take about 2.0 MiB", *MEAN_LOSSES, str(report.path),
    ):  # fmt: skip
        assert words in table
    assert ["1.5", "8", "1", "4", "4.500", "1.00e-01", "added"] in [line.split() for line in report.table()]
    assert kinds(report) == ["run", "maximum", "probe", *["epoch", "step", "step"] * 2, "change", "step"]


@pytest.mark.parametrize("has_record", [True, False])
def test_a_run_that_goes_on_within_an_epoch_has_a_line_of_its_own_where_its_size_is_another(
    has_record: bool, tmp_path: Path
) -> None:
    if has_record:
        write_run(Report(tmp_path), range(1))
    for size, lines in ((4, []), (6, [6])) if has_record else ((4, [4]), (4, [4])):
        resumed = Report(tmp_path, resume=True)
        resumed.resume(1, epoch=0.5, batch_size=size, global_batch_size=2 * size)
        resumed.step(0, 2, size, 4.0, 0.1)
        assert [change["batch_size"] for change in read_events(tmp_path / "report.jsonl")["change"]] == lines
    [line] = [row.split()[:4] for row in resumed.table() if "with this size" in row]
    assert line == ["0.5", str(size), "1", str(size)]


def test_the_losses_of_validations_are_told_once_where_an_epoch_ran_twice(report: Report) -> None:
    for epoch, loss in enumerate((4.0, 3.0, 3.5)):
        write_run(report, range(epoch, epoch + 1))
        report.validation(epoch, 2 * epoch + 2, loss)
    assert "last 3.5000 after step 6, least 3.0000 after step 4" in "\n".join(report.table())
    resumed = Report(report.directory, resume=True)
    write_run(resumed, range(1, 2))
    assert "last 4.0000 after step 2, least 4.0000 after step 2" in "\n".join(resumed.table())
    assert [event["step"] for event in read_events(report.path)["validation"]] == [2]


def test_the_plan_is_logged_as_a_table(report: Report, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    epochs = [PlannedEpoch(0, [4], [8], 10, 80, 3, 1e-3), PlannedEpoch(1, [4, 8, 16], [8, 16, 32], 5, 80, 3, 0.0)]
    report.plan(epochs, decided=True)
    [message] = [record.getMessage() for record in caplog.records]
    assert "15 optimizer steps" in message
    assert ["1", "4-16", "8-32", "5", "80", "3", "0"] in [line.split() for line in message.splitlines()]


def test_a_resumed_run_replaces_the_epochs_that_it_runs_again_and_a_new_one_the_record(tmp_path: Path) -> None:
    write_run(Report(tmp_path), range(3))
    write_run(Report(tmp_path, resume=True), range(1, 4))
    resumed = Report(tmp_path, resume=True)
    write_run(resumed, range(3, 4))
    events = read_events(tmp_path / "report.jsonl")
    assert [e["epoch"] for e in events["epoch"]] == [0, 1, 2, 3] and len(events["step"]) == 8
    whole = Report(tmp_path / "whole")
    write_run(whole, range(4))
    assert resumed.table()[:-1] == whole.table()[:-1], "the table is that of the uninterrupted run"
    new = Report(tmp_path)
    assert len(read_events(new.path)["epoch"]) == 4, "a run that does not begin takes nothing"
    write_run(new, range(1))
    assert len(read_events(new.path)["epoch"]) == 1


@pytest.mark.parametrize("cut_off", ['{"event": "step", "epoch": 0, "st', "\x00\x00", "[]", '{"event": "other"}'])
def test_lines_that_were_cut_off_are_passed_over_and_stay_alone(cut_off: str, tmp_path: Path) -> None:
    write_run(Report(tmp_path), range(1))
    with (tmp_path / "report.jsonl").open("a") as file:
        file.write(cut_off)
    report = Report(tmp_path, resume=True)
    write_run(report, range(1, 2))
    assert [e["epoch"] for e in read_events(report.path)["epoch"]] == [0, 1]


@pytest.mark.parametrize("directory", ["/proc/nowhere", "/dev/null/report"])
def test_a_directory_that_cannot_be_written_is_an_error_before_training(directory: str) -> None:
    with pytest.raises(ConfigError, match=f"adaptive_batching.report_dir='{directory}' cannot be written .*; set it"):
        Report(Path(directory))
    Report(Path(directory), rank=1, ranks=2)


def test_a_full_disk_is_one_warning_and_the_summary_still_comes(
    report: Report, caplog: pytest.LogCaptureFixture
) -> None:
    report.path.symlink_to("/dev/full")
    caplog.set_level("INFO")
    write_run(report, range(2))
    report.finish()
    [warning] = warnings(caplog)
    assert "No space left on device" in warning and all(loss in caplog.text for loss in MEAN_LOSSES)
    report.path.unlink()
    write_run(report, range(2, 3))
    assert len(read_events(report.path)["step"]) == 2, "it goes on when there is room again"


def test_a_page_that_cannot_be_made_is_one_warning(
    report: Report, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    page = report.directory / "report.html"
    page.mkdir()
    write_run(report, range(1))
    report.finish()
    with monkeypatch.context() as without:
        without.setattr("sys.executable", "/nowhere/python")
        report.finish()
        other = Report(report.directory / "other")
        write_run(other, range(3))
        other.finish()
    page.rmdir()
    report.finish()
    here, without_python = warnings(caplog)
    assert "what was decided, and why" in caplog.text
    assert "the page of this run could not be made (IsADirectoryError" in here
    assert f"'adaptive-batching report {report.directory}' makes it" in here
    assert "the page of this run could not be made ([Errno 2] No such file" in without_python
    assert len(read_events(other.path)["step"]) == 6
    assert f"the page of this run: {page}" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("sample 7 is <b>bad</b> \ud800")], ids=repr)
def test_an_error_that_ends_a_run_is_on_its_page_and_goes_on_as_it_was(error: BaseException, tmp_path: Path) -> None:
    report = Report(tmp_path, about=runs.about())
    with pytest.raises(type(error)) as raised, report.showing_errors():
        write_run(report, range(2))
        raise error
    assert raised.value is error and error.__cause__ is error.__context__ is None
    [event] = read_events(report.path)["error"]
    assert set(event) == {"time", "type", "message", "rank"}
    assert (event["type"], event["message"]) == (type(error).__name__, str(error))
    words = read_page(tmp_path / "report.html").words
    assert "ended early, 20" in words["summary"]
    assert f"{event['type']}, 20" in words["error"] and "after 4 optimizer steps." in words["error"]
    assert str(error).replace("\ud800", "?") in words["error"]
    resumed = Report(tmp_path, resume=True)
    write_run(resumed, range(2, 3))
    resumed.finish()
    page = read_page(tmp_path / "report.html")
    assert "error" not in page.words and "ended 20" in page.words["summary"]


def test_the_page_shows_each_epoch_once_it_is_over(report: Report, tmp_path: Path) -> None:
    write_run(report, range(1))
    assert report._page is None, "nothing has been trained when the first epoch begins"
    start_epoch(report, 1, 8, steps=2)
    assert report._page is not None
    assert finish_page(report._page, seconds=60) == str(tmp_path / "report.html")
    assert len(read_page(tmp_path / "report.html").data["runs"][0]["columns"]["step"]) == 2
