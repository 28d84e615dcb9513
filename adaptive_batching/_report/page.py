"""The page of a run, or of several: one file of HTML that asks nothing of a network.

Its words and tables stand in the HTML. The curves are data in it, which uPlot draws; see ``assets/``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import adaptive_batching._report.sections as sections
from adaptive_batching._report.curves import MIB, Curves, curves_of
from adaptive_batching._report.events import RecordError, Run, read_runs
from adaptive_batching._report.markup import Html, tag, text
from adaptive_batching._report.text import where

PAGE = "report.html"
MOST_POINTS = 1200
"""Points of a curve; of all runs together, at most three times as many."""

_ASSETS = Path(__file__).parent / "assets"
_GIB = 2**30


def write_page(paths: list[Path], output: Path | None = None) -> Path:
    """Write the page of runs, in place of an older one, all at once, and return its path.

    ``paths`` are as for :func:`find_record`. Without ``output`` the page goes next to the record, of a single run.
    RecordError if a record cannot be read, or holds nothing.
    """
    runs = read_runs(paths)
    for run in runs:
        if not any(run.events.values()):
            raise RecordError(f"{run.path} holds no event that can be read")
    output = output or runs[0].path.with_name(PAGE)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")  # others may be writing one
    try:
        partial.write_text(page_of(runs), encoding="utf-8", errors="replace")  # a message may hold what is no text
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return output


def page_of(runs: list[Run]) -> str:
    most = MOST_POINTS if len(runs) <= 3 else max(3 * MOST_POINTS // len(runs), 100)
    curves = [curves_of(run.events, most) for run in runs]
    parts = [
        ("summary", "", sections.summary(runs)),
        ("error", "Ended early", sections.errors(runs)),
        ("training", "Training, over the samples seen", sections.training(runs, curves)),
        ("decisions", "Decisions", sections.decisions(runs)),
        ("probe", "Probe", sections.probes(runs)),
        ("exploration", "Exploration of micro_batch_size", sections.explorations(runs)),
        ("config", "Config to paste", sections.configs(runs)),
    ]
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = "".join(
        tag("section", text("h2", heading) if heading else "", content, id=anchor)
        for anchor, heading, content in parts
        if content is not None
    )
    drawn = json.dumps(data_of(runs, curves), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    filled = {
        "TITLE": text("title", f"{name} · adaptive batching"),
        "STYLE": tag("style", _asset("uplot/uPlot.min.css"), _asset("page.css")),
        "HEADER": _header(name, runs),
        "BODY": body,
        "FOOTER": _footer(runs),
        "DATA": tag("script", drawn, type="application/json", id="data"),
        "SCRIPT": tag("script", _asset("uplot/uPlot.iife.min.js")) + tag("script", _asset("page.js")),
    }
    page = _asset("page.html")
    before, *marked = page.split("<!-- @")
    for part in marked:
        name, after = part.split(" -->", 1)
        before += filled[name] + after
    return before


def data_of(runs: list[Run], curves: list[Curves]) -> dict[str, Any]:
    """Return what the charts of a page draw, in JSON's types."""
    return {
        "runs": [
            {"name": run.name, "columns": each.columns, "epochs": each.epochs, "recoveries": each.recoveries}
            for run, each in zip(runs, curves, strict=True)
        ],
        "charts": {
            name: {"unit": unit, "lines": [{"column": column, "label": label} for column, label in lines]}
            for name, (_, unit, lines) in sections.CHARTS.items()
        },
        "probes": [_probe_data(run) for run in runs],
    }


def _probe_data(run: Run) -> dict[str, Any] | None:
    probe = run.last("probe")
    if probe is None:
        return None
    name, unit = ("GiB", _GIB) if probe["budget_bytes"] >= 10 * _GIB else ("MiB", MIB)
    ran = [(each["batch_size"], each["peak_bytes"]) for each in probe["measurements"]]
    return {
        "unit": name,
        "budget": round(probe["budget_bytes"] / unit, 3),
        "predicted": [[size, round(peak / unit, 3)] for size, peak in probe["predicted"]],
        "measured": [[size, round(peak / unit, 3)] for size, peak in ran if peak is not None],
        "failed": [size for size, peak in ran if peak is None],
        "chosen": probe.get("enough") or probe["batch_size"],
    }


def _header(name: str, runs: list[Run]) -> Html:
    said = where(runs[0]) if len(runs) == 1 else ""
    return tag("header", text("h1", name), text("p", said) if said else "")


def _footer(runs: list[Run]) -> Html:
    records = ", ".join(str(run.path) for run in runs)
    again = " ".join(str(run.path.parent) for run in runs)
    return tag(
        "footer",
        text("p", f"Made from {records}. To make it again: "),
        tag("p", text("code", f"adaptive-batching report {again}")),
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
