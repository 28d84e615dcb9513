"""Sections of a page. Each shows all runs, side by side where there are several."""

from __future__ import annotations

from collections.abc import Callable

import adaptive_batching._report.text as say
from adaptive_batching._report.curves import Curves
from adaptive_batching._report.events import Event, Run
from adaptive_batching._report.markup import Html, bar, interval, key, table, tag, text
from adaptive_batching._report.paste import snippet
from adaptive_batching._report.rows import rows_of

COLOURS = 8
"""Of runs, and of kinds of memory."""

CHARTS: dict[str, tuple[str, str, tuple[tuple[str, str], ...]]] = {
    "loss": ("Loss", "mean of a step", (("loss", "loss"), ("trend", "running mean"), ("validation", "validation"))),
    "batch": ("Global batch", "samples per optimizer step", (("batch", "global batch"),)),
    "lr": ("Learning rate", "", (("lr", "learning rate"),)),
    "noise": ("Gradient noise scale", "samples", (("noise", "noise scale"), ("batch", "global batch"))),
    "padding": ("Padding", "tokens computed per token of the data", (("padding", "padding"),)),
    "seconds": ("Time of a step", "seconds", (("seconds", "seconds"),)),
    "memory": ("Peak memory", "MiB", (("memory", "peak memory"),)),
}
"""Title, unit and (column, label) of the lines of each chart of the training. The first column is what it is about."""


def summary(runs: list[Run]) -> Html:
    """Return what the runs are known by: tiles for one, columns of a table for several."""
    if len(runs) == 1:
        tiles = [
            tag("div", text("dt", each.name), tag("dd", _with_small_print(each)), class_="tile")
            for each in say.facts(runs[0])
        ]
        return tag("dl", *tiles, class_="tiles")
    header = ["", *(_named(number, run) for number, run in enumerate(runs))]
    words = range(len(header))
    facts = zip(*map(say.facts, runs), strict=True)
    found = table(
        header, [[same[0].name, *map(_with_small_print, same)] for same in facts], words=words, class_="compare"
    )
    differ = [[name, *values] for name, values in say.differences(runs)]
    if not differ:
        return found
    caption = "Settings that differ between these runs"
    return Html(found + table(header, differ, words=words, caption=caption, class_="compare"))


def errors(runs: list[Run]) -> Html | None:
    """Return the errors that ended each run, one of each rank that had one."""
    return _cards(runs, lambda _, run: _errors(run))


def _errors(run: Run) -> Html | None:
    begun, last = run.last("run") or {}, run.last("step") or {}
    shown = ""
    for error in run.events["error"]:
        where = f" on rank {error['rank']}" if begun.get("ranks", 1) > 1 else ""
        steps = say.of(last.get("step", 0), "optimizer step")
        shown += text("p", f"{error['type']}{where}, {say.moment(error['time'])}, after {steps}.")
        shown += text("pre", error["message"], class_="error", tabindex="0") if error["message"] else ""
    return Html(shown) if shown else None


def probes(runs: list[Run]) -> Html | None:
    """Return what each probe has found, with room for its picture."""
    return _cards(runs, lambda number, run: _probe(number, run.last("probe")))


def _probe(number: int, probe: Event | None) -> Html | None:
    if probe is None:
        return None
    words = say.probe_in_words(probe)
    picture = tag(
        "figure",
        text("figcaption", "Peak memory of a training step over the batch size"),
        tag("div", class_="plot", data_probe=str(number), role="img", aria_label=words[0]),
    )
    rows = [
        [
            say.count(each["batch_size"]),
            "out of memory" if each["peak_bytes"] is None else say.size(each["peak_bytes"]),
            "yes" if each["fits"] else "no",
            say.duration(each["seconds"]),
        ]
        for each in probe["measurements"]
    ]
    ran = table(["batch size", "peak memory", "fits", "first step"], rows, caption="Sizes that ran, in order")
    return Html(_paragraphs(words) + picture + _what_sets_the_peak(probe) + ran)


def _what_sets_the_peak(probe: Event) -> str:
    alive = probe.get("peak_kinds") or {}
    least = sum(alive.values()) / 200  # half a percent
    kinds = {kind: num_bytes for kind, num_bytes in alive.items() if num_bytes > least}
    if not kinds:
        return ""
    whole, at = sum(alive.values()), probe.get("enough") or probe["batch_size"]
    ordered = sorted(kinds, key=lambda kind: -kinds[kind])
    rows = [
        [
            tag("span", key(f"c{n % COLOURS}"), text("span", kind)),
            say.size(kinds[kind]),
            f"{100 * kinds[kind] / whole:.0f} %",
        ]
        for n, kind in enumerate(ordered)
    ]
    heading = (
        f"What sets the peak at {say.of(at, 'sample')}: the {probe['peak_moment']}. What is alive then, as traced:"
    )
    parts = [(f"c{n % COLOURS}", kinds[kind] / whole) for n, kind in enumerate(ordered)]
    return text("h4", heading) + bar(parts) + table(["kind", "bytes", "share"], rows, words=[0])


def explorations(runs: list[Run]) -> Html | None:
    return _cards(runs, lambda _, run: _exploration(run.last("exploration")))


def _exploration(found: Event | None) -> Html | None:
    if found is None:
        return None
    estimates, best = found["estimates"], found["recommended"]
    base = estimates[0]["candidate"]
    lows = [each.get("speedup_low", each["speedup"]) for each in estimates]
    highs = [each.get("speedup_high", each["speedup"]) for each in estimates]
    room = 0.05 * (max([*highs, 1.0]) - min([*lows, 1.0])) or 0.05
    first, last = min([*lows, 1.0]) - room, max([*highs, 1.0]) + room
    rows = [
        [
            text("b" if each["candidate"] == best["candidate"] else "span", str(each["candidate"])),
            f"{each['seconds']:.3f}",
            f"{each['speedup']:.2f}",
            f"{low:.2f} to {high:.2f}" if high > low else "",
            interval(low, each["speedup"], high, first, last, 1.0),
            say.count(each["runs"]),
            f"{100 * each['confidence']:.0f} %",
        ]
        for each, low, high in zip(estimates, lows, highs, strict=True)
    ]
    words = (
        f"micro_batch_size {best['candidate']} is the fastest, {best['speedup']:.2f} times as fast as {base}, with a "
        f"confidence of {100 * best['confidence']:.0f} %. A single timing varies by {100 * found['noise']:.1f} %."
    )
    header = [
        "micro_batch_size",
        "seconds per step",
        f"times as fast as {base}",
        "95 % interval",
        "",
        "runs",
        "confidence",
    ]
    return Html(text("p", words) + table(header, rows, words=[4], class_="explored"))


def training(runs: list[Run], curves: list[Curves]) -> Html:
    """Return room for the curves over the samples seen, each with its first and last value in words."""
    figures = []
    for name, (title, unit, lines) in CHARTS.items():
        column = lines[0][0]
        known = [(run, each.columns) for run, each in zip(runs, curves, strict=True) if column in each.columns]
        if not known:
            continue
        ends = "; ".join(_ends(run.name if len(runs) > 1 else "", columns[column], name) for run, columns in known)
        caption = [text("strong", title), text("span", unit, class_="unit"), text("span", ends, class_="ends")]
        plot = tag("div", class_="plot", data_chart=name, role="img", aria_label=f"{title}: {ends}")
        figures.append(tag("figure", tag("figcaption", *caption), plot, class_=f"chart {name}"))
    if not figures:
        return text("p", "The record holds no optimizer step.")
    marks = [
        ("epoch", "a new epoch", len(runs) == 1 and any(each.epochs for each in curves)),
        ("recovery", "a step ran out of memory, and its samples ran again", any(each.recoveries for each in curves)),
    ]
    keys = [tag("li", tag("span", class_=f"mark {mark}"), text("span", says)) for mark, says, there in marks if there]
    most = max(each.steps_per_point for each in curves)
    notes = [f"Each point is the mean of up to {say.of(most, 'step')}."] if most > 1 else []
    trends = [each.steps_of_trend for each in curves if "trend" in each.columns]
    notes += [f"The running mean covers {say.of(max(trends), 'step')}."] if trends else []
    notes.append("Drag over a chart to zoom into all of them; double click to see all again.")
    below = text("p", " ".join(notes), class_="hint")
    return Html(tag("ul", *keys, class_="keys") + tag("div", *figures, class_="charts") + below)


def _ends(name: str, column: list[float | None], chart: str) -> str:
    known = [value for value in column if value is not None]

    def show(value: float) -> str:
        if chart in ("loss", "lr"):
            return say.loss(value) if chart == "loss" else say.rate(value)
        return f"{value:,.4g}" if value < 1000 else say.count(value)

    ends = show(known[0]) if show(known[0]) == show(known[-1]) else f"{show(known[0])} → {show(known[-1])}"
    return f"{name}: {ends}" if name else ends


def decisions(runs: list[Run]) -> Html | None:
    return _cards(runs, lambda _, run: _decisions(run), class_="cards wide")


def _decisions(run: Run) -> Html | None:
    cells = [
        {
            "epoch": f"{row.epoch:g}",
            "batch size": say.count(row.batch_size),
            "global batch": say.count(row.global_batch_size),
            "steps": say.count(row.steps),
            "samples": say.count(row.samples),
            "mean loss": say.loss(row.mean_loss) if row.steps else "",
            "last rate": say.rate(row.last_lr) if row.steps else "",
            "padding": f"{row.padded_tokens / row.tokens:.2f}" if row.tokens else "",
            "s / step": f"{row.seconds / row.steps:.3g}" if row.seconds else "",
            "why": row.reason,
        }
        for row in rows_of(run.events)
    ]
    if not cells:
        return None
    header = [name for name in cells[0] if any(row[name] for row in cells)]
    return table(header, [[row[name] for name in header] for row in cells], words=[len(header) - 1], class_="decisions")


def configs(runs: list[Run]) -> Html | None:
    def card(_: int, run: Run) -> Html | None:
        found = snippet(run)
        if found is None:
            return None
        return Html(text("p", found.spares) + tag("pre", text("code", found.yaml), tabindex="0"))

    return _cards(runs, card)


def _cards(runs: list[Run], card: Callable[[int, Run], Html | None], class_: str = "cards") -> Html | None:
    """Return what ``card`` makes of each run, under its name where there are several; None if that is nothing."""
    cards = []
    for number, run in enumerate(runs):
        made = card(number, run)
        if made is not None:
            heading = tag("h3", _named(number, run)) if len(runs) > 1 else ""
            cards.append(tag("article", heading, made))
    return tag("div", *cards, class_=class_) if cards else None


def _paragraphs(sentences: list[str]) -> Html:
    return text("p", " ".join(sentences))


def _named(number: int, run: Run) -> Html:
    return tag("span", key(f"c{number % COLOURS}"), text("span", run.name))


def _with_small_print(fact: say.Fact) -> Html:
    return Html(text("span", fact.value) + (text("small", fact.more) if fact.more else ""))
