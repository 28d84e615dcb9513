"""The page of a run, or of several: one file of HTML that asks nothing of a network.

The curves are data in it, which uPlot draws; see ``assets/``. The page of a run that trains is made in a process of its
own, so that nothing about it can touch training.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import adaptive_batching._report.sections as sections
from adaptive_batching._report.events import RecordError, RunRecord, read_runs
from adaptive_batching._report.facts import describe, memory_limit, model, unrounded_maximum
from adaptive_batching._report.sections import GIB, MIB, Curves, Html, curves_of, each_run, some, tag

PAGE = "report.html"
MOST_POINTS = 1200
"""Points of a curve; of all runs together, at most three times as many."""

_ASSETS = Path(__file__).parent / "assets"
_ROOT = Path(__file__).parents[2]
# This very package, whatever else is installed; it imports no torch, which takes seconds, and memory.
_CODE = """
import sys
sys.path.insert(0, sys.argv[1])
import adaptive_batching
del sys.path[0]
from pathlib import Path
from adaptive_batching._report.page import write_page
print(write_page([Path(sys.argv[2])]))
"""


def start_page(directory: Path) -> subprocess.Popen[str]:
    """Start a process that writes the page of the record in ``directory``, and prints its path.

    It imports no torch, which takes 1.2 s and 220 MB rather than 0.05 s and 15 MB.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _CODE, str(_ROOT), str(directory)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,  # Ctrl-C, and a launcher that ends a rank, are not meant for it
    )  # fmt: skip


def stop_page(process: subprocess.Popen[str], directory: Path) -> None:
    """End a process that has not written the page of ``directory`` yet, and remove what there is of it."""
    process.kill()
    process.communicate()
    for partial in directory.glob(f".*.{process.pid}.partial"):
        partial.unlink(missing_ok=True)


def finish_page(process: subprocess.Popen[str], seconds: float) -> str:
    """Wait for a process, and return the path of the page; RuntimeError with its last line if it has failed."""
    try:
        said, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    if process.returncode:
        raise RuntimeError((errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    return said.strip()


def write_page(paths: list[Path], output: Path | None = None) -> Path:
    """Write the page of runs, in place of an older one, all at once, and return its path.

    ``paths`` are as for :func:`find_record`. Without ``output`` the page goes next to the record of the first run.
    """
    runs = read_runs(paths)
    for run in runs:
        if not any(run.events.values()):
            raise RecordError(f"{run.path} has no events that can be read")
    output = output or runs[0].path.with_name(PAGE)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")  # others may be writing one
    try:
        partial.write_text(_page_of(runs), encoding="utf-8", errors="replace")  # a message may hold what is no text
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return output


def _page_of(runs: list[RunRecord]) -> str:
    most = MOST_POINTS if len(runs) <= 3 else max(3 * MOST_POINTS // len(runs), 100)
    curves = [curves_of(run.events, most) for run in runs]
    parts = [
        ("summary", "", sections.summary(runs)),
        ("error", "Ended early", each_run(runs, sections.errors)),
        ("training", "Training, over the samples seen", sections.training(runs, curves)),
        ("decisions", "Decisions", each_run(runs, sections.decisions, "cards wide")),
        ("recoveries", "Steps that ran again", each_run(runs, sections.recoveries, "cards wide")),
        ("probe", "Probe", each_run(runs, sections.probe)),
        ("exploration", "Exploration of micro_batch_size", each_run(runs, sections.exploration)),
        ("config", "Config", each_run(runs, sections.config)),
    ]
    body = [
        tag("section", *some("h2", heading), *contents, id=anchor) for anchor, heading, contents in parts if contents
    ]
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    models = ", ".join(dict.fromkeys(filter(None, map(model, runs))))
    said = describe(runs[0]) if len(runs) == 1 else ""
    made_from = f"Made from {', '.join(str(run.path) for run in runs)}. To make it again: "
    again = f"adaptive-batching report {' '.join(str(run.path.parent) for run in runs)}"
    drawn = json.dumps(_data_of(runs, curves), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    filled = {
        "TITLE": tag("title", " · ".join(filter(None, [name, models, "adaptive batching"]))),
        "STYLE": tag("style", asset("uplot/uPlot.min.css"), asset("page.css")),
        "HEADER": tag("header", tag("h1", name), *some("p", said)),
        "BODY": "".join(body),
        "FOOTER": tag("footer", tag("p", made_from), tag("p", tag("code", again))),
        "DATA": tag("script", Html(drawn), type="application/json", id="data"),
        "SCRIPT": tag("script", asset("uplot/uPlot.iife.min.js")) + tag("script", asset("page.js")),
    }
    page, *marked = asset("page.html").split("<!-- @")
    for part in marked:
        place, after = part.split(" -->", 1)
        page += filled[place] + after
    return page


def _data_of(runs: list[RunRecord], curves: list[Curves]) -> dict[str, Any]:
    """Return what the charts of a page draw, in JSON's types."""
    return {
        "runs": [
            {
                "name": run.name,
                "columns": curve.columns,
                "epochs": curve.epochs,
                "recoveries": curve.recoveries,
                "limit": None if (limit := memory_limit(run)) is None else round(limit[0] / MIB, 1),
            }
            for run, curve in zip(runs, curves, strict=True)
        ],
        "charts": {
            name: {
                "title": title,
                "unit": unit,
                "lines": [{"column": column, "label": label} for column, label in sections.lines_of(name, curves)],
            }
            for name, (title, unit, _) in sections.CHARTS.items()
        },
        "probes": [_probe_data(run) for run in runs],
    }


def _probe_data(run: RunRecord) -> dict[str, Any] | None:
    probe = run.last("probe")
    if probe is None:
        return None
    name, unit = ("GiB", GIB) if probe["budget_bytes"] >= GIB else ("MiB", MIB)
    ran = [(trial["batch_size"], trial["peak_bytes"]) for trial in probe["measurements"]]
    return {
        "unit": name,
        "budget": round(probe["budget_bytes"] / unit, 3),
        "predicted": [[size, round(peak / unit, 3)] for size, peak in probe["predicted"]],
        "measured": [[size, round(peak / unit, 3)] for size, peak in ran if peak is not None],
        "failed": [size for size, peak in ran if peak is None],
        "chosen": probe["enough"] or probe["batch_size"],
        "exact": unrounded_maximum(probe),
    }


def asset(name: str) -> Html:
    return Html((_ASSETS / name).read_text(encoding="utf-8"))
