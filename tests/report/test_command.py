"""``adaptive-batching report``, in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from adaptive_batching._cli.main import main
from adaptive_batching._report.record import Report
from tests.support.runs import about, write_run


def report(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["adaptive-batching", "report", *map(str, arguments)])
    main()


def test_it_writes_a_page_next_to_the_record_or_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        write_run(Report(tmp_path / name / "adaptive_batching", about=about()), ends=False)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    report(monkeypatch, tmp_path / "a")
    report(monkeypatch, tmp_path / "a", tmp_path / "b")
    report(monkeypatch, tmp_path / "a", tmp_path / "b", "--output", tmp_path / "x.html")
    written = [tmp_path / "a" / "adaptive_batching" / "report.html", Path("report.html"), tmp_path / "x.html"]
    assert capsys.readouterr().out.splitlines() == [str(path) for path in written]
    assert all("<title>" in path.read_text() for path in written)
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    ("content", "output", "message"),
    [
        (None, "x.html", "there is no record of a run in "),
        (
            '{"event": "run", "version": 99}\n',
            "x.html",
            "is a record of version 99, and this adaptive-batching reads up",
        ),
        ("", "x.html", "holds no event that can be read"),
        (
            '{"event": "end", "time": "2026-01-01T00:00:00+00:00"}\n',
            "/nowhere/x.html",
            "name another file with --output",
        ),
    ],
)
def test_a_mistake_is_one_line(
    content: str | None, output: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "report.jsonl").write_text(content)
    with pytest.raises(SystemExit) as end:
        report(monkeypatch, tmp_path, "--output", output)
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
