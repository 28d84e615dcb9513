"""The page of dry runs: one file of HTML that asks nothing of a network, and needs no scripts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from adaptive_batching._dry_run.answer import DryRun
from adaptive_batching._dry_run.answer_in_words import in_words
from adaptive_batching._dry_run.compared import Column, compare
from adaptive_batching._dry_run.history import CATEGORIES
from adaptive_batching._dry_run.time.forecast import Forecast, in_seconds
from adaptive_batching._dry_run.time.seconds import LIMITS, largest_lines
from adaptive_batching._report.page import asset
from adaptive_batching._report.sections import Html, some, table, tag
from adaptive_batching._values import memory_size, without_secrets

_WIDTH, _HEIGHT, _LEFT, _BELOW = 960, 320, 64, 24  # of the chart
_COLOURS = 8  # of the style sheet
MIN_SECRET = 4  # letters, below which a text is everywhere
_BAR = 32  # height of the bar of a step's time
_STYLE = """
svg.memory { width: 100%; height: auto; } svg.memory text { fill: var(--soft); font-size: 12px; }
svg.memory .axis { stroke: var(--line); }
svg.memory .step { stroke: var(--soft); stroke-dasharray: 1 3; }
svg.memory .limit { stroke: var(--bad); stroke-dasharray: 5 4; }
svg.memory .reserved { fill: none; stroke: var(--ink); stroke-width: 1.2; }
"""


def write_page(columns: Sequence[Column], runs: Sequence[DryRun], output: Path, command: Sequence[str]) -> None:
    """Write the page of one dry run, or of several that are compared; OSError if the file cannot be written."""
    masked, secrets = without_secrets(command[1:] if command[:1] == ["--"] else command)
    typed = shlex.join(masked)
    body, answers = [], ", ".join(dict.fromkeys(str(run.answer) for run in runs))
    if len(runs) > 1:
        body.append(tag("section", tag("pre", "\n".join(compare(columns, runs)[1])), id="compared"))
    for number, (column, run) in enumerate(zip(columns, runs, strict=True), 1):
        several = len(runs) > 1
        body += [tag("h2", column.name)] if several else []
        body += _sections(column, run, f"-{number}" if several else "")
    cards = ", ".join(dict.fromkeys(str(run.card) for run in runs))
    head = tag("title", f"{answers}: {cards}") + tag("style", asset("page.css"), Html(_STYLE))
    header = tag("header", tag("h1", f"Dry run: {answers}"), tag("p", tag("code", typed), f" on {cards}"))
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:"><meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark">{head}</head><body><main>{header}{"".join(body)}</main></body></html>'
    )
    for secret in secrets:  # in an error that the script raised, say
        page = page.replace(escape(secret), "(masked)") if len(secret) > MIN_SECRET else page
    output.write_text(page, encoding="utf-8", errors="replace")


def _sections(column: Column, run: DryRun, suffix: str) -> list[Html]:
    failure = [tag("pre", "\n".join(run.failure["stack"]), class_="error")] if run.failure else []
    history = (run.worst or {}).get("history") or {"points": [], "categories": {}, "holders": []}
    parts = [
        ("answer", "", [tag("pre", "\n".join(in_words(run, column.length)))]),
        ("memory", "Memory over the run", _chart(run, history["points"], history.get("steps_end", ()))),
        ("time", "Time of a step", [] if run.forecast is None else _time(run.forecast)),
        ("holders", "What held it at the peak", _holders(history)),
        ("failure", "Where it failed", failure),
        ("asked", "What a step asks of the device", _asked((run.worst or {}).get("steps") or [])),
    ]
    return [
        tag("section", *some("h2", heading), *contents, id=name + suffix)
        for name, heading, contents in parts
        if contents
    ]


def _time(forecast: Forecast) -> list[Html]:
    """Draw what a step's seconds are spent on, as one bar, with the lines of code that take most."""
    step, drawn, keys, x = forecast.step, [], [], 0.0
    for name, share in forecast.shares():
        colour = [*LIMITS.values()].index(name) % _COLOURS
        title = tag("title", f"{name}: {in_seconds(share * step.seconds)}, {100 * share:.0f} %")
        width = share * _WIDTH
        drawn.append(
            f'<rect x="{x:.1f}" width="{width:.1f}" y="0" height="{_BAR}" fill="var(--c{colour})" fill-opacity="0.75">'
            f"{title}</rect>"
        )
        x += width
        keys.append(tag("li", tag("span", class_=f"key c{colour}"), tag("span", f"{name}, {100 * share:.0f} %")))
    label = f"{in_seconds(step.seconds)} of a step, by what they are spent on"
    size = f"0 0 {_WIDTH} {_BAR}"
    bar = tag("svg", Html("".join(drawn)), viewBox=size, class_="memory", role="img", aria_label=label)
    lines = [
        [where, LIMITS[limit], in_seconds(seconds), f"{100 * seconds / step.seconds:.0f} %"]
        for limit, of_limit in step.lines.items()
        for where, seconds in largest_lines(of_limit)
    ]
    lines.sort(key=lambda line: -int(line[3].split()[0]))
    return [
        tag("ul", *keys, class_="keys"), tag("figure", bar), tag("p", label, class_="hint"),
        table(["line", "spent on", "time", "share"], lines, words=[0, 1]),
    ]  # fmt: skip


def _chart(run: DryRun, points: Sequence[dict[str, Any]], steps_end: Sequence[int]) -> list[Html]:
    """Draw memory over the allocator's events, stacked by category, with what is reserved and the card's limit."""
    if len(points) < 2:
        return []
    limit = run.card.memory_bytes - run.card.context_bytes
    first, last = points[0]["event"], points[-1]["event"]
    top = max(*(point.get("reserved", 0) for point in points), *(point["allocated"] for point in points)) * 1.08
    top = max(top, limit) if limit < 1.5 * top else top

    def point_at(event: int, size: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT) * (event - first) / max(last - first, 1)
        return f"{x:.1f},{(_HEIGHT - _BELOW) * (1 - size / top):.1f}"

    below, drawn = [0.0] * len(points), []
    shown = [category for category in CATEGORIES if any(point.get(category) for point in points)]
    for category in shown:
        above = [low + point.get(category, 0) for low, point in zip(below, points, strict=True)]
        edges = [point_at(point["event"], size) for point, size in zip(points, above, strict=True)]
        edges += reversed([point_at(point["event"], size) for point, size in zip(points, below, strict=True)])
        colour = f"var(--c{CATEGORIES.index(category) % _COLOURS})"
        drawn.append(f'<polygon points="{" ".join(edges)}" fill="{colour}" fill-opacity="0.75"/>')
        below = above
    for number, event in enumerate(steps_end, 1):
        x = point_at(event, 0).split(",")[0]
        drawn.append(f'<line class="step" x1="{x}" x2="{x}" y1="0" y2="{_HEIGHT - _BELOW}"/>')
        drawn.append(f'<text x="{x}" y="{_HEIGHT - 6}" text-anchor="end">step {number}</text>')
    reserved = " ".join(point_at(point["event"], point.get("reserved", 0)) for point in points)
    drawn.append(f'<polyline class="reserved" points="{reserved}"/>')
    for size in (0.0, top / 2, top):
        (x, y), text = point_at(first, size).split(","), memory_size(size)
        drawn.append(f'<line class="axis" x1="{x}" x2="{_WIDTH}" y1="{y}" y2="{y}"/>')
        drawn.append(f'<text x="{_LEFT - 6}" y="{max(float(y), 10)}" text-anchor="end">{escape(text)}</text>')
    if limit <= top:
        y = point_at(first, limit).split(",")[1]
        drawn.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}"/>')
    keys = [
        tag("li", tag("span", class_=f"key c{CATEGORIES.index(category) % _COLOURS}"), tag("span", category))
        for category in shown
    ]
    notes = "Line: reserved by the allocator." + (" Dashed: the card's memory." if limit <= top else "")
    label = f"Memory over {last - first:,} events of the allocator"
    picture = tag("svg", Html("".join(drawn)), viewBox=f"0 0 {_WIDTH} {_HEIGHT}", class_="memory", role="img",
                  aria_label=label)  # fmt: skip
    below_chart = tag("p", f"{label}, from its first. {notes}", class_="hint")
    return [tag("ul", *keys, class_="keys"), tag("figure", picture), below_chart]


def _holders(history: dict[str, Any]) -> list[Html]:
    total = sum(history["categories"].values())
    if not total:
        return []
    kinds = [[kind, memory_size(size), f"{100 * size / total:.0f} %"] for kind, size in history["categories"].items()]
    places = [
        [holder["where"], holder["category"], memory_size(holder["bytes"]), f"{holder['allocations']:,}"]
        for holder in history["holders"]
    ]
    return [
        table(["kind", "memory", "share"], kinds, words=[0]),
        table(["allocated by", "kind", "memory", "allocations"], places, words=[0, 1], caption="Largest holders"),
    ]


def _asked(steps: Sequence[dict[str, int]]) -> list[Html]:
    if not steps:
        return []
    header = ["", *(f"step {number}" for number in range(1, len(steps) + 1))]
    rows = [[name.replace("_", " "), *(f"{step[name]:,}" for step in steps)] for name in steps[0]]
    return [table(header, rows)]
