"""Curves of a run over the samples that it has seen, with as many points as a page can hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from adaptive_batching._report.events import Event, Events

MIB = 2**20

# Steps from which a running mean of the loss is drawn, and the share of the steps that it covers.
_STEPS_TO_SMOOTH = 40
_SMOOTHED_SHARE = 20


@dataclass(frozen=True)
class Curves:
    """Curves of a run. A column has a value for each point, or None where it is not known."""

    columns: dict[str, list[float | None]]
    """``seen`` (samples), ``step``, ``loss``, ``trend`` (running mean of the loss), ``validation`` (loss on held-out
    data), ``batch`` (global, in samples), ``noise`` (gradient noise scale, in samples), ``lr``, ``padding`` (padded
    tokens per token), ``seconds`` (of a step), ``memory`` (peak, in MiB); those alone of which something is known."""

    steps_per_point: int
    """Optimizer steps of a point: the mean of their losses, seconds and padding, their largest peak, their last size,
    rate, noise scale and validation."""

    steps_of_trend: int
    """Optimizer steps that the running mean covers."""

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

    def each(of: Callable[[Sequence[int]], float | None]) -> list[float | None]:
        points = [range(start, min(start + size, len(steps))) for start in range(0, len(steps), size)]
        return [_rounded(of(numbers)) for numbers in points]

    def values(numbers: Iterable[int], key: str) -> list[float]:
        found = [steps[number].get(key) for number in numbers]
        return [value for value in found if value is not None and math.isfinite(value)]

    def last_of(by_step: Mapping[int, float | None], numbers: Sequence[int]) -> float | None:
        known = [by_step.get(steps[number]["step"]) for number in numbers]
        return next((value for value in reversed(known) if value is not None), None)

    columns = {
        "seen": each(lambda numbers: seen[numbers[-1]]),
        "step": each(lambda numbers: steps[numbers[-1]]["step"]),
        "loss": each(lambda numbers: _mean_loss([steps[number] for number in numbers])),
        "trend": each(lambda numbers: trend[numbers[-1]]),
        "validation": each(partial(last_of, validation)),
        "batch": each(lambda numbers: steps[numbers[-1]]["samples"]),
        "noise": each(partial(last_of, noise)),
        "lr": each(lambda numbers: steps[numbers[-1]]["lr"]),
        "padding": each(lambda numbers: _ratio(values(numbers, "padded_tokens"), values(numbers, "tokens"))),
        "seconds": each(lambda numbers: _mean(values(numbers, "seconds"))),
        "memory": each(lambda numbers: max((peak / MIB for peak in values(numbers, "peak_bytes")), default=None)),
    }
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
        counted = samples[last] - samples[last - window]
        means.append((losses[last] - losses[last - window]) / counted if counted else None)
    return means


def _mean_loss(steps: Sequence[Event]) -> float | None:
    finite = [step for step in steps if math.isfinite(step["loss"])]
    samples = sum(step["samples"] for step in finite)
    return sum(step["loss"] * step["samples"] for step in finite) / samples if samples else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(values: Sequence[float], others: Sequence[float]) -> float | None:
    return sum(values) / sum(others) if sum(others) else None


def _rounded(value: float | None) -> float | None:
    """Return a value with as many digits as can be seen."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
