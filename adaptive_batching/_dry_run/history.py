"""Read the allocator's history: when memory peaked, what held it then, and how it changed over time.

Pure: events are dictionaries as `torch.cuda.memory._snapshot()` gives them, and nothing here imports torch.
"""

from __future__ import annotations

import os
import re
import sysconfig
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer states"
FORWARD, BACKWARD, STEP = "activations", "temporaries of the backward pass", "temporaries of the optimizer"
BUCKETS, COLLECTIVES, WORKSPACES = "DDP buckets", "buffers of collectives", "cuBLAS workspaces"
KEPT = "kept from step to step"
CATEGORIES = (WEIGHTS, GRADIENTS, STATES, FORWARD, BACKWARD, STEP, BUCKETS, COLLECTIVES, WORKSPACES, KEPT)
BLOCK = 512  # bytes, to whose multiples torch rounds an allocation
MOST_HOLDERS = 10
MOST_POINTS = 400  # of the picture

_HERE = Path(__file__).parents[1]
_OURS = tuple(str(_HERE / room) for room in ("_dry_run", "_step/judge.py"))
_STANDARD = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")})
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"
_OPTIMIZERS = (
    f"{_TORCH}optim{os.sep}", f"{os.sep}bitsandbytes{os.sep}optim{os.sep}", f"{_TORCH}nn{os.sep}utils{os.sep}clip_grad",
    f"{_TORCH}amp{os.sep}grad_scaler",
)  # fmt: skip
_DISTRIBUTED, _OF_TENSORS = f"{_TORCH}distributed{os.sep}", f"{_TORCH}distributed{os.sep}tensor{os.sep}"
_DDP = f"{_TORCH}nn{os.sep}parallel{os.sep}distributed.py"
_MODULE = f"{_TORCH}nn{os.sep}modules{os.sep}module.py"
# Written by Inductor: the name of the file is a hash
_GENERATED = re.compile(r"[/\\]\w\w[/\\]c[a-z0-9]{40,}\.py$")

Frame = Mapping[str, Any]  # filename, line and name; a stack begins with the innermost
Event = Mapping[str, Any]


@dataclass(eq=False)
class Allocation:
    """Memory that was handed out, from one event of the history to another."""

    bytes: int
    made: int  # number of the event
    made_us: int
    frames: Sequence[Frame]
    category: str = ""


@dataclass(frozen=True)
class Labels:
    """Categories of allocations at one moment, by the address of their first byte."""

    time_us: int
    categories: Mapping[int, str]


@dataclass(frozen=True)
class Moments:
    """Moments of a run that the allocator's history does not have, in microseconds of its clock."""

    steps: Sequence[tuple[int, int]] = ()
    """Beginning and end of each call of an optimizer."""
    ends: Sequence[int] = ()
    """Ends of steps."""
    until: int | None = None
    """The last to look at; None for all."""
    since: int | None = None
    """The first at which a peak counts; None for all. A probe, which has tried more than training takes, ran before."""


@dataclass
class History:
    """Memory over time, with its peak; all in bytes."""

    peak_bytes: int = 0
    peak_us: int = 0
    peak_frames: Sequence[Frame] = ()
    categories: dict[str, int] = field(default_factory=dict)  # at the peak
    holders: list[dict[str, Any]] = field(default_factory=list)  # at the peak, the largest first
    outdated_buckets_bytes: int = 0  # at the peak, of the buckets that DDP began with and has replaced
    points: list[dict[str, Any]] = field(default_factory=list)  # event, allocated, reserved and categories, over time


def read_history(
    events: Sequence[Event], labels: Sequence[Labels], moments: Moments = Moments(), workspace: int = 0
) -> History:
    """Return what the history of a device tells.

    Args:
        events: As of one device in `device_traces`, in order. What was allocated before the first is not known.
        labels: What memory held at some moments, in order. Memory that is never named is told by the stack that
            asked for it: no Python code runs in a backward pass, besides functions of the script's own.
        moments: When steps were taken, and where to end.
        workspace: Bytes of a workspace of cuBLAS, which torch takes at a thread's first product and never frees.
    """
    if moments.until is not None:
        events = [event for event in events if event["time_us"] <= moments.until]
    allocations, peak_at = _allocations(events, labels, moments.since or 0)
    for allocation, freed in allocations:
        freed_us = events[freed]["time_us"] if freed < len(events) else None
        allocation.category = allocation.category or _category_of(allocation, freed_us, moments, workspace)
    history = History()
    if peak_at is not None:
        alive = [allocation for allocation, freed in allocations if allocation.made <= peak_at < freed]
        event = events[peak_at]
        history.peak_bytes = sum(allocation.bytes for allocation in alive)
        history.peak_us, history.peak_frames = int(event["time_us"]), event.get("frames") or ()
        history.categories, history.holders = _by_category(alive), _holders(alive)
        buckets = [allocation for allocation in alive if allocation.category == BUCKETS]
        first = [bucket for bucket in buckets if any(frame["name"] == "_ddp_init_helper" for frame in bucket.frames)]
        if len(first) < len(buckets):
            history.outdated_buckets_bytes = sum(bucket.bytes for bucket in first)
    history.points = _points(events, allocations)
    return history


def _allocations(
    events: Sequence[Event], labels: Sequence[Labels], since: int
) -> tuple[list[tuple[Allocation, int]], int | None]:
    """Return each allocation with the number of the event that freed it, and the number of that at the peak."""
    live: dict[int, Allocation] = {}
    done: list[tuple[Allocation, int]] = []
    now = most = 0
    peak_at = None
    waiting = list(labels)
    for number, event in enumerate(events):
        while waiting and waiting[0].time_us < event["time_us"]:
            _name(live, waiting.pop(0))
        if event["action"] == "alloc":
            size = -(-event["size"] // BLOCK) * BLOCK
            live[event["addr"]] = Allocation(size, number, event["time_us"], event.get("frames") or ())
            now += size
            if now > most and event["time_us"] >= since:
                most, peak_at = now, number
        elif event["action"] == "free_requested" and event["addr"] in live:
            freed = live.pop(event["addr"])
            done.append((freed, number))
            now -= freed.bytes
    for rest in waiting:
        _name(live, rest)
    return done + [(allocation, len(events)) for allocation in live.values()], peak_at


def _name(live: Mapping[int, Allocation], labels: Labels) -> None:
    for address, category in labels.categories.items():
        if address in live:
            live[address].category = category


def _category_of(allocation: Allocation, freed_us: int | None, moments: Moments, workspace: int) -> str:
    """Return what memory held that no label names, by who asked for it, and when."""
    if allocation.bytes == workspace and freed_us is None:
        return WORKSPACES
    files = [frame["filename"] for frame in allocation.frames if not frame["filename"].startswith(_OURS)]
    files = [file for file in files if _OF_TENSORS not in file]  # which any operation on a sharded tensor goes through
    if not files:
        return BACKWARD
    if files[0].endswith(_DDP):
        return BUCKETS
    if _DISTRIBUTED in files[0]:
        return COLLECTIVES
    of_module = next((at for at, file in enumerate(files) if file.endswith(_MODULE)), len(files))
    if any(part in file for file in files[:of_module] for part in _OPTIMIZERS):
        return STEP
    call = bisect_right(moments.steps, (allocation.made_us, allocation.made_us)) - 1
    in_step = call >= 0 and allocation.made_us <= moments.steps[call][1]
    if in_step and of_module == len(files):  # a closure of the step runs the model
        return STEP
    ended = bisect_right(moments.ends, allocation.made_us)
    outlives = ended < len(moments.ends) and (freed_us is None or freed_us > moments.ends[ended])
    return KEPT if outlives and allocation.bytes > BLOCK else FORWARD


def _by_category(alive: Sequence[Allocation]) -> dict[str, int]:
    num_bytes: Counter[str] = Counter()
    for allocation in alive:
        num_bytes[allocation.category] += allocation.bytes
    return {category: num_bytes[category] for category in CATEGORIES if num_bytes[category]}


def _holders(alive: Sequence[Allocation]) -> list[dict[str, Any]]:
    """Return the places that hold most, each with the line that asked for the memory."""
    grouped: dict[tuple[str, str], list[Allocation]] = {}
    for allocation in alive:
        grouped.setdefault((allocation.category, place(allocation.frames)), []).append(allocation)
    largest = sorted(grouped.items(), key=lambda item: -sum(allocation.bytes for allocation in item[1]))[:MOST_HOLDERS]
    return [
        {
            "category": category,
            "where": where,
            "bytes": sum(one.bytes for one in held),
            "allocations": len(held),
        }
        for (category, where), held in largest
    ]


def _points(events: Sequence[Event], allocations: Sequence[tuple[Allocation, int]]) -> list[dict[str, Any]]:
    """Return memory over time, of each of so many stretches the moment at which most was allocated."""
    if not events:
        return []
    changes: list[tuple[int, str, int]] = []
    for allocation, freed in allocations:
        changes.append((allocation.made, allocation.category, allocation.bytes))
        if freed < len(events):
            changes.append((freed, allocation.category, -allocation.bytes))
    for number, event in enumerate(events):
        sign = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}.get(event["action"])
        if sign:
            changes.append((number, "reserved", sign * event["size"]))
    changes.sort(key=lambda change: change[0])
    stretch = max(1, -(-len(events) // MOST_POINTS))
    now, points = Counter[str](), []
    best: dict[str, Any] | None = None
    for at, (number, what, size) in enumerate(changes):
        now[what] += size
        allocated = sum(now[category] for category in CATEGORIES)
        if best is None or allocated >= best["allocated"]:
            best = {"event": number, "allocated": allocated, **now}
        if at + 1 == len(changes) or changes[at + 1][0] // stretch != number // stretch:
            points.append(best)
            best = None
    return points


def step_of(time_us: int, ends_us: Sequence[int]) -> int:
    """Return the number, from 1, of the step that a moment lies in."""
    return bisect_right(ends_us, time_us) + 1


def line_of(frame: Frame) -> str:
    """Return a frame as ``file:line function``, with as much of the path as people look for."""
    path = Path(frame["filename"])
    parent = f"{path.parent.name}/" if _is_installed(frame) else ""
    return f"{parent}{path.name}:{frame['line']} {frame['name']}"


def place(frames: Sequence[Frame]) -> str:
    """Return the line that asked for memory: the innermost outside of torch, or what stands for a backward pass."""
    ours = [frame for frame in frames if not frame["filename"].startswith((*_OURS, "<"))]
    if not ours:
        return "backward pass"
    written = [frame for frame in ours if not _GENERATED.search(frame["filename"])]
    innermost = next((frame for frame in written if _TORCH not in frame["filename"]), None)
    if innermost is None:
        return "compiled backward pass" if len(written) < len(ours) else line_of(ours[0])
    return line_of(innermost) + (", compiled" if _GENERATED.search(ours[0]["filename"]) else "")


def is_of_torch(file: str) -> bool:
    """True for code of torch, for what Inductor has written, and for what watches."""
    return file.startswith((*_OURS, "<")) or _TORCH in file or _GENERATED.search(file) is not None


def line_of_script(frames: Sequence[Frame]) -> str | None:
    """Return the innermost line of code that is not installed: the user's own."""
    frame = next(filter(is_of_script, frames), None)
    return None if frame is None else line_of(frame)


def is_of_script(frame: Frame) -> bool:
    """True for code that is neither installed nor generated."""
    file = frame["filename"]
    return not _is_installed(frame) and not file.startswith(("<", str(_HERE))) and not _GENERATED.search(file)


def _is_installed(frame: Frame) -> bool:
    file = str(frame["filename"])
    return f"{os.sep}site-packages{os.sep}" in file or file.startswith(_STANDARD)
