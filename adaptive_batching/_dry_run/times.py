"""How long a step takes, as a dry run says it: in words, and as part of the JSON object."""

from __future__ import annotations

from typing import Any

from adaptive_batching._dry_run.time.forecast import Forecast, RunLength, in_seconds
from adaptive_batching._dry_run.time.seconds import CONSTANTS, LIMITS, SLOW_HOST, Correction, largest_lines

MOST_LINES = 3
WORTH_SAYING = 1.1  # times as long, with a slow host


def time_as_object(forecast: Forecast, length: RunLength, correction: Correction) -> dict[str, Any]:
    """Return what `--json` prints of it."""
    step, (low, high) = forecast.step, forecast.between or (None, None)
    return {
        "seconds_per_step": step.seconds,
        "seconds_low": low,
        "seconds_high": high,
        "seconds_on_slow_host": forecast.on_slow_host or None,
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
    rate = f", {in_a_second(forecast)}/s" if forecast.samples else ""
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in forecast.shares())
    lines = [("time", f"{in_seconds(step.seconds)} a step{rate}: {shares}")]
    by_line = {(LIMITS[limit], where): took for limit, of in step.lines.items() for where, took in of.items() if where}
    for limit, where in sorted(by_line, key=lambda one: -by_line[one])[:MOST_LINES]:
        lines.append(("", f"{in_seconds(by_line[limit, where]):>11}  {limit}, {where}"))
    known = f"no published run of this kind ({forecast.kind}) to compare with"
    if forecast.accuracy is not None and forecast.between is not None:
        low, high = map(in_seconds, forecast.between)
        known = f"{low} to {high}, where 90 % of published runs lie ({forecast.kind})"
        if not forecast.accuracy.knows(forecast.card):
            known = f"{low} to {high}, where 90 % lie on a new card ({forecast.kind}; none was on {forecast.card})"
    lines.append(("within", known))
    if forecast.on_slow_host > WORTH_SAYING * step.seconds:
        of_slow, usual = (round(1e6 * CONSTANTS.launch * factor) for factor in (SLOW_HOST, 1))
        took = in_seconds(forecast.on_slow_host)
        launches = f"{of_slow} us to launch an operation, as on some hosts, instead of {usual}"
        lines.append(("slow host", f"{took} if the CPU takes {launches}"))
    if forecast.uncounted:
        names = ", ".join(f"{name} ({times})" for name, times in forecast.uncounted.items())
        lines.append(("longer", f"these take longer than forecast: {names}"))
    hours, cost = forecast.hours(length), forecast.cost(length)
    if hours is not None:
        price = "" if cost is None else f" for {cost:,.2f}"
        lines.append(("in all", f"{hours:,.3g} hours{price}, without loading data, evaluation and checkpoints"))
    elif length.epochs is not None:
        lines.append(("in all", "not known: no data loader has a length; give --steps-in-all or --tokens"))
    elif length.tokens is not None:
        lines.append(("in all", "not known: the model's inputs are not tokens; give --steps-in-all"))
    return lines


def in_a_second(forecast: Forecast) -> str:
    """Write how many tokens a second takes, or samples where there are no tokens."""
    if forecast.tokens:
        return f"{forecast.tokens_per_second:,.0f} tokens"
    return f"{forecast.samples_per_second:,.3g} samples" if forecast.samples else "-"
