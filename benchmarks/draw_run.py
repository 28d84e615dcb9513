"""Draw the README's picture from the record that a run has left.

    adaptive-batching quickstart
    python benchmarks/draw_run.py outputs/quickstart/full_single_device/adaptive_batching/report.jsonl docs/run.svg

Top: the batch size of each optimizer step, and the largest one that fits. Bottom: the loss of each step. Both are over
the samples seen; a red dot is a step that ran out of memory and ran again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LEFT, RIGHT = 60, 700
BLUE, GREEN, RED, GREY = "#3f74b3", "#2e7d32", "#c62828", "#666666"


def text(x: float, y: float, words: str, color: str = "#333333", **attributes: Any) -> str:
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{color}"{extra}>{words}</text>'


def line(points: Sequence[tuple[float, float]], color: str, dashes: str = "") -> str:
    pairs = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{pairs}" fill="none" stroke="{color}" stroke-width="2"{dashed}/>'


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (end - start) * (value - low) / (high - low)


def draw(events: Sequence[dict[str, Any]]) -> str:
    """Return an SVG of 720 x 330 pixels for the events of one run that was not interrupted."""
    [probe] = [event for event in events if event["event"] == "probe"]
    [run] = [event for event in events if event["event"] == "run"]
    steps = [event for event in events if event["event"] == "step"]
    epochs = [event for event in events if event["event"] == "epoch"]
    seen = [0]
    for step in steps:
        seen.append(seen[-1] + step["samples"])
    recovered = [now["recoveries"] > before for before, now in zip([0, *(s["recoveries"] for s in steps)], steps)]  # noqa: B905
    x = scale(0, seen[-1], LEFT, RIGHT)
    size = scale(0, 1.15 * probe["batch_size"], 140, 40)
    losses = [step["loss"] for step in steps]
    loss = scale(min(losses), max(losses), 290, 185)
    sizes = [(x(at), size(step["samples"])) for step, *ends in zip(steps, seen, seen[1:], strict=False) for at in ends]
    parts = [
        text(20, 24, "batch size", font_weight="bold"),
        line([(LEFT, 140), (RIGHT, 140)], "#999999"),
        line([(LEFT, size(probe["batch_size"])), (RIGHT, size(probe["batch_size"]))], GREEN, "6 4"),
        text(
            LEFT + 4,
            size(probe["batch_size"]) - 6,
            f"largest that fits, probed before training: {probe['batch_size']}",
            GREEN,
        ),
        line(sizes, BLUE),
        text(20, 168, "loss", font_weight="bold"),
        line([(LEFT, 290), (RIGHT, 290)], "#999999"),
        line([(x(at), loss(value)) for at, value in zip(seen[1:], losses, strict=True)], BLUE),
    ]
    for epoch in epochs:
        at = x(seen[epoch["step"]])
        parts.append(text(at + 4, 306, f"epoch {epoch['epoch']}", GREY))
        parts.append(text(at + 4, size(epoch["batch_size"]) + 16, str(epoch["batch_size"]), BLUE))
    for at, value, again in zip(seen[1:], losses, recovered, strict=True):
        if again:
            parts.append(f'<circle cx="{x(at):.1f}" cy="{loss(value):.1f}" r="5" fill="{RED}"/>')
            words = "out of memory: the same samples ran again, in smaller parts"
            parts.append(line([(x(at), 212), (x(at), loss(value))], RED, "2 3"))
            parts.append(text(x(at) + 4, 206, words, RED, text_anchor="end"))
    measured = f"measured: the quickstart on a {run['device']}, {seen[-1]:,} samples, {len(steps)} optimizer steps"
    parts.append(text(RIGHT, 324, measured, GREY, text_anchor="end", font_size=11))
    looks = 'viewBox="0 0 720 330" font-family="sans-serif" font-size="13" role="img"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {looks}>'
    title = f"<title>Batch size and loss of the quickstart; {measured}</title>"
    return "\n  ".join([head, title, '<rect width="720" height="330" fill="#ffffff"/>', *parts]) + "\n</svg>\n"


def main() -> None:
    """Read a record and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    args.picture.write_text(draw([json.loads(each) for each in args.record.read_text().splitlines()]))


if __name__ == "__main__":
    main()
