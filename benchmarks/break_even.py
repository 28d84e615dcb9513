"""When does a larger batch pay? From measured curves of the loss: steps and samples to the same loss.

A run that takes S optimizer steps on N samples to a loss takes ``S * f + N * c`` seconds, where c is what a sample
costs on a device that is kept busy, and f what a step costs whatever its samples: launching kernels, gathering shards,
the optimizer. Growing trades steps for samples. So it is faster than another run from that f on at which its fewer
steps outweigh its more samples, and a constant large batch, which takes fewer steps still, is faster from a larger f
on. Steps and samples do not depend on the device; f over c, the samples that a step's fixed cost is worth, does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

# Two-sided 95 % quantiles of Student's distribution, by degrees of freedom.
_T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True)
class Point:
    """A held-out loss, and what it took to get there."""

    steps: float
    samples: float
    seconds: float
    loss: float


Curve = Sequence[Point]


def reached(curve: Curve, target: float) -> Point | None:
    """Return where a curve first is at ``target`` or below, between two evaluations on the line; None for nowhere."""
    for before, after in pairwise(curve):
        if after.loss <= target:
            part = (before.loss - target) / (before.loss - after.loss) if before.loss > after.loss else 1.0
            part = min(max(part, 0.0), 1.0)
            return Point(
                before.steps + part * (after.steps - before.steps),
                before.samples + part * (after.samples - before.samples),
                before.seconds + part * (after.seconds - before.seconds),
                target,
            )
    return None


def common_target(way: Curve, controls: Sequence[Curve]) -> float:
    """Return the lowest loss that both a way and one of the controls end at or below."""
    return max(way[-1].loss, min(control[-1].loss for control in controls))


def pays(way: Curve, controls: Sequence[Curve]) -> tuple[float, float] | None:
    """Return between which fixed costs of a step, in samples, ``way`` is faster to its loss than every control.

    The second is infinite where no control has fewer steps. None if there is no such cost.
    """
    target = common_target(way, controls)
    mine = reached(way, target)
    assert mine is not None
    least, most = 0.0, math.inf
    for control in controls:
        theirs = reached(control, target)
        if theirs is None:
            continue
        fewer_steps, more_samples = theirs.steps - mine.steps, mine.samples - theirs.samples
        if fewer_steps > 0:
            least = max(least, more_samples / fewer_steps)
        elif fewer_steps < 0:
            most = min(most, more_samples / fewer_steps)
        elif more_samples >= 0:
            return None
    return (least, most) if least < most else None


def costs(curves: Mapping[str, Sequence[Curve]]) -> tuple[float, float]:
    """Return the seconds of a step whatever its samples, and those of a sample, fitted to all runs."""
    ends = [run[-1] for runs in curves.values() for run in runs]
    sides = torch.tensor([[end.steps, end.samples] for end in ends], dtype=torch.float64)
    seconds = torch.tensor([[end.seconds] for end in ends], dtype=torch.float64)
    per_step, per_sample = torch.linalg.lstsq(sides, seconds).solution.flatten().tolist()
    return per_step, per_sample


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a mean and half the width of its 95 % interval, which is infinite for a single value."""
    count = len(values)
    if count < 2:
        return values[0], math.inf
    quantile = _T.get(count - 1, 1.96)
    return statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(count)


def draw(curves: Mapping[str, Sequence[Curve]], constant: str, per_sample: float, path: Path, title: str) -> None:
    """Draw the time of each way to its loss over that of the configured batch, by what a step costs in samples."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    costs_in_samples = [2 ** (i / 4) for i in range(-8, 41)]
    styles = ["-", "--", ":"]
    for number, (way, runs) in enumerate(curves.items()):
        if way == constant:
            continue
        ratios = []
        for cost in costs_in_samples:
            of_seeds = []
            for mine, theirs in zip(runs, curves[constant], strict=True):
                target = common_target(mine, [theirs])
                ours, control = reached(mine, target), reached(theirs, target)
                assert ours is not None and control is not None
                of_seeds.append((ours.steps * cost + ours.samples) / (control.steps * cost + control.samples))
            ratios.append(statistics.median(of_seeds))
        axes.plot(costs_in_samples, ratios, label=way, linestyle=styles[number // 10 % 3])
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"fixed cost of a step, in samples ({1000 * per_sample:.0f} ms each where this was measured)")
    axes.set_ylabel("time to the same held-out loss / that of the configured batch")
    axes.set_ylim(0, 2)
    axes.set_title(title)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    figure.savefig(path, dpi=90)
