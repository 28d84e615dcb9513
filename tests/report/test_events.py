"""Records as they are read: of this version, of an older one, of a later one, and cut off."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from adaptive_batching._report.events import VERSION, RecordError, find_record, read_events, read_runs
from adaptive_batching._report.record import Report
from tests.support.runs import about, write_run


def test_a_record_begins_with_its_version_and_what_the_run_is(tmp_path: Path) -> None:
    report = Report(tmp_path, about=about(path=Path("data")))
    write_run(report)
    first = json.loads(report.path.read_text().splitlines()[0])
    assert first.pop("event") == "run" and first["version"] == VERSION and first["time"].endswith("+00:00")
    assert first["resumed"] is False and first["config"]["batch_size"] == 4
    assert first["config"]["path"] == "data", "a value that JSON does not know does not cost the record"
    assert read_events(report.path)["run"] == [first]
    write_run(Report(tmp_path, resume=True), range(2, 4))
    events = read_events(report.path)
    assert [run["resumed"] for run in events["run"]] == [False, True]
    assert len(events["end"]) == 1, "the first end was none"


def test_numbers_that_are_not_finite_are_written_as_json_and_read_as_they_were(tmp_path: Path) -> None:
    report = Report(tmp_path, about=about(rates=(1.0, math.inf)))
    write_run(report, range(0), ends=False)
    for step, loss in enumerate([math.nan, -math.inf], 1):
        report.step(0, step, 8, loss, 1e-3, recoveries=0)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for line in report.path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    losses = [step["loss"] for step in read_events(report.path)["step"]]
    assert math.isnan(losses[0]) and losses[1] == -math.inf
    assert read_events(report.path)["run"][0]["config"]["rates"] == [1.0, math.inf]
    page = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    assert f"`version` at {VERSION}." in page, "the page says another"


def test_a_record_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    path.write_text(json.dumps({"event": "run", "version": VERSION + 1}) + "\n")
    with pytest.raises(RecordError, match=f"version {VERSION + 1}, .* reads only up to version {VERSION}; install"):
        read_events(path)


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["a/adaptive_batching"], ["a"]),
        (["a/adaptive_batching", "b/adaptive_batching", "c"], ["a", "b", "c"]),
        (["x/run/adaptive_batching", "y/run/adaptive_batching"], ["x/run", "y/run"]),
        (["a/adaptive_batching", "a/adaptive_batching"], ["a (1)", "a (2)"]),
    ],
)
def test_runs_are_named_by_what_tells_them_apart(folders: list[str], names: list[str], tmp_path: Path) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "report.jsonl").touch()
    for record in (tmp_path / folder / "report.jsonl" for folder in folders):
        out = record.parent.parent if record.parent.name == "adaptive_batching" else record.parent
        assert {find_record(path) for path in (out, record.parent, record)} == {record}
    with pytest.raises(RecordError, match=r"there is no record of a run in .*; give the output_dir of a run"):
        find_record(tmp_path)
    found = [run.name for run in read_runs([tmp_path / folder for folder in folders])]
    assert [name.split(f"{tmp_path.name}/")[-1] for name in found] == names
