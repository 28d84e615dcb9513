"""Sections of a page, the pieces of HTML that they are made of, and the curves over the samples seen."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

import adaptive_batching._report.facts as say
from adaptive_batching._report.events import Event, Events, RunRecord, by_dataset, totals_of_decisions
from adaptive_batching._values import memory_size, plural

MIB, GIB = 2**20, 2**30
_COLOURS = 8  # of runs
# Steps from which a running mean of the loss is drawn, and the share of the steps that it covers.
_STEPS_TO_SMOOTH = 40
_SMOOTHED_SHARE = 20

CHARTS: dict[str, tuple[str, str, tuple[tuple[str, str], ...]]] = {
    "loss": ("Loss", "mean of a step", (("loss", "loss"), ("trend", "running mean"), ("validation", "validation"))),
    "batch": ("Global batch", "samples per optimizer step", (("batch", "global batch"),)),
    "lr": ("Learning rate", "", (("lr", "learning rate"),)),
    "padding": ("Padding", "tokens computed per token of the data", (("padding", "padding"),)),
    "seconds": ("Time of a step", "seconds", (("seconds", "seconds"),)),
    "memory": ("Peak memory", "MiB", (("memory", "peak memory"),)),
}
"""Title, unit and (column, label) of the lines of each chart of the training. The first column is what it is about."""


@dataclass(frozen=True)
class Curves:
    """Columns with a value for each point of a run, or None where it is not known."""

    columns: dict[str, list[float | None]]  # by name, those alone of which something is known
    steps_per_point: int
    steps_of_trend: int  # that the running mean of the loss covers
    epochs: list[int]  # samples seen at the beginning of each epoch but the first
    recoveries: list[int]  # samples seen at the end of each step that had to run again


def lines_of(chart: str, curves: Sequence[Curves]) -> list[tuple[str, str]]:
    """Return (column, label) of the lines of a chart, with one for each set of data that was validated on."""
    sets = [name for curve in curves for name in curve.columns if name.startswith("validation on ")]
    return [*CHARTS[chart][2], *((name, name) for name in dict.fromkeys(sets) if chart == "loss")]


def curves_of(events: Events, most_points: int) -> Curves:
    steps = events["step"]
    seen = list(accumulate(step["samples"] for step in steps))
    size = max(1, math.ceil(len(steps) / most_points))
    validations = {
        f"validation{on}": {validation["step"]: validation["loss"] for validation in of_set}
        for on, of_set in by_dataset(events["validation"]).items()
    }
    window = max(5, len(steps) // _SMOOTHED_SHARE)
    finite = [step if math.isfinite(step["loss"]) else {"loss": 0.0, "samples": 0} for step in steps]
    losses = [0.0, *accumulate(step["loss"] * step["samples"] for step in finite)]
    samples = [0, *accumulate(step["samples"] for step in finite)]

    def mean_loss(start: int, end: int) -> float | None:
        return _ratio(losses[end] - losses[start], samples[end] - samples[start])

    points: list[dict[str, float | None]] = []
    for start in range(0, len(steps), size):
        part, end = steps[start : start + size], min(start + size, len(steps))
        last, seconds = part[-1], _known(part, "seconds")
        has_trend = len(steps) >= _STEPS_TO_SMOOTH and end >= window
        points.append({
            "seen": seen[end - 1],  # samples
            "step": last["step"],
            "loss": mean_loss(start, end),
            "trend": mean_loss(end - window, end) if has_trend else None,
            **{name: _last(losses_of, part) for name, losses_of in validations.items()},
            "batch": last["samples"],  # global
            "lr": last["lr"],
            "padding": _ratio(sum(_known(part, "padded_tokens")), sum(_known(part, "tokens"))),
            "seconds": _ratio(sum(seconds), len(seconds)),
            "memory": max((peak / MIB for peak in _known(part, "peak_bytes")), default=None),  # peak, in MiB
        })  # fmt: skip
    columns = {name: [_rounded(point[name]) for point in points] for name in (points[0] if points else ())}
    epochs = [at for at, step, after in zip(seen, steps, steps[1:], strict=False) if after["epoch"] != step["epoch"]]
    before = [0, *(step["recoveries"] for step in steps)]
    recoveries = [at for at, step, last in zip(seen, steps, before, strict=False) if step["recoveries"] > last]
    drawn = {name: column for name, column in columns.items() if any(value is not None for value in column)}
    return Curves(drawn, size, window, epochs, recoveries)


def _ratio(value: float, other: float) -> float | None:
    return value / other if other else None


def _known(steps: Sequence[Event], key: str) -> list[float]:
    return [step[key] for step in steps if step.get(key) is not None and math.isfinite(step[key])]


def _last(by_step: Mapping[int, float | None], steps: Sequence[Event]) -> float | None:
    values = (by_step.get(step["step"]) for step in reversed(steps))
    return next((value for value in values if value is not None), None)


def _rounded(value: float | None) -> float | None:
    """Return a value with as many digits as can be seen."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


class Html(str):
    """Text that is HTML already."""


def tag(name: str, *contents: str, **attributes: str) -> Html:
    """Return an element around contents, of which all text is escaped that is not :class:`Html`.

    ``class_`` is the attribute ``class``, ``data_run`` is ``data-run``; empty ones are left out.
    """
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value}
    given = "".join(f' {key}="{escape(value)}"' for key, value in named.items())
    inside = "".join(content if isinstance(content, Html) else escape(content) for content in contents)
    return Html(f"<{name}{given}>{inside}</{name}>")


def some(name: str, content: str) -> list[Html]:
    """Return an element around contents, or nothing where they are missing."""
    return [tag(name, content)] if content else []


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (), caption: str = "", **kind: str
) -> Html:
    """Return a table, which scrolls by itself where it is too wide; columns not in ``words`` line up at the right."""

    def cell(column: int, content: str, scope: str) -> Html:
        return tag("th" if scope else "td", content, class_="words" if column in words else "", scope=scope)

    head = tag("tr", *(cell(at, name, "col") for at, name in enumerate(header)))
    body = [tag("tr", *(cell(at, content, "" if at else "row") for at, content in enumerate(row))) for row in rows]
    inside = tag("table", *some("caption", caption), tag("thead", head), tag("tbody", *body), **kind)
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_label=caption or "table")


def _coloured(number: int, name: str) -> Html:
    """Return a name after a spot of the colour that stands for it in a picture."""
    return tag("span", tag("span", class_=f"key c{number % _COLOURS}"), tag("span", name))


def each_run(runs: list[RunRecord], section: Callable[[RunRecord], list[Html]], class_: str = "cards") -> list[Html]:
    """Return what a section shows of each run, under its name where there are several; nothing if that is nothing."""
    cards = []
    for run in runs:
        if contents := section(run):
            heading = some("h3", _coloured(run.number, run.name) if len(runs) > 1 else "")
            cards.append(tag("article", *heading, *contents))
    return [tag("div", *cards, class_=class_)] if cards else []


def summary(runs: list[RunRecord]) -> list[Html]:
    """Return what the runs are known by: tiles for one, columns of a table for several."""
    facts = [
        [(fact, Html("".join([tag("span", fact.value), *some("small", fact.more)]))) for fact in say.facts(run)]
        for run in runs
    ]
    if len(runs) == 1:
        recorded = [(fact.name, value) for fact, value in facts[0] if fact.value != say.NOT_RECORDED]
        tiles = [tag("div", tag("dt", name), tag("dd", value), class_="tile") for name, value in recorded]
        return [tag("dl", *tiles, class_="tiles")]
    header = ["", *(_coloured(run.number, run.name) for run in runs)]
    words = range(len(header))
    rows = [[same[0][0].name, *(value for _, value in same)] for same in zip(*facts, strict=True)]
    if len(runs) == 2:
        header.append("difference")
        for row, ((first, _), (second, _)) in zip(rows, zip(*facts, strict=True), strict=True):
            row.append(say.change(first, second))
    return [table(header, rows, words=words, class_="compare")]


def errors(run: RunRecord) -> list[Html]:
    """Return the errors that ended a run, one of each rank that had one."""
    begun, last = run.last("run") or {}, run.last("step") or {}
    shown = []
    for error in run.events["error"]:
        where = f" on rank {error['rank']}" if begun.get("ranks", 1) > 1 else ""
        after = f"after {plural(last.get('step', 0), 'optimizer step')}"
        shown.append(tag("p", f"{error['type']}{where}, {say.moment(error['time'])}, {after}."))
        if error["message"]:
            shown.append(tag("pre", error["message"], class_="error", tabindex="0"))
    return shown


def training(runs: list[RunRecord], curves: list[Curves]) -> list[Html]:
    """Return room for the curves over the samples seen, each with its first and last value in words."""
    figures = []
    for name, (title, unit, lines) in CHARTS.items():
        column = lines[0][0]
        drawn = [(run, curve.columns) for run, curve in zip(runs, curves, strict=True) if column in curve.columns]
        if not drawn:
            continue
        ends = "; ".join(_ends(run.name if len(runs) > 1 else "", columns[column], name) for run, columns in drawn)
        caption = [tag("strong", title), tag("span", unit, class_="unit"), tag("span", ends, class_="ends")]
        plot = tag("div", class_="plot", data_chart=name, role="img", aria_label=f"{title}: {ends}")
        figures.append(tag("figure", tag("figcaption", *caption), plot, class_=f"chart {name}"))
    if not figures:
        return [tag("p", "The record has no optimizer steps.")]
    marks = [
        ("epoch", "a new epoch", len(runs) == 1 and any(curve.epochs for curve in curves)),
        ("recovery", "a step ran out of memory, and its samples ran again", any(curve.recoveries for curve in curves)),
    ]
    keys = [tag("li", tag("span", class_=f"mark {mark}"), tag("span", says)) for mark, says, there in marks if there]
    most = max(curve.steps_per_point for curve in curves)
    notes = [f"Each point is the mean of up to {plural(most, 'step')}."] if most > 1 else []
    trends = [curve.steps_of_trend for curve in curves if "trend" in curve.columns]
    notes += [f"The running mean covers {plural(max(trends), 'step')}."] if trends else []
    notes.append("Drag over a chart to zoom into all of them; double-click to reset.")
    below = tag("p", " ".join(notes), class_="hint")
    return [tag("ul", *keys, class_="keys"), tag("div", *figures, class_="charts"), below]


def _ends(name: str, column: list[float | None], chart: str) -> str:
    values = [value for value in column if value is not None]

    def show(value: float) -> str:
        if chart in ("loss", "lr"):
            return say.loss(value) if chart == "loss" else f"{value:.3g}"
        return f"{value:.3g}" if value < 1000 else say.count(value)

    ends = say.from_to(show(values[0]), show(values[-1]))
    return f"{name}: {ends}" if name else ends


def decisions(run: RunRecord) -> list[Html]:
    config, totals = (run.last("run") or {}).get("config") or {}, totals_of_decisions(run.events)
    cells = [
        {
            "epoch": f"{each.epoch:g}",
            "batch size": say.count(each.batch_size),
            "global batch": say.count(each.global_batch_size),
            "steps": say.count(each.steps),
            "samples": say.count(each.samples),
            "mean loss": say.loss(each.mean_loss) if each.steps else "",
            "last rate": f"{each.last_lr:.3g}" if each.steps else "",
            "padding": f"{each.padded_tokens / each.tokens:.2f}" if each.tokens else "",
            "s / step": f"{each.seconds / each.steps:.3g}" if each.seconds else "",
            "why": say.reason(each, before, config),
        }
        for before, each in zip([None, *totals], totals, strict=False)
    ]
    if not cells:
        return []
    header = [name for name in cells[0] if any(row[name] for row in cells)]
    shown = [[row[name] for name in header] for row in cells]
    probed = run.last("probe")
    cost = say.cost_of_growth(probed) if probed is not None and say.grows(config) else ""
    return [table(header, shown, words=[len(header) - 1], class_="decisions"), *some("p", cost[:1].upper() + cost[1:])]


def recoveries(run: RunRecord) -> list[Html]:
    """Return each step that ran out of memory and ran again."""
    rows = []
    for recovery in run.events["recovery"]:
        limit = "" if recovery["max_tokens"] is None else f"{say.count(recovery['max_tokens'])} tokens"
        rows.append([say.count(recovery["step"]), say.count(recovery["epoch"]), recovery["failed"], limit])
    header = ["step", "epoch", "out of memory", "new limit per forward pass"]
    return [table(header, rows, words=[2, 3])] if rows else []


def probe(run: RunRecord) -> list[Html]:
    """Return what the probe has found, with room for its picture."""
    probe_event = run.last("probe")
    if probe_event is None:
        return []
    words = say.probe_in_words(probe_event)
    plot = tag("div", class_="plot", data_probe=str(run.number), role="img", aria_label=words[0])
    picture = tag("figure", tag("figcaption", "Peak memory of a training step over the batch size"), plot)
    rows = []
    for trial in probe_event["measurements"]:
        peak = "out of memory" if trial["peak_bytes"] is None else memory_size(trial["peak_bytes"])
        fits = "yes" if trial["fits"] else "no"
        rows.append([say.count(trial["batch_size"]), peak, fits, say.duration(trial["seconds"])])
    ran = table(["batch size", "peak memory", "fits", "first step"], rows, caption="Sizes that ran, in order")
    return [tag("p", " ".join(words)), picture, ran]


def exploration(run: RunRecord) -> list[Html]:
    explored = run.last("exploration")
    if explored is None:
        return []
    estimates, best = explored["estimates"], explored["recommended"]
    base = estimates[0]["candidate"]
    rows = [
        [
            tag("b" if estimate["candidate"] == best["candidate"] else "span", str(estimate["candidate"])),
            f"{estimate['seconds']:.3f}",
            f"{estimate['speedup']:.2f}",
            say.count(estimate["runs"]),
            f"{100 * estimate['confidence']:.0f} %",
        ]
        for estimate in estimates
    ]
    words = (
        f"micro_batch_size {best['candidate']} is the fastest, {best['speedup']:.2f} times as fast as {base}, with a "
        f"confidence of {100 * best['confidence']:.0f} %. A single timing varies by {100 * explored['noise']:.1f} %."
    )
    header = ["micro_batch_size", "seconds per step", f"times as fast as {base}", "runs", "confidence"]
    return [tag("p", words), table(header, rows, class_="explored")]


def config(run: RunRecord) -> list[Html]:
    """Return the config of a run as JSON, which YAML reads, too."""
    if not (whole := (run.last("run") or {}).get("config")):
        return []
    written = tag("pre", tag("code", json.dumps(whole, indent=2, ensure_ascii=False)), tabindex="0")
    return [tag("details", tag("summary", "The whole config of this run"), written)]
