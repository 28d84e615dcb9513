"""The record of a run: every decision as a line of JSON, a table for the last screen, and pictures where possible."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from adaptive_batching.noise_scale import NoiseEstimate
from adaptive_batching.plan import PlannedEpoch
from adaptive_batching.result import ProbeResult
from adaptive_batching.throughput import Exploration

log = logging.getLogger(__name__)

_MIB = 2**20


class Report:
    """Gathers what was decided, and writes it to ``report.jsonl`` as it happens.

    Args:
        directory: Where the record and the pictures go; made if need be.
        resume: Append to the record that is there, instead of starting a new one.
        writes: Whether this process is the one that writes it.
    """

    def __init__(self, directory: Path, *, resume: bool = False, writes: bool = True) -> None:
        self.directory = directory
        self.path = directory / "report.jsonl"
        self._writes = writes
        if writes:
            directory.mkdir(parents=True, exist_ok=True)
            if not resume:
                self.path.unlink(missing_ok=True)
        self._maximum: list[tuple[str, str]] = []
        self._explored: list[tuple[str, str]] = []
        self._recoveries = 0

    def maximum(self, batch_size: int, reason: str) -> None:
        """Record a maximum that needed no probe."""
        self._write("maximum", batch_size=batch_size, reason=reason)
        self._maximum = [("maximum batch size", f"{batch_size} ({reason})")]

    def probe(self, result: ProbeResult, *, sequence_length: int) -> None:
        """Record the result of a probe."""
        self._write("probe", sequence_length=sequence_length, **result.to_dict())
        budget = f"{result.budget_bytes / _MIB:,.0f} MiB"
        too_large = [(b, peak) for b, peak in result.predicted if b > result.batch_size and peak > result.budget_bytes]
        beyond = f"; {too_large[0][0]} would take about {too_large[0][1] / _MIB:,.0f} MiB" if too_large else ""
        runs = f"{result.num_steps} training steps, {result.num_out_of_memory} out of memory"
        self._maximum = [
            ("maximum batch size", f"{result.batch_size}, bound by {result.reason}"),
            (
                "memory",
                f"peak {result.peak_bytes / _MIB:,.0f} of {budget} at {sequence_length} tokens per sample{beyond}",
            ),
            ("found by", f"{result.search}: {runs}, {result.seconds:.1f} s"),
        ]
        if result.shorter:
            points = ", ".join(f"{batch_size} of {tokens} tokens" for tokens, batch_size, _ in result.shorter)
            self._maximum.insert(2, ("shorter samples", points))

    def epoch(self, **values: Any) -> None:
        """Record the decision for an epoch that starts."""
        self._write("epoch", **values)

    def change(self, **values: Any) -> None:
        """Record the decision for the rest of an epoch."""
        self._write("change", **values)

    def plan(self, epochs: Sequence[PlannedEpoch], *, decided: bool) -> None:
        """Record and log what is expected of each epoch.

        Args:
            epochs: Those that are left of the run.
            decided: Whether that is how it will be; else the batch may grow while training.
        """
        self._write("plan", decided=decided, epochs=[dataclasses.asdict(epoch) for epoch in epochs])
        header = ("epoch", "batch size", "global batch", "steps", "samples", "dropped", "last lr")
        rows = [
            (
                str(epoch.epoch), _span(epoch.batch_sizes), _span(epoch.global_batch_sizes), str(epoch.steps),
                str(epoch.samples), str(epoch.dropped_samples), f"{epoch.last_lr:.3g}",
            )
            for epoch in epochs
        ]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ["  ".join(cell.rjust(n) for cell, n in zip(row, widths, strict=True)) for row in (header, *rows)]
        total = sum(epoch.steps for epoch in epochs)
        title = "the plan" if decided else "the plan if the batch does not grow, which is decided while training"
        if self._writes:
            log.info("%s: %d optimizer steps\n  %s", title, total, "\n  ".join(lines))

    def exploration(self, result: Exploration) -> None:
        """Record the timings of an exploration."""
        best, base = result.recommended, result.estimates[0]
        self._write("exploration", **dataclasses.asdict(result))
        found = f"{best.candidate}, {best.speedup:.2f} times as fast as {base.candidate}"
        self._explored = [("micro_batch_size", f"{found}, confidence {100 * best.confidence:.0f} of 100")]

    def step(self, epoch: int, step: int, samples: int, loss: float, lr: float, recoveries: int = 0) -> None:
        """Record an optimizer step on ``samples`` samples, and how many steps have had to run again so far."""
        self._recoveries = recoveries
        self._write("step", epoch=epoch, step=step, samples=samples, loss=loss, lr=lr, recoveries=recoveries)

    def noise(self, step: int, shown: NoiseEstimate, noise_scale: float | None) -> None:
        """Record what an optimizer step has shown of the gradient's noise, and the noise scale so far, in samples."""
        self._write(
            "noise", step=step, tokens=shown.tokens, variance=shown.variance, norm_squared=shown.norm_squared,
            noise_scale=noise_scale,
        )  # fmt: skip

    def finish(self) -> None:
        """Draw the pictures, and log the table of what was decided and why."""
        if self._writes:
            log.info("what was decided, and why\n%s", "\n".join([*self.table(), *self._draw()]))

    def table(self) -> list[str]:
        """The lines of the summary: the maximum, then every epoch."""
        events = read_events(self.path)
        recovered = [("out of memory", f"{self._recoveries} times, recovered")] if self._recoveries else []
        lines = [f"  {name:<20} {value}" for name, value in [*self._maximum, *self._explored, *recovered]]
        lines += ["", f"  {'epoch':>5} {'batch size':>10} {'steps':>6} {'samples':>8} {'loss':>7} {'last lr':>9}  why"]
        starts = sorted([*events["epoch"], *events["change"]], key=lambda event: float(event["epoch"]))
        for start, end in pairwise([*starts, {"step": math.inf}]):
            steps = [step for step in events["step"] if start["step"] < step["step"] <= end["step"]]
            samples = sum(step["samples"] for step in steps)
            loss = sum(s["loss"] * s["samples"] for s in steps) / max(samples, 1)
            last_lr = steps[-1]["lr"] if steps else 0.0
            lines.append(
                f"  {start['epoch']:>5g} {start['batch_size']:>10} {len(steps):>6} {samples:>8} {loss:>7.3f} "
                f"{last_lr:>9.2e}  {start['reason']}"
            )
        return [*lines, "", f"  {'record':<20} {self.path}"]

    def _draw(self) -> list[str]:
        try:
            from adaptive_batching.plots import draw
        except ImportError:
            return [f"  {'pictures':<20} none: matplotlib is missing (pip install 'adaptive-batching[plots]')"]
        return [f"  {'picture':<20} {path}" for path in draw(read_events(self.path), self.directory)]

    def _write(self, event: str, **values: Any) -> None:
        if not self._writes:
            return
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")


def read_events(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of a record by kind. Of an epoch that was run twice, as after a resume, the last run counts."""
    kinds = ("maximum", "probe", "exploration", "plan", "epoch", "change", "step", "noise")
    events: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for line in path.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "epoch":
            for kind in ("epoch", "change", "step"):
                events[kind] = [e for e in events[kind] if e["epoch"] < event["epoch"]]
            events["noise"] = [e for e in events["noise"] if e["step"] <= event["step"]]
        events[event.pop("event")].append(event)
    return events


def _span(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"
