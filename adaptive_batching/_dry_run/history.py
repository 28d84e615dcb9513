"""Read the allocator's history: when memory peaked, what held it then, and how it changed over time.

Pure: events are dictionaries as `torch.cuda.memory._snapshot()` gives them, and nothing here imports torch.
"""

from __future__ import annotations

import os
import sysconfig
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer states"
FORWARD, BACKWARD, STEP = "activations", "temporaries of the backward pass", "temporaries of the optimizer"
CATEGORIES = (WEIGHTS, GRADIENTS, STATES, FORWARD, BACKWARD, STEP)
BLOCK = 512  # bytes, to whose multiples torch rounds an allocation
MOST_HOLDERS = 10
MOST_POINTS = 400  # of the picture

_HERE = Path(__file__).parents[1]
_DEVICE = str(_HERE / "_emulated_device")
_STANDARD = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")})
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"
_OPTIMIZERS = (f"{_TORCH}optim{os.sep}", f"{os.sep}bitsandbytes{os.sep}optim{os.sep}")

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


@dataclass
class History:
    """Memory over time, with its peak; all in bytes."""

    peak_bytes: int = 0
    peak_us: int = 0
    peak_frames: Sequence[Frame] = ()
    categories: dict[str, int] = field(default_factory=dict)  # at the peak
    holders: list[dict[str, Any]] = field(default_factory=list)  # at the peak, the largest first
    points: list[dict[str, Any]] = field(default_factory=list)  # event, allocated, reserved and categories, over time


def read_history(events: Sequence[Event], labels: Sequence[Labels], until_us: int | None = None) -> History:
    """Return what the history of a device tells, up to a moment if one is given.

    Args:
        events: As of one device in `device_traces`, in order. What was allocated before the first is not known.
        labels: What memory held at some moments, in order. Memory that is never named is told by the stack that
            asked for it: no Python code runs in a backward pass, besides functions of the script's own.
        until_us: The last moment to look at, in microseconds of the events' clock.
    """
    if until_us is not None:
        events = [event for event in events if event["time_us"] <= until_us]
    allocations, peak_at = _allocations(events, labels)
    history = History()
    if peak_at is not None:
        alive = [each for each, freed in allocations if each.made <= peak_at < freed]
        event = events[peak_at]
        history.peak_bytes = sum(each.bytes for each in alive)
        history.peak_us, history.peak_frames = int(event["time_us"]), event.get("frames") or ()
        history.categories, history.holders = _by_category(alive), _holders(alive)
    history.points = _points(events, allocations)
    return history


def _allocations(events: Sequence[Event], labels: Sequence[Labels]) -> tuple[list[tuple[Allocation, int]], int | None]:
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
            if now > most:
                most, peak_at = now, number
        elif event["action"] == "free_requested" and event["addr"] in live:
            freed = live.pop(event["addr"])
            done.append((freed, number))
            now -= freed.bytes
    for rest in waiting:
        _name(live, rest)
    done += [(each, len(events)) for each in live.values()]
    for each, _ in done:
        each.category = each.category or _category_of(each.frames)
    return done, peak_at


def _name(live: Mapping[int, Allocation], labels: Labels) -> None:
    for address, category in labels.categories.items():
        if address in live:
            live[address].category = category


def _category_of(frames: Sequence[Frame]) -> str:
    ours = [frame for frame in frames if not frame["filename"].startswith(_DEVICE)]
    if not ours:
        return BACKWARD
    return STEP if any(part in frame["filename"] for frame in ours for part in _OPTIMIZERS) else FORWARD


def _by_category(alive: Sequence[Allocation]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for each in alive:
        found[each.category] += each.bytes
    return {category: found[category] for category in CATEGORIES if found[category]}


def _holders(alive: Sequence[Allocation]) -> list[dict[str, Any]]:
    """Return the places that hold most, each with the line that asked for the memory."""
    grouped: dict[tuple[str, str], list[Allocation]] = {}
    for each in alive:
        grouped.setdefault((each.category, place(each.frames)), []).append(each)
    largest = sorted(grouped.items(), key=lambda item: -sum(each.bytes for each in item[1]))[:MOST_HOLDERS]
    return [
        {"category": category, "where": where, "bytes": sum(each.bytes for each in held), "allocations": len(held)}
        for (category, where), held in largest
    ]


def _points(events: Sequence[Event], allocations: Sequence[tuple[Allocation, int]]) -> list[dict[str, Any]]:
    """Return memory over time, of each of so many stretches the moment at which most was allocated."""
    if not events:
        return []
    changes: list[tuple[int, str, int]] = []
    for each, freed in allocations:
        changes.append((each.made, each.category, each.bytes))
        if freed < len(events):
            changes.append((freed, each.category, -each.bytes))
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
    ours = [frame for frame in frames if not frame["filename"].startswith((_DEVICE, "<"))]
    if not ours:
        return "backward pass"
    return line_of(next((frame for frame in ours if _TORCH not in frame["filename"]), ours[0]))


def line_of_script(frames: Sequence[Frame]) -> str | None:
    """Return the innermost line of code that is not installed: the user's own."""
    found = next(filter(is_of_script, frames), None)
    return None if found is None else line_of(found)


def is_of_script(frame: Frame) -> bool:
    """True for code that is neither installed nor generated."""
    return not _is_installed(frame) and not frame["filename"].startswith(("<", str(_HERE)))


def _is_installed(frame: Frame) -> bool:
    file = str(frame["filename"])
    return f"{os.sep}site-packages{os.sep}" in file or file.startswith(_STANDARD)
