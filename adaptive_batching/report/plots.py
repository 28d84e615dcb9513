"""Plots of a run, drawn from its record. The only requirement is matplotlib (the ``plots`` extra).

As a script, it reads the events of a record from standard input, draws them into the given directory, and prints the
paths of the plots.
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # the object-oriented interface: no display, no global state

_GIB = 2**30


def draw(events: dict[str, list[dict[str, Any]]], directory: Path) -> list[Path]:
    """Draw the plots that the events of a record allow (see :func:`adaptive_batching.report.record.read_events`).

    Returns:
        The paths of the plots written.
    """
    paths = []
    if events["step"]:
        paths.append(_draw_training(events, directory / "training.png"))
    if events["probe"]:
        paths.append(_draw_probe(events["probe"][-1], directory / "probe.png"))
    return paths


def _draw_training(events: dict[str, list[dict[str, Any]]], path: Path) -> Path:
    """Plot loss, batch size (with the gradient noise scale, if known) and learning rate over the samples seen."""
    steps = events["step"]
    seen = list(accumulate(step["samples"] for step in steps))
    figure = Figure(figsize=(8, 6), layout="constrained")
    loss, batch, lr = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    seen_at = dict(zip((step["step"] for step in steps), seen, strict=True))
    loss.plot(seen, [step["loss"] for step in steps], color="tab:blue", linewidth=0.8)
    loss.set_ylabel("loss")
    validations = [event for event in events.get("validation", []) if event["step"] in seen_at]
    if validations:
        at = [seen_at[event["step"]] for event in validations]
        loss.plot(at, [event["loss"] for event in validations], color="tab:red", marker=".", label="validation")
        loss.legend()
    batch.step(seen, [step["samples"] for step in steps], where="pre", color="tab:orange")
    batch.set_ylabel("global batch size\n(samples)")
    noise = [(event["step"], event["noise_scale"]) for event in events.get("noise", []) if event["noise_scale"]]
    if noise:
        batch.plot([seen_at[step] for step, _ in noise], [scale for _, scale in noise], color="tab:red", linewidth=0.8,
                   label="gradient noise scale")  # fmt: skip
        batch.legend()
    batch.set_ylim(0, 2 * max(step["samples"] for step in steps))
    lr.plot(seen, [step["lr"] for step in steps], color="tab:green")
    lr.set_ylabel("learning rate")
    lr.set_xlabel("samples seen")
    starts = [0, *(seen[i] for i in range(len(steps) - 1) if steps[i + 1]["epoch"] != steps[i]["epoch"])]
    for axes in (loss, batch, lr):
        axes.grid(alpha=0.3)
        for start in starts[1:]:
            axes.axvline(start, color="grey", linewidth=0.8, linestyle=":")
    loss.set_title("Training (dotted: a new epoch)")
    figure.savefig(path, dpi=120)
    return path


def _draw_probe(probe: dict[str, Any], path: Path) -> Path:
    """Plot peak memory over the batch size: predicted, measured, and the budget."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    if probe["predicted"]:
        sizes, peaks = zip(*probe["predicted"], strict=True)
        axes.plot(sizes, [peak / _GIB for peak in peaks], color="tab:blue", label="predicted, calibrated")
    fitted = [m for m in probe["measurements"] if m["peak_bytes"] is not None]
    axes.plot(
        [m["batch_size"] for m in fitted], [m["peak_bytes"] / _GIB for m in fitted],
        "o", color="tab:orange", label="measured",
    )  # fmt: skip
    failed = [m["batch_size"] for m in probe["measurements"] if m["peak_bytes"] is None]
    if failed:
        axes.plot(failed, [probe["budget_bytes"] / _GIB] * len(failed), "x", color="tab:red", label="out of memory")
    axes.axhline(probe["budget_bytes"] / _GIB, color="tab:red", linestyle="--", label="budget")
    axes.axvline(probe["batch_size"], color="grey", linestyle=":", label=f"chosen: {probe['batch_size']}")
    axes.set_xlabel(f"batch size (samples of {probe['sequence_length']} tokens)")
    axes.set_ylabel("peak memory (GiB)")
    axes.set_ylim(bottom=0)
    axes.set_title("Probe")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    for picture in draw(json.load(sys.stdin), Path(sys.argv[1])):
        print(picture)
