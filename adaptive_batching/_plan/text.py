"""A plan in words: sizes, tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from adaptive_batching._plan.against_allocator import Agreement
from adaptive_batching._plan.devices import Outside
from adaptive_batching._plan.forecast import Need
from adaptive_batching._plan.published import Band
from adaptive_batching._plan.verdict import Answer, Verdict
from adaptive_batching._trace.allocator import GIB, MIB

_ANSWERS = {
    Answer.FITS: "fits",
    Answer.TIGHT: "tight",
    Answer.DOES_NOT_FIT: "does not fit",
    Answer.CANNOT_TELL: "cannot tell",
}


def size(num_bytes: float) -> str:
    if abs(num_bytes) >= GIB / 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.1f} MiB"


def work(flops: float) -> str:
    for unit, name in ((1e18, "EFLOPs"), (1e15, "PFLOPs"), (1e12, "TFLOPs")):
        if flops >= unit:
            return f"{flops / unit:.1f} {name}"
    return f"{flops / 1e9:.1f} GFLOPs"


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Return lines with columns that line up; the last column is as wide as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def first_line(verdict: Verdict, what: str, where: str) -> str:
    """Return the answer, on how much memory, and how much is left; ``what`` is the forward, ``where`` the device."""
    answer, left, memory = _ANSWERS[verdict.answer], verdict.left_bytes, verdict.memory_bytes
    if memory is None or left is None:
        return (
            f"{answer}: {what} needs {size(verdict.least_bytes)} to {size(verdict.most_bytes)}; give --memory or --gpu"
        )
    if verdict.answer is Answer.FITS:
        return f"{answer}: {what} needs at most {size(verdict.most_bytes)} of {size(memory)}{where}, {size(left)} left"
    if verdict.answer is Answer.TIGHT:
        needs = f"{size(verdict.least_bytes)} to {size(verdict.most_bytes)}"
        return (
            f"{answer}: {what} needs {needs} of {size(memory)}{where}; "
            f"{size(memory - verdict.least_bytes)} left in the best case, {size(-left)} too little in the worst"
        )
    return (
        f"{answer}: {what} needs at least {size(verdict.least_bytes)} of {size(memory)}{where}, "
        f"{size(verdict.least_bytes - memory)} too little"
    )


def what_counts(need: Need, outside: Sequence[Outside], paged_bytes: int) -> list[str]:
    """Return what a card must have: tensors, what the allocator reserves for them, and what else is in use."""
    reserved = need.reserved
    rows = [
        ["tensors", size(need.peak_bytes), f"{size(need.resting_bytes)} between steps"],
        ["reserved by the allocator", size(reserved.by_default), f"runs in {size(reserved.least)}, with retries"],
        ["with expandable segments", size(reserved.expandable), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"],
    ]
    rows += [[each.name, f"{size(each.least)} to {size(each.most)}", each.source] for each in outside]
    best = min(
        ("by default", reserved.least), ("with expandable segments", reserved.least_expandable), key=lambda x: x[1]
    )
    rows.append(
        ["fits from", size(reserved.by_default + sum(each.most for each in outside)), "reserved, and most beside it"]
    )
    least = best[1] + sum(each.least for each in outside)
    rows.append(["does not fit below", size(least), f"least that it runs in {best[0]}, and least beside it"])
    if paged_bytes:
        rows.append(
            ["paged optimizer states", size(paged_bytes), "managed memory, goes to the host where room is short"]
        )
    return ["What it takes", *table(rows)]


def what_sets_the_peak(need: Need) -> list[str]:
    rows = [
        [kind, size(each), f"{100 * each / need.peak_bytes:.0f} %"] for kind, each in need.kinds.items() if each >= MIB
    ]
    rows.sort(key=lambda row: -need.kinds[row[0]])
    return [f"What sets the peak: the {need.moment}", *table(rows)]


def how_sure(agreement: Agreement, band: Band) -> str:
    return f"How sure: {agreement}; {band}"
