"""Curves of a run over the samples that it has seen, with as many points as a page can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from adaptive_batching._report.events import Event, Events

MIB = 2**20

# Steps from which a running mean of the loss is drawn, and the share of the steps that it covers.
_STEPS_TO_SMOOTH = 40
_SMOOTHED_SHARE = 20


@dataclass(frozen=True)
class Curves:
    """Columns with a value for each point of a run, or None where it is not known."""

    columns: dict[str, list[float | None]]
    """By name, those alone of which something is known."""

    steps_per_point: int
    steps_of_trend: int
    """Optimizer steps that the running mean of the loss covers."""

    epochs: list[int]
    """Samples seen at the beginning of each epoch but the first."""

    recoveries: list[int]
    """Samples seen at the end of each step that had to run again."""


def curves_of(events: Events, most_points: int) -> Curves:
    steps = events["step"]
    seen = list(accumulate(step["samples"] for step in steps))
    size = max(1, math.ceil(len(steps) / most_points))
    noise = {event["step"]: event["noise_scale"] for event in events["noise"]}
    validation = {event["step"]: event["loss"] for event in events["validation"]}
    window = max(5, len(steps) // _SMOOTHED_SHARE)
    trend = _running_mean(steps, window) if len(steps) >= _STEPS_TO_SMOOTH else [None] * len(steps)

    points: list[dict[str, float | None]] = []
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        last, seconds = part[-1], _known(part, "seconds")
        points.append({
            "seen": seen[start + len(part) - 1],  # samples
            "step": last["step"],
            "loss": _mean_loss(part),
            "trend": trend[start + len(part) - 1],
            "validation": _last(validation, part),
            "batch": last["samples"],  # global
            "noise": _last(noise, part),  # scale, in samples
            "lr": last["lr"],
            "padding": _ratio(sum(_known(part, "padded_tokens")), sum(_known(part, "tokens"))),
            "seconds": _ratio(sum(seconds), len(seconds)),
            "memory": max((peak / MIB for peak in _known(part, "peak_bytes")), default=None),  # peak, in MiB
        })  # fmt: skip
    columns = {name: [_rounded(point[name]) for point in points] for name in (points[0] if points else ())}
    epochs = [at for at, step, after in zip(seen, steps, steps[1:], strict=False) if after["epoch"] != step["epoch"]]
    before = [0, *(step.get("recoveries", 0) for step in steps)]
    recoveries = [at for at, step, last in zip(seen, steps, before, strict=False) if step.get("recoveries", 0) > last]
    known = {name: column for name, column in columns.items() if any(value is not None for value in column)}
    return Curves(known, size, window, epochs, recoveries)


def _running_mean(steps: Sequence[Event], window: int) -> list[float | None]:
    """Return the mean loss, over samples, of the ``window`` steps that end with each; None before there are as many."""
    finite = [step if math.isfinite(step["loss"]) else {"loss": 0.0, "samples": 0} for step in steps]
    losses = [0.0, *accumulate(step["loss"] * step["samples"] for step in finite)]
    samples = [0, *accumulate(step["samples"] for step in finite)]
    means: list[float | None] = [None] * min(window - 1, len(steps))
    for last in range(window, len(steps) + 1):
        means.append(_ratio(losses[last] - losses[last - window], samples[last] - samples[last - window]))
    return means


def _mean_loss(steps: Sequence[Event]) -> float | None:
    finite = [step for step in steps if math.isfinite(step["loss"])]
    return _ratio(sum(step["loss"] * step["samples"] for step in finite), sum(step["samples"] for step in finite))


def _ratio(value: float, other: float) -> float | None:
    return value / other if other else None


def _known(steps: Sequence[Event], key: str) -> list[float]:
    values = (step.get(key) for step in steps)
    return [value for value in values if value is not None and math.isfinite(value)]


def _last(by_step: Mapping[int, float | None], steps: Sequence[Event]) -> float | None:
    known = [by_step.get(step["step"]) for step in reversed(steps)]
    return next((value for value in known if value is not None), None)


def _rounded(value: float | None) -> float | None:
    """Return a value with as many digits as can be seen."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
