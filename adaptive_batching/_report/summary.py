"""A run in lines of a terminal: what was found, the plan, and every decision with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adaptive_batching._growth.batch_size_schedule import PlannedEpoch
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._report.events import DecisionTotals, StepCost
from adaptive_batching._report.facts import first_too_large
from adaptive_batching._values import memory_size, plural

Named = tuple[str, str]
"""The label of a line, and its text."""


def lines_of_probe(result: ProbeResult, sequence_length: int, of: str = "maximum batch size") -> list[Named]:
    """Return what a probe has found, ``of`` what."""
    budget = memory_size(result.budget_bytes)
    if result.enough is not None:
        memory = f"peak {memory_size(result.peak_bytes)} of {budget}"
        if result.enough > result.batch_size:
            at = next((peak for size, peak in result.predicted if size >= result.enough), result.peak_bytes)
            memory = f"predicted {memory_size(at)} of {budget}, not measured at full size"
        lines = [
            ("forward passes", f"of up to {result.enough} x {sequence_length} tokens; larger ones would gain little"),
            ("memory", memory),
        ]
    else:
        larger = first_too_large(result.predicted, result.batch_size, result.budget_bytes)
        is_rounded = result.exact is not None  # then the line above says what would fit
        beyond = "" if larger is None or is_rounded else f"; {larger[0]} would take about {memory_size(larger[1])}"
        peak = f"peak {memory_size(result.peak_bytes)} of {budget}"
        lines = [
            (of, f"{result.batch_size}, bound by {result.bound}"),
            ("memory", f"{peak} at {sequence_length} tokens per sample{beyond}"),
        ]
    runs = f"{plural(result.num_steps, 'training step')}, {result.num_out_of_memory} out of memory"
    return [*lines, ("found by", f"{result.search}: {runs}, {result.seconds:.1f} s")]


def table_of_plan(epochs: Sequence[PlannedEpoch]) -> list[str]:
    """Return a line for each epoch, under one that names the columns."""
    rows = [["epoch", "batch size", "global batch", "steps", "samples", "dropped", "last lr"]]
    for epoch in epochs:
        spans = [f"{sizes[0]}-{sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
                 for sizes in (epoch.batch_sizes, epoch.global_batch_sizes)]  # fmt: skip
        counts = [str(number) for number in (epoch.steps, epoch.samples, epoch.dropped_samples)]
        rows.append([str(epoch.epoch), *spans, *counts, "" if epoch.last_lr is None else f"{epoch.last_lr:.3g}"])
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(n) for cell, n in zip(row, widths, strict=True)) for row in rows]


def table_of_decisions(totals: Iterable[DecisionTotals]) -> list[str]:
    return [
        f"  {'epoch':>5} {'batch size':>10} {'steps':>6} {'samples':>8} {'loss':>7} {'last lr':>9}  why",
        *(
            f"  {each.epoch:>5g} {each.batch_size:>10} {each.steps:>6} {each.samples:>8} {each.mean_loss:>7.3f} "
            f"{each.last_lr:>9.2e}  {each.reason}"
            for each in totals
        ),
    ]


def columns(batch_size: int, cost: StepCost | None, recoveries: int) -> str:
    """Return what a progress bar says of a step, as far as it is known."""
    words = [f"batch {batch_size}"]
    if cost is not None and cost.tokens and cost.padded_tokens is not None:
        words.append(f"padded {cost.padded_tokens / cost.tokens:.2f}x")
    if recoveries:
        words.append(f"recovered {recoveries}")
    return ", ".join(words)


def named(lines: Iterable[Named]) -> list[str]:
    return [f"  {name:<20} {value}" for name, value in lines]
