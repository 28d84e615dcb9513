"""Events of a run: as watchers get them, and as a record has them (``docs/reference.md``), a line of JSON each.

Standard library only, so that a page is made in a process that loads nothing large.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptive_batching._values import AdaptiveBatchingError

VERSION = 2
"""Version of the record. Version 1 wrote ``NaN`` and ``Infinity`` as Python does, which is no JSON."""

EVENT_KINDS = (
    "run", "maximum", "probe", "rollout", "exploration", "plan", "resume",
    "epoch", "change", "step", "recovery", "validation", "took", "error", "end",
)  # fmt: skip
_OF_STEPS = ("epoch", "change", "step", "recovery", "validation", "took")
_LAST = ("error", "end")
RECORD = "report.jsonl"
FOLDER = "adaptive_batching"
"""Folder of the record within the output directory of a run, unless ``report_dir`` names another."""

Event = dict[str, Any]
Events = dict[str, list[Event]]


@dataclass(frozen=True)
class StepCost:
    """The cost of an optimizer step on this rank.

    Attributes:
        seconds: From the end of the step before, so that waiting for data counts.
        forwards: Micro-batches; those of a step that ran again count once.
        tokens: Tokens of its samples; None where samples hold more than text.
        padded_tokens: Tokens that were computed, padding included; None where ``tokens`` is.
        peak_bytes: Most memory that counted against a limit at once; None on a device that does not report it.
        slowest: Predicted time of the slowest rank over the mean of all; None if ranks were not balanced.
        slowest_unbalanced: Its time over the same mean, had each rank computed its own samples.
        moved: Samples that were sent to another rank.
    """

    seconds: float
    forwards: int
    tokens: int | None
    padded_tokens: int | None
    peak_bytes: int | None
    slowest: float | None = None
    slowest_unbalanced: float | None = None
    moved: int | None = None


class Watcher:
    """Is notified of what happens, and changes nothing in training. Subclasses override what they want to know."""

    def epoch(self, **values: Any) -> None:
        """Take note of the batch size that an epoch starts with."""

    def change(self, **values: Any) -> None:
        """Take note of another batch size for the rest of an epoch."""

    def cost(self, cost: StepCost) -> None:
        """Take note of the cost of the step that :meth:`step` gets next."""

    def step(self, epoch: int, step: int, samples: int, loss: float, lr: float, recoveries: int = 0) -> None:
        """Take note of an optimizer step on ``samples`` samples, and of how many have had to run again so far."""

    def validation(self, epoch: int, step: int, loss: float, dataset: str | None = None) -> None:
        """Take note of the loss on the data that are held out, after step ``step``; of several sets, on ``dataset``."""

    def recovery(self, epoch: int, step: int, failed: str, max_tokens: int | None) -> None:
        """Take note of what ran out of memory in ``step``, and of the new limit on a forward; None if there is none."""

    def took(self, what: str, epoch: int, step: int, seconds: float) -> None:
        """Take note of the time that a ``validation`` or a ``checkpoint`` took."""


class RecordError(AdaptiveBatchingError, ValueError):
    """A record that is not there, or that this version cannot read."""


@dataclass(frozen=True)
class RunRecord:
    """A record that has been read, one of those that a page shows."""

    number: int
    name: str
    path: Path
    events: Events

    def last(self, kind: str) -> Event | None:
        return self.events[kind][-1] if self.events[kind] else None


@dataclass
class DecisionTotals:
    """A decision on the batch size, and sums over the optimizer steps until the next."""

    epoch: float
    batch_size: int
    reason: str
    global_batch_size: int = 0
    steps: int = 0
    samples: int = 0
    loss: float = 0.0  # summed over samples
    last_lr: float = 0.0
    # Of the steps whose cost is known:
    timed_samples: int = 0
    seconds: float = 0.0
    tokens: int = 0
    padded_tokens: int = 0
    # Of the steps whose ranks were balanced, summed over their samples:
    shared_samples: int = 0
    slowest: float = 0.0
    slowest_unbalanced: float = 0.0
    moved: int = 0

    @classmethod
    def of_decision(cls, decision: Mapping[str, Any]) -> DecisionTotals:
        """Return the totals of an ``epoch`` or a ``change``, without steps."""
        return cls(decision["epoch"], decision["batch_size"], decision["reason"], decision["global_batch_size"])

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.samples, 1)

    def add(self, step: Mapping[str, Any]) -> None:
        self.steps += 1
        self.samples += step["samples"]
        self.loss += step["loss"] * step["samples"]
        self.last_lr = step["lr"]
        if step.get("seconds") is not None:
            self.timed_samples += step["samples"]
            self.seconds += step["seconds"]
        if step.get("padded_tokens") is not None:
            self.tokens += step["tokens"]
            self.padded_tokens += step["padded_tokens"]
        if step.get("slowest") is not None:
            self.shared_samples += step["samples"]
            self.slowest += step["slowest"] * step["samples"]
            self.slowest_unbalanced += step["slowest_unbalanced"] * step["samples"]
            self.moved += step["moved"]


def balance_of(totals: Sequence[DecisionTotals]) -> str:
    """Return how even the work of ranks was, in words; empty if it was not balanced."""
    samples = sum(each.shared_samples for each in totals)
    if not samples:
        return ""
    slowest, unbalanced = (
        sum(getattr(each, name) for each in totals) / samples for name in ("slowest", "slowest_unbalanced")
    )
    moved = sum(each.moved for each in totals) / samples
    return (
        f"the slowest has {slowest:.2f} times the mean work, and {unbalanced:.2f} times without balancing; "
        f"{100 * moved:.0f} % of the samples moved"
    )


def totals_of_decisions(events: Events) -> list[DecisionTotals]:
    decisions = sorted(
        [*events["epoch"], *events["change"]], key=lambda decision: (decision["step"], decision["epoch"])
    )
    totals = [DecisionTotals.of_decision(decision) for decision in decisions]
    starts = [decision["step"] for decision in decisions]
    for step in events["step"]:
        index = bisect.bisect_left(starts, step["step"]) - 1  # the last decision before the step
        if index >= 0:
            totals[index].add(step)
    return totals


def by_dataset(validations: Iterable[Event]) -> dict[str, list[Event]]:
    """Return the validations on each set of data, by `` on name``; the name is empty if there is only one set."""
    by_name: dict[str, list[Event]] = {}
    for validation in validations:
        by_name.setdefault(f" on {validation['dataset']}" if validation.get("dataset") else "", []).append(validation)
    return by_name


def find_record(path: Path) -> Path:
    """Return the record of a run, given its output directory, the record's folder or the record."""
    tried = [path, path / RECORD, path / FOLDER / RECORD]
    for record in tried:
        if record.is_file():
            return record
    raise RecordError(
        f"there is no record of a run in {path} (neither {tried[1]} nor {tried[2]}); give the output_dir of a run, or "
        f"its adaptive_batching.report_dir"
    )


def newest_record(folder: Path) -> Path:
    """Return the record below ``folder`` that was written to last."""
    records = folder.rglob(RECORD)
    newest = max(records, key=lambda record: record.stat().st_mtime, default=None)
    if newest is None:
        raise RecordError(f"there is no record of a run below {folder.resolve()}; give the output_dir of a run")
    return newest


def read_runs(paths: list[Path]) -> list[RunRecord]:
    """Read the records of runs, each under as many of its last folders as it takes to tell it from the others."""
    records, folders = [find_record(path) for path in paths], []
    for path in records:
        parts = path.resolve().parent.parts
        folders.append(parts[:-1] if parts[-1] == FOLDER and len(parts) > 2 else parts)
    for depth in range(1, max(map(len, folders)) + 1):
        names = ["/".join(parts[-depth:]) for parts in folders]
        if len(set(names)) == len(names):
            break
    else:  # a record that is named twice
        names = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    return [RunRecord(number, names[number], path, read_events(path)) for number, path in enumerate(records)]


def read_events(path: Path) -> Events:
    """Return the events of a record by kind. Of what ran twice, as after a resume, the last run counts."""
    events: Events = {kind: [] for kind in EVENT_KINDS}
    for kind, values in lines_that_count(path):
        if kind == "run" and values["version"] > VERSION:
            raise RecordError(
                f"{path} is a record of version {values['version']}, but this adaptive-batching reads only up to "
                f"version {VERSION}; install the one that wrote it, or a later one"
            )
        events[kind].append(values)
    return events


def lines_that_count(path: Path) -> list[tuple[str, Event]]:
    """Return (kind, values) of each event, in order, without what ran again and ends that a resume has followed."""
    events: list[tuple[str, Event]] = []
    for kind, values in _lines(path):
        if kind in ("run", "epoch", "resume"):
            events = [(k, v) for k, v in events if k not in _LAST]
        if kind in ("epoch", "resume"):
            events = [(k, v) for k, v in events if k not in _OF_STEPS or _came_before(values, v)]
        events.append((kind, values))
    return events


def _came_before(start: Event, event: Event) -> bool:
    """Return True if ``event`` came before ``start``, an epoch or what is resumed."""
    if "epoch" in start and "epoch" in event:
        return bool(event["epoch"] < start["epoch"])
    return bool(event["step"] <= start["step"])


def _lines(path: Path) -> Iterator[tuple[str, Event]]:
    """Yield (kind, values) of each event of a known kind; a full disk or a killed process can cut off a line."""
    if not path.exists():
        return
    with path.open(errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                event = _with_floats(json.loads(line))
                if isinstance(event, dict) and event.get("event") in EVENT_KINDS:
                    yield event.pop("event"), event


def written(kind: str, values: Mapping[str, Any]) -> str:
    """Return the line of an event."""
    event = {"event": kind, **values}
    try:
        return json.dumps(event, default=str, allow_nan=False) + "\n"
    except ValueError:  # of a number that JSON does not have
        return json.dumps(_with_texts(event), default=str, allow_nan=False) + "\n"


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _with_texts(value: Any) -> Any:
    """Return a value with numbers that are not finite as texts, as JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {key: _with_texts(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_texts(each) for each in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _with_floats(value: Any) -> Any:
    """Return a value that was read with the numbers that `_with_texts` made texts of."""
    if isinstance(value, dict):
        return {key: _with_floats(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_floats(each) for each in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
