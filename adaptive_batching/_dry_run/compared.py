"""Several dry runs in one table: of cards, or of batch sizes on a card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adaptive_batching._dry_run.answer import DryRun, as_object
from adaptive_batching._dry_run.cards import Gpu
from adaptive_batching._dry_run.time.forecast import Forecast, RunLength, cheapest_and_fastest, in_seconds
from adaptive_batching._dry_run.times import in_a_second
from adaptive_batching._values import memory_size

LEAST_GAIN = 0.02  # of tokens a second, for which a larger batch is worth its memory


@dataclass(frozen=True)
class Column:
    """One of the dry runs that are compared: of a card, or of a batch size on it."""

    name: str
    gpu: Gpu | None
    length: RunLength
    batch_size: int | None


def compare(columns: Sequence[Column], runs: Sequence[DryRun]) -> tuple[dict[str, Any], list[str]]:
    """Return what `--json` prints of several dry runs, and a table in words."""
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
                in_seconds(forecast.step.seconds), in_a_second(forecast), f"{limit}, {100 * share:.0f} %",
                "-" if hours is None else f"{hours:,.3g}", "-" if cost is None else f"{cost:,.2f}",
            ]  # fmt: skip
        is_size = column.batch_size is not None
        marks = [word for word, at in (("cheapest", cheapest), ("fastest", fastest)) if at == number and not is_size]
        rows.append([*row, ", ".join(marks)])
    kept = [index for index in range(len(rows[0])) if any(row[index] not in ("", "-") for row in rows[1:])]
    widths = {index: max(len(row[index]) for row in rows) for index in kept}
    lines = ["  ".join(row[index].ljust(widths[index]) for index in kept).rstrip() for row in rows]
    known = [one for one in forecasts if one is not None]
    alone = dict.fromkeys(one.card for one in known if one.accuracy is None or not one.accuracy.knows(one.card))
    if alone:
        lines += ["", f"no published run to compare times with: {', '.join(alone)}"]
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
