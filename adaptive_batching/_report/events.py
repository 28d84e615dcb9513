"""The record of a run as it lies on disk: a line of JSON for each event. ``docs/report.md`` has the schema.

Standard library only, so that a page is made in a process that loads nothing large.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = 2
"""Version of the record. Version 1 had no ``run``, no ``end``, and nothing in a ``step`` on what it took."""

KINDS = (
    "run", "maximum", "probe", "rollout", "exploration", "plan", "resume",
    "epoch", "change", "step", "validation", "noise", "error", "end",
)  # fmt: skip
_OF_STEPS = ("epoch", "change", "step", "validation", "noise")
_LAST = ("error", "end")
RECORD = "report.jsonl"
FOLDER = "adaptive_batching"
"""Folder of the record within the output directory of a run, unless ``report_dir`` names another."""

Event = dict[str, Any]
Events = dict[str, list[Event]]


class RecordError(ValueError):
    """A record that is not there, or that this version cannot read."""


@dataclass(frozen=True)
class Run:
    """A record that has been read."""

    name: str
    path: Path
    events: Events = field(repr=False)
    """By kind, in order; see :func:`read_events`."""

    def last(self, kind: str) -> Event | None:
        return self.events[kind][-1] if self.events[kind] else None


def find_record(path: Path) -> Path:
    """Return the record of a run, given its output directory, the record's folder or the record; else RecordError."""
    tried = [path, path / RECORD, path / FOLDER / RECORD]
    for found in tried:
        if found.is_file():
            return found
    raise RecordError(
        f"there is no record of a run in {path} (neither {tried[1]} nor {tried[2]}); give the output_dir of a run, or "
        f"its adaptive_batching.report_dir"
    )


def read_runs(paths: list[Path]) -> list[Run]:
    """Read the records of runs, each under a name that tells it from the others."""
    records = [find_record(path) for path in paths]
    return [Run(name, path, read_events(path)) for name, path in zip(_names(records), records, strict=True)]


def _names(records: list[Path]) -> list[str]:
    """Return as many of the last folders of each path as it takes to tell them apart."""
    folders = []
    for path in records:
        parts = path.resolve().parent.parts
        folders.append(parts[:-1] if parts[-1] == FOLDER and len(parts) > 2 else parts)
    for depth in range(1, max(map(len, folders)) + 1):
        names = ["/".join(parts[-depth:]) for parts in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]  # a record that is named twice


def read_events(path: Path) -> Events:
    """Return the events of a record by kind. Of what ran twice, as after a resume, the last run counts.

    Lines that cannot be read, because a full disk or a killed process cut them off, are skipped, and so are events of
    a kind that is not known. RecordError if a later version wrote it.
    """
    events: Events = {kind: [] for kind in KINDS}
    for kind, values in lines_that_count(path):
        if kind == "run" and values.get("version", VERSION) > VERSION:
            raise RecordError(
                f"{path} is a record of version {values['version']}, and this adaptive-batching reads up to version "
                f"{VERSION}; install the one that wrote it, or a later one"
            )
        events[kind].append(values)
    return events


def lines_that_count(path: Path) -> list[tuple[str, Event]]:
    """Return (kind, values) of each event, in order, without what ran again and ends that a resume has followed."""
    events: list[tuple[str, Event]] = []
    for kind, values in lines(path):
        if kind in ("run", "epoch", "resume"):
            events = [(k, v) for k, v in events if k not in _LAST]
        if kind in ("epoch", "resume"):
            events = [(k, v) for k, v in events if k not in _OF_STEPS or _came_before(values, v)]
        events.append((kind, values))
    return events


def _came_before(start: Event, event: Event) -> bool:
    """Return True if ``event`` came before an epoch, or what is resumed, with the event ``start``."""
    if "epoch" in start and "epoch" in event:
        return bool(event["epoch"] < start["epoch"])
    return bool(event["step"] <= start["step"])


def lines(path: Path) -> Iterator[tuple[str, Event]]:
    """Yield (kind, values) of each event that can be read."""
    if not path.exists():
        return
    with path.open(errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and event.get("event") in KINDS:
                    yield event.pop("event"), event


def written(kind: str, values: Mapping[str, Any]) -> str:
    return json.dumps({"event": kind, **values}, default=str) + "\n"
