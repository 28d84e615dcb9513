"""The page of a run and the command that makes it: what it says is what the record holds, and it asks no network."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adaptive_batching.__main__ import main
from adaptive_batching._report import facts
from adaptive_batching._report import page as pages
from adaptive_batching._report.events import RunRecord, read_events
from adaptive_batching._report.page import write_page
from adaptive_batching._report.record import Report
from adaptive_batching._report.sections import MIB
from tests.conftest import ROOT, without_pages
from tests.support.html import UPLOT, Page, check_that_it_asks_for_nothing, read_page
from tests.support.runs import EXPLORED, PROBED, about, start_epoch, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a record that has all there is."""
    write_run(Report(tmp_path / "run", about=about()))
    return tmp_path / "run"


def page_of(*records: Path, output: Path | None = None) -> Page:
    return read_page(write_page(list(records), output))


def test_all_that_the_page_says_is_what_the_record_holds(run: Path) -> None:
    page, record = page_of(run), read_events(run / "report.jsonl")
    check_that_it_asks_for_nothing(page)
    check_decisions(page.tables["decisions"][0], record)
    check_curves(page.data["runs"][0], record)
    assert page.facts == {
        "Batch size": "4 → 16", "Largest that fits": "8", "Optimizer steps": "12", "Samples": "224", "Loss": "5.375",
        "Time": "10.0 s", "Tokens per second": "16,000", "Padding": "1.30", "Peak memory": "112 MiB",
        "Out of memory": "once",
    }  # fmt: skip
    assert "probe 1.5 s, steps 7.0 s, checkpoints 1.5 s" in page.words["summary"]
    assert "of 1.50 GiB, memory_limit" in page.words["summary"] and page.data["runs"][0]["limit"] == 1536
    assert page.tables["recoveries"][0][1:] == [["5", "1", "with 8 samples of up to 40 tokens", "160 tokens"]]
    assert "<title>run · lora_llama3_2_1b · adaptive batching</title>" in page.text
    assert "on Z80, 1 cores" in page.text and "torch 2.9, torchtune 0.6.1" in page.text
    assert json.loads(page.codes[0])["optimizer"]["_component_"] == "torch.optim.AdamW"
    assert "validation 45.000, least 9.000 after step 6" in page.words["summary"]
    assert [row[:3] for row in page.tables["probe"][-1][1:]] == [
        ["2", "0.0 MiB", "yes"], ["8", "0.0 MiB", "yes"], ["16", "out of memory", "no"],
    ]  # fmt: skip
    [drawn] = page.data["probes"]
    assert drawn["chosen"] == 8 and drawn["failed"] == [16]
    assert len(drawn["predicted"]) == len(record["probe"][0]["predicted"])
    assert "A step of 16 would take about 2.0 MiB" in page.words["probe"]
    [[_, *rows]] = page.tables["exploration"]
    assert [(row[0], row[2]) for row in rows] == [
        (str(each["candidate"]), f"{each['speedup']:.2f}") for each in EXPLORED
    ]
    assert "micro_batch_size 4 is the fastest" in page.words["exploration"]


def check_decisions(table: list[list[str]], record: dict[str, Any]) -> None:
    assert table[0] == [
        "epoch", "batch size", "global batch", "steps", "samples", "mean loss", "last rate", "padding", "s / step",
        "why",
    ]  # fmt: skip
    for row, epoch in zip(table[1:], record["epoch"], strict=True):
        steps = [step for step in record["step"] if step["epoch"] == epoch["epoch"]]
        samples = sum(step["samples"] for step in steps)
        loss = sum(step["loss"] * step["samples"] for step in steps) / samples
        assert row == [
            str(epoch["epoch"]), str(epoch["batch_size"]), str(epoch["global_batch_size"]), str(len(steps)),
            f"{samples}", f"{loss:.3f}", f"{steps[-1]['lr']:.3g}", "1.30", f"{steps[0]['seconds']:.3g}",
            epoch["reason"],
        ]  # fmt: skip


def check_curves(drawn: dict[str, Any], record: dict[str, Any]) -> None:
    columns, steps = drawn["columns"], record["step"]
    assert columns["step"] == [step["step"] for step in steps]
    assert columns["seen"] == [*itertools.accumulate(each["samples"] for each in steps)]
    for column, key, unit in (
        ("loss", "loss", 1), ("batch", "samples", 1), ("lr", "lr", 1), ("seconds", "seconds", 1),
        ("memory", "peak_bytes", MIB),
    ):  # fmt: skip
        assert columns[column] == pytest.approx([step[key] / unit for step in steps], rel=1e-5), column
    assert columns["padding"] == pytest.approx([1.3] * len(steps))
    assert columns["validation"] == [None, None, 18.0, None, None, 9.0, None, None, 18.0, None, None, 45.0]
    assert drawn["epochs"] == [32, 96] and drawn["recoveries"] == [48], "the first step of the second epoch"


def test_each_of_several_validation_sets_has_a_curve_and_values_of_its_own(tmp_path: Path) -> None:
    report = Report(tmp_path, about=about())
    write_run(report, range(1), all_there_is=False, ends=False)
    for step, dataset, loss in ((2, "held out", 3.0), (2, "code", 5.0), (4, "held out", 4.0), (4, "code", 2.0)):
        report.validation(0, step, loss, dataset)
    page = page_of(tmp_path)
    columns = page.data["runs"][0]["columns"]
    assert columns["validation on held out"] == [None, 3.0, None, 4.0]
    assert columns["validation on code"] == [None, 5.0, None, 2.0] and "validation" not in columns
    drawn = [line["column"] for line in page.data["charts"]["loss"]["lines"]]
    assert drawn == ["loss", "trend", "validation", "validation on held out", "validation on code"]
    said = "validation on held out 4.000, least 3.000 after step 2; validation on code 2.000, least 2.000 after step 4"
    assert said in page.words["summary"]
    table = [" ".join(line.split()) for line in report.table()]
    assert "validation loss on held out: last 4.0000 after step 4, least 3.0000 after step 2" in table
    assert "validation loss on code: last 2.0000 after step 4, least 2.0000 after step 4" in table


@pytest.mark.parametrize(("exact", "shown"), [(51, 51), (32, None), (None, None)])
def test_a_maximum_that_is_rounded_down_says_what_would_fit(
    exact: int | None, shown: int | None, tmp_path: Path
) -> None:
    (tmp_path / "report.jsonl").write_text(json.dumps({**PROBED, "exact": exact}) + "\n")
    page = page_of(tmp_path)
    assert page.data["probes"][0]["exact"] == shown
    rounded = "about 51 fit, rounded down to 32 (round_to_power_of_two)"
    assert (rounded in page.words["probe"].lower()) == (rounded in page.words["summary"]) == (shown is not None)


@pytest.mark.parametrize(
    ("settings", "device", "total", "limit"),
    [
        ({"memory_limit": "1.5GiB"}, "cpu", None, 1610612736), ({"memory_limit": "50%"}, "cpu", 2000, 1000),
        ({"memory_limit": "50%"}, "cpu", None, None), ({"memory_limit": "${x}"}, "cpu", 2000, None),
        (None, "cpu", 2000, None), (None, "NVIDIA H100", 2000, 2000),
    ],
)  # fmt: skip
def test_a_peak_is_compared_with_what_the_whole_run_may_take(
    settings: Any, device: str, total: int | None, limit: int | None
) -> None:
    events: Any = {"run": [{"device": device, "config": {"adaptive_batching": settings}}], "probe": []}
    events["probe"] += [{"total_bytes": total}] * (total is not None)
    found = facts.memory_limit(RunRecord(0, "run", Path(), events))
    assert (found and found[0]) == limit


@pytest.mark.parametrize(
    ("ran", "said"),
    [
        ([(8, 1.0), (16, 1.93)], "a step 1.93 times as long here (the probe's steps: 1.0 s at 8, 1.9 s at 16): growing "
         "it costs more than it saves"),
        ([(8, 1.0), (16, None), (4, 1.0), (32, 27.0)], "3.00 times"),  # three doublings; what failed does not count
        ([(8, 1.0), (16, 1.5)], "costs more than it saves"),
        ([(8, 1.0), (16, 1.4)], "1.40 times as long here (the probe's steps: 1.0 s at 8, 1.4 s at 16): whether"),
        ([(8, 1.0), (16, 1.25)], "growing it can save time"),
        ([(8, 1.0), (15, 1.9)], None),  # not twice as large
        ([(8, 1.0)], None),
        ([(8, None)], None),
    ],
)  # fmt: skip
def test_what_doubling_costs_is_told_by_the_steps_of_the_probe(
    ran: list[tuple[int, float | None]], said: str | None
) -> None:
    measurements = [{"batch_size": n, "seconds": t or 9.0, "peak_bytes": None if t is None else 1} for n, t in ran]
    told = facts.cost_of_growth({"measurements": measurements})
    assert said in told if said else told == ""


def test_the_page_of_a_run_that_was_killed_says_so(run: Path) -> None:
    record = run / "report.jsonl"
    record.write_bytes(record.read_bytes()[:-900])
    page = page_of(run)
    assert "the record ends here: the run is still going, or was killed; about 12 planned" in page.words["summary"]
    assert page.facts["Optimizer steps"] == str(len(read_events(record)["step"])) != "12"


def test_several_runs_lie_side_by_side(run: Path, tmp_path: Path) -> None:
    other = Report(tmp_path / "other", about=about(batch_size=5, output_dir="outputs/other"))
    write_run(other, range(2), all_there_is=False)
    page = page_of(run, tmp_path / "other", output=tmp_path / "both.html")
    [facts] = page.tables["summary"]
    assert facts[0] == ["", "run", "other", "difference"]
    assert [row[3] for row in facts if row[0] in ("Samples", "Padding", "Loss")] == ["-57.1 %", "+18.6 %", ""]
    sizes = next(row for row in facts if row[0] == "Batch size")
    assert [cell.split("samples")[0] for cell in sizes[1:3]] == ["4 → 16", "4 → 8"]
    assert [len(each["columns"]["step"]) for each in page.data["runs"]] == [12, 8]
    assert len(page.tables["decisions"]) == 2 and page.data["probes"][1] is None


def test_what_a_record_says_is_no_html_and_a_loss_that_is_no_number_is_shown_as_such(tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script><b onclick=x>"
    report = Report(tmp_path / bad.replace("/", "-"), about=about(batch_size=bad))
    start_epoch(report, 0, 4, steps=3)
    for step, loss in enumerate([2.0, math.nan, math.inf], 1):
        report.step(0, step, 4, loss, 0.1)
    report.change(epoch=0.5, step=12, batch_size=32, global_batch_size=64, reason=bad)
    page = page_of(report.path)
    assert page.tables["decisions"][0][-1][-1] == bad and page.tables["decisions"][0][1][5] == "nan"
    assert len(page.scripts) == 2 and not any(name == "onclick" for _, name, _ in page.attributes)
    assert page.data["runs"][0]["columns"]["loss"] == [2.0, None, None]


def test_a_long_run_is_drawn_in_few_points_that_keep_its_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(tmp_path)
    with without_pages():  # another process would make one of more points meanwhile
        write_run(report, range(3), steps=50)
    monkeypatch.setattr(pages, "MOST_POINTS", 40)
    page = page_of(tmp_path)
    [drawn], steps = page.data["runs"], read_events(report.path)["step"]
    columns: dict[str, Any] = drawn["columns"]
    assert len(columns["loss"]) == 38 and "the mean of up to 4 steps" in page.words["training"]
    assert columns["loss"][0] == pytest.approx(sum(each["loss"] for each in steps[:4]) / 4, rel=1e-5)
    assert columns["seen"][-1] == sum(step["samples"] for step in steps)
    assert columns["memory"][-1] == pytest.approx(max(step["peak_bytes"] for step in steps[-2:]) / MIB, rel=1e-5)
    assert columns["trend"][0] is None and columns["trend"][-1] is not None


def test_what_makes_the_page_loads_nothing_large(run: Path) -> None:
    """So that it takes a fifth of a second, and little memory, while training goes on."""
    code = pages._CODE + "\nlarge = {'torch', 'numpy', 'torchtune', 'matplotlib'} & set(sys.modules)\nassert not large"
    done = subprocess.run([sys.executable, "-I", "-c", code, str(ROOT), str(run)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{run / 'report.html'}\n"), done.stderr


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["adaptive-batching", "report", *map(str, arguments)])
    main()


def test_the_command_writes_a_page_next_to_the_record_or_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (tmp_path / name for name in "ab")
    for folder in (a, b):
        write_run(Report(folder / "adaptive_batching", about=about()), ends=False)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    for arguments in ([a], [a, b], [a, b, "--output", tmp_path / "x.html"]):
        command(monkeypatch, *arguments)
    written = [a / "adaptive_batching" / "report.html", Path("report.html"), tmp_path / "x.html"]
    assert capsys.readouterr().out.splitlines() == [str(path) for path in written]
    assert all("<title>" in path.read_text() for path in written)
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("opens", [True, False])
def test_the_command_takes_the_newest_run_and_opens_its_page(
    opens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def open_page(url: str) -> bool:
        opened.append(url)
        return opens

    monkeypatch.setattr("webbrowser.open", open_page)
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("old", "new", "older")):
        write_run(Report(tmp_path / name / "adaptive_batching"), range(1), ends=False)
        os.utime(tmp_path / name / "adaptive_batching" / "report.jsonl", (2e9 - abs(age - 1), 2e9 - abs(age - 1)))
    page = tmp_path / "new" / "adaptive_batching" / "report.html"
    with contextlib.nullcontext() if opens else pytest.raises(SystemExit, match="found no browser"):
        command(monkeypatch, "--open")
    assert opened == [page.as_uri()] and page.is_file()
    said = f"error: --open found no browser; open {page.relative_to(tmp_path)} yourself\n"
    assert capsys.readouterr().err == ("" if opens else said)


def test_the_library_is_the_one_that_its_note_says() -> None:
    note = (UPLOT / "README.md").read_text()
    [version] = re.findall(r"uPlot (\d+\.\d+\.\d+)", note)
    assert f"v{version})" in (UPLOT / "uPlot.iife.min.js").read_text()[:200]
    assert "MIT License" in (UPLOT / "LICENSE").read_text()
