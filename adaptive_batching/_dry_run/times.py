"""How long a step takes, as a dry run says it: in words, as part of the JSON object, and of several runs as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adaptive_batching._gpus import Gpu
from adaptive_batching._step_time.forecast import Forecast, RunLength, cheapest_and_fastest, in_seconds
from adaptive_batching._step_time.seconds import LIMITS, Correction, largest_lines
from adaptive_batching._values import memory_size

if TYPE_CHECKING:
    from adaptive_batching._dry_run.answer import DryRun

MOST_LINES = 3
LEAST_GAIN = 0.02  # of tokens a second, for which a larger batch is worth its memory


@dataclass(frozen=True)
class Column:
    """One of the dry runs that are compared: of a card, or of a batch size on it."""

    name: str
    gpu: Gpu | None
    length: RunLength
    batch_size: int | None


def time_as_object(forecast: Forecast, length: RunLength, correction: Correction) -> dict[str, Any]:
    """Return what `--json` prints of it."""
    step, (low, high) = forecast.step, forecast.between or (None, None)
    return {
        "seconds_per_step": step.seconds,
        "seconds_low": low,
        "seconds_high": high,
        "kind": forecast.kind,
        "devices": forecast.devices,
        "samples_per_step": forecast.samples,
        "tokens_per_step": forecast.tokens,
        "samples_per_second": forecast.samples_per_second,
        "tokens_per_second": forecast.tokens_per_second,
        "steps_per_epoch": forecast.steps_in_epoch,
        "limit": LIMITS[step.limit],
        "limits": dict(forecast.shares()),
        "lines": {
            LIMITS[limit]: [{"where": where, "seconds": seconds} for where, seconds in largest_lines(lines)]
            for limit, lines in step.lines.items()
        },
        "uncounted": dict(forecast.uncounted),
        "correction": {"card": correction.card, "host": correction.host},
        "hours": forecast.hours(length),
        "cost": forecast.cost(length),
    }


def time_in_words(forecast: Forecast, length: RunLength) -> list[tuple[str, str]]:
    """Return lines, each with the name that stands before it."""
    step = forecast.step
    rate = f", {_rate(forecast)}/s" if forecast.samples else ""
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in forecast.shares())
    lines = [("time", f"{in_seconds(step.seconds)} a step{rate}: {shares}")]
    by_line = {(LIMITS[limit], where): took for limit, of in step.lines.items() for where, took in of.items() if where}
    for limit, where in sorted(by_line, key=lambda one: -by_line[one])[:MOST_LINES]:
        lines.append(("", f"{in_seconds(by_line[limit, where]):>11}  {limit}, {where}"))
    known = f"no published run of this kind ({forecast.kind}) to hold it against"
    if forecast.between is not None:
        low, high = forecast.between
        known = f"{in_seconds(low)} to {in_seconds(high)}, as nine in ten published runs do ({forecast.kind})"
    lines.append(("within", known))
    if forecast.uncounted:
        names = ", ".join(f"{name} ({times})" for name, times in forecast.uncounted.items())
        lines.append(("longer", f"these take longer than is known: {names}"))
    hours, cost = forecast.hours(length), forecast.cost(length)
    if hours is not None:
        lines.append(("in all", f"{hours:,.3g} hours" + ("" if cost is None else f", which cost {cost:,.2f}")))
    return lines


def compare(columns: Sequence[Column], runs: Sequence[DryRun]) -> tuple[dict[str, Any], list[str]]:
    """Return what `--json` prints of several dry runs, and a table in words."""
    from adaptive_batching._dry_run.answer import as_object

    forecasts, lengths = [run.forecast for run in runs], [column.length for column in columns]
    cheapest, fastest = cheapest_and_fastest(forecasts, lengths)
    rows = [["", "answer", "peak", "a step", "per second", "limited by", "hours", "cost", ""]]
    for number, (column, run, forecast) in enumerate(zip(columns, runs, forecasts, strict=True)):
        peak = (run.worst or {"peaks": {}})["peaks"].get("reserved")
        row = [column.name, str(run.answer), "-" if peak is None else memory_size(peak)]
        if forecast is None:
            row += ["-"] * 5
        else:
            (limit, share), *_ = forecast.shares()
            hours, cost = forecast.hours(column.length), forecast.cost(column.length)
            row += [
                in_seconds(forecast.step.seconds), _rate(forecast), f"{limit}, {100 * share:.0f} %",
                "-" if hours is None else f"{hours:,.3g}", "-" if cost is None else f"{cost:,.2f}",
            ]  # fmt: skip
        is_size = column.batch_size is not None
        marks = [word for word, at in (("cheapest", cheapest), ("fastest", fastest)) if at == number and not is_size]
        rows.append([*row, ", ".join(marks)])
    kept = [index for index in range(len(rows[0])) if any(row[index] not in ("", "-") for row in rows[1:])]
    widths = {index: max(len(row[index]) for row in rows) for index in kept}
    lines = ["  ".join(row[index].ljust(widths[index]) for index in kept).rstrip() for row in rows]
    shown = [
        {"name": column.name, "batch_size": column.batch_size, **as_object(run, column.length)}
        for column, run in zip(columns, runs, strict=True)
    ]
    compared: dict[str, Any] = {"runs": shown, "cheapest": None, "fastest": None, "enough": None}
    if columns[0].batch_size is None:
        compared["cheapest"] = None if cheapest is None else columns[cheapest].name
        compared["fastest"] = None if fastest is None else columns[fastest].name
        return compared, lines
    enough = _enough(columns, forecasts)
    compared["enough"] = enough
    if enough is not None:
        lines += ["", f"from a batch size of {enough} on, a larger one gains less than {100 * LEAST_GAIN:.0f} %"]
    return compared, lines


def _enough(columns: Sequence[Column], forecasts: Sequence[Forecast | None]) -> int | None:
    """Return the least batch size beyond which none of the larger ones gains as much as would be worth it."""
    rates = [
        (column.batch_size, (one.tokens_per_second or one.samples_per_second))
        for column, one in zip(columns, forecasts, strict=True)
        if one is not None
    ]
    for number, (size, rate) in enumerate(rates[:-1]):
        if all(larger < (1 + LEAST_GAIN) * rate for _, larger in rates[number + 1 :]):
            return size
    return None


def _rate(forecast: Forecast) -> str:
    if forecast.tokens:
        return f"{forecast.tokens_per_second:,.0f} tokens"
    return f"{forecast.samples_per_second:,.3g} samples" if forecast.samples else "-"
