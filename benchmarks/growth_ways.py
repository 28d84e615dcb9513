"""The ways to train that ``growth_quality.py`` compares, and how each fares against those of a constant batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from break_even import Curve, common_target, mean_and_interval, pays, reached

EPOCHS = 3
CONFIGURED, LARGEST = "constant, configured", "constant, maximum, sqrt LR"
AUTO = {"micro_batch_size": "auto"}
SHORTER = "constant, configured, an epoch less"
CONTROLS: dict[str, dict[str, Any]] = {
    CONFIGURED: {},
    LARGEST: {**AUTO, "use_maximum_batch_size": True},
    SHORTER: {"epochs": EPOCHS - 1},
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "step": {"every": 0.75},
    "multistep": {"milestones": [1, 2], "gamma": 2.83},
    "staged": {"stages": {0: 4, 0.5: 8, 1: 16, 2: 32}},
    "linear": {},
    "polynomial": {"power": 2},
    "cosine": {},
    "late_switch": {"fraction": 0.5},
    "replace_lr_decay": {},
    "on_plateau": {"patience": 1, "min_delta": 0.02},
}
OF_LORA = ("step", "polynomial", "late_switch", "replace_lr_decay")

Curves = Mapping[str, Sequence[Curve]]


def ways_of(kind: str) -> dict[str, dict[str, Any]]:
    """Return the ways to train all weights (``full``) or adapters (``lora``), by name."""
    ways = dict(CONTROLS)
    for function, arguments in FUNCTIONS.items():
        if kind == "full" or function in OF_LORA:
            component = {"_component_": f"adaptive_batching.growth.{function}", **arguments}
            ways[function] = {**AUTO, "batch_increase_function": component}
    return ways


def against_best_control(curves: Curves, way: str) -> tuple[float, float]:
    """Return seconds and steps of a way over those of the best control, medians over seeds."""
    seconds, steps = [], []
    for seed, mine in enumerate(curves[way]):
        controls = [curves[control][seed] for control in CONTROLS]
        target = common_target(mine, controls)
        ours = reached(mine, target)
        theirs = [found for control in controls if (found := reached(control, target)) is not None]
        assert ours is not None and theirs
        seconds.append(_ratio(ours.seconds, min(each.seconds for each in theirs)))
        steps.append(_ratio(ours.steps, min(each.steps for each in theirs)))
    return statistics.median(seconds), statistics.median(steps)


def _ratio(ours: float, theirs: float) -> float:
    """Divide, where a control that ends above its first loss takes nothing to reach that."""
    return ours / theirs if theirs else math.inf


def break_evens(curves: Curves, way: str) -> list[tuple[float, float]]:
    """Return between which fixed costs, in samples, a way is the fastest, for each seed; never is from infinity on."""
    found = [
        pays(mine, [curves[control][seed] for control in CONTROLS if control != way])
        for seed, mine in enumerate(curves[way])
    ]
    return [each or (math.inf, math.inf) for each in found]


def table_of(curves: Curves) -> list[str]:
    """Return a Markdown table, a row for each way."""
    rows = [
        "| way | held-out loss | above the configured batch's | steps | seconds / best control's "
        "| steps / best control's | pays from | until |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way, runs in curves.items():
        loss, width = mean_and_interval([run[-1].loss for run in runs])
        pairs = zip(runs, curves[CONFIGURED], strict=True)
        above, of_above = mean_and_interval([run[-1].loss - control[-1].loss for run, control in pairs])
        difference = "" if way == CONFIGURED else f"{above:+.3f} ± {of_above:.3f}"
        seconds, steps = against_best_control(curves, way)
        first = last = ""
        if way not in CONTROLS:
            spans = break_evens(curves, way)
            first = spelled([start for start, _ in spans], "never")
            last = "" if first == "never" else spelled([end for _, end in spans], "no end")
        taken = statistics.median(run[-1].steps for run in runs)
        rows.append(
            f"| {way} | {loss:.3f} ± {width:.3f} | {difference} | {taken:.0f} | {seconds:.2f} | {steps:.2f} "
            f"| {first} | {last} |"
        )
    return rows


def spelled(values: Sequence[float], without: str) -> str:
    """Return the median of values and their range; ``without`` where all are infinite."""
    low, middle, high = min(values), statistics.median(values), max(values)
    if math.isinf(low):
        return without
    shown = ["∞" if math.isinf(value) else f"{value:.0f}" for value in (low, middle, high)]
    return f"{shown[1]} ({shown[0]} to {shown[2]})"


def best_schedule(curves: Curves) -> dict[str, Any]:
    """Return the increase function with the least seconds of those that end about as low as the best control."""
    losses = {way: statistics.median(run[-1].loss for run in runs) for way, runs in curves.items()}
    worst = 1.02 * min(losses[control] for control in CONTROLS)
    ratios = {way: against_best_control(curves, way) for way in FUNCTIONS if losses[way] <= worst}
    best = min(ratios, key=lambda way: ratios[way][0], default="none")
    seconds, steps = ratios.get(best, (float("nan"), float("nan")))
    return {
        "best_schedule": best,
        "wall_time_vs_best_control": round(seconds, 3),
        "steps_vs_best_control": round(steps, 3),
    }
