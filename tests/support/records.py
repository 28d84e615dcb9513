"""Records of runs, read back."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.conftest import ROOT, Run

DOCS = ROOT / "docs"


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    """The events of one kind in a run's record, in order."""
    lines = (run.output_dir / "adaptive_batching" / "report.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def without_sizes(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """Metrics as stock logs them."""
    ours = ("batch_size", "global_batch_size", "ppo_batch_size", "oom_retries")
    return [{k: v for k, v in step.items() if k not in ours} for step in metrics]


def documented(text: str) -> dict[str, set[str]]:
    """The names in the last column of each row of a table, by the name in its first."""
    rows = re.findall(r"^\| `(\w+)` \|(?:.*\|)?([^|]*)\|$", text, flags=re.MULTILINE)
    return {kind: set(re.findall(r"`(\w+)`", fields)) for kind, fields in rows}


def metrics_of_the_page() -> set[str]:
    """The names of the metrics that a run logs besides those of stock."""
    return set(re.findall(r"`(\w+)`", (DOCS / "report.md").read_text().split("## Metrics")[1])) - {"metric_logger"}


def check_the_schema(record: dict[str, Any]) -> None:
    """Each field of a record stands in the page on it, and no other."""
    fields_of = documented((DOCS / "reference.md").read_text().split("## The record")[1].split("\n## ")[0])
    assert set(fields_of) == set(record)
    for kind, found in record.items():
        if found:  # of those that this run has
            values = [each for event in found for each in event.values() if isinstance(each, list)]
            inner = {key for each in values for value in each if isinstance(value, dict) for key in value}
            assert {key for event in found for key in event} | inner == fields_of[kind], kind
