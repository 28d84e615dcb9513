"""A picture of a plan: what a step takes over the batch size. Needs matplotlib, the ``plots`` extra."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure  # the object-oriented interface: no display, no global state

from adaptive_batching._plan.forecast import Forecast
from adaptive_batching._trace.allocator import GIB
from adaptive_batching._trace.traced_step import KINDS

_POINTS = 12


def draw_plan(
    forecast: Forecast, path: Path, title: str, asked: int, largest: int | None, memory_bytes: int | None
) -> None:
    """Draw what is alive at the peak by kind, and what a card must have, over the batch size.

    ``asked`` counts the samples of a forward that the config asks for, ``largest`` the most that fit.
    """
    last = max(2 * asked, 8) if largest is None else max(asked, largest + largest // 4, 8)
    sizes = sorted({1, asked, largest or 1, *(1 + (last - 1) * step // (_POINTS - 1) for step in range(_POINTS))})
    alive = [forecast.step.at(size).at_peak()[1] for size in sizes]
    kinds = [kind for kind in KINDS if any(each[kind] for each in alive)]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(sizes, [[each[kind] / GIB for each in alive] for kind in kinds], labels=kinds, alpha=0.6)
    most = [forecast.most_bytes(size) / GIB for size in sizes]
    axes.plot(sizes, most, color="black", linewidth=1, label="with this much it fits")
    if memory_bytes is not None:
        axes.axhline(memory_bytes / GIB, color="tab:red", linestyle="--", label=f"{memory_bytes / GIB:.1f} GiB")
    axes.axvline(asked, color="grey", linewidth=0.8, label=f"asked for: {asked}")
    if largest:
        axes.axvline(largest, color="grey", linestyle=":", label=f"largest that fits: {largest}")
    axes.set_xlabel("samples of a forward")
    axes.set_ylabel("memory (GiB)")
    axes.set_xlim(1, sizes[-1])
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=120)
