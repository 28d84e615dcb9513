"""Draw the pictures of the documentation: ``make pictures``.

Two are SVGs that follow the reader's light or dark mode: ``packed.svg`` shows samples padded and packed, and
``throughput.svg`` has the numbers of ``results/gpu_cuda.md``. The others are taken of pages by Chromium, in both modes:
of a run (``make quickstart`` makes one) and of a dry run (``dry-run --page``)::

    python benchmarks/pictures.py --run outputs/quickstart/full_single_device/adaptive_batching/report.html \\
        --dry-run page.html
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 12px; fill: #59636e }
.data { fill: #2f6fb5 } .other { fill: #86a7c9 } .padding { fill: #d8dee4 } .edge { stroke: #fff; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 }
.data { fill: #5b9bdc } .other { fill: #3d5a78 } .padding { fill: #30363d } .edge { stroke: #0d1117 }
}
</style>"""
LENGTHS = (9, 30, 14, 6, 21, 11, 17, 8)  # tokens of the samples in the picture
WIDTH = 60  # tokens that a row of the picture has room for
TOKEN = 10  # pixels
METHODS = {
    "Trainer: Trainer": "padded batches of 32",
    "Trainer: padding_free": "padding-free collator",
    "Trainer: group_by_length": "group_by_length",
    "Trainer: adaptive": 'adaptive="auto"',
}


def svg(width: int, height: int, title: str, shapes: list[str]) -> str:
    """Return a picture, with a title for who cannot see it."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -4 {width + 16} {height + 8}" width="{width + 16}" '
        f'role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        STYLE,
        *shapes,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def rect(x: float, y: float, width: float, kind: str) -> str:
    """Return a bar, 18 pixels high."""
    return f'<rect class="{kind} edge" x="{x:g}" y="{y:g}" width="{width:g}" height="18" rx="2"/>'


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a line of text, of which ``y`` is the foot."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>'


def packed() -> str:
    """Return samples padded to the longest in two batches, and the same samples end to end in rows."""
    batches = (LENGTHS[:4], LENGTHS[4:])
    tokens = sum(LENGTHS)
    padded = sum(len(batch) * max(batch) for batch in batches)
    shapes = [text(0, 16, f"padded: {padded} tokens are computed for {tokens} tokens of data")]
    y = 26
    for batch in batches:
        for length in batch:
            shapes += [rect(0, y, max(batch) * TOKEN, "padding"), rect(0, y, length * TOKEN, "data")]
            y += 20
        y += 8
    y += 18
    shapes.append(text(0, y, f"packed end to end: {tokens} tokens, and each sample sees itself alone"))
    y += 10
    at = 0
    for number, length in enumerate(LENGTHS):
        if at + length > WIDTH:
            y, at = y + 20, 0
        shapes.append(rect(at * TOKEN, y, length * TOKEN, "data" if number % 2 == 0 else "other"))
        at += length
    return svg(WIDTH * TOKEN, y + 20, "The same eight samples, padded and packed", shapes)


def throughput() -> str:
    """Return tokens per second of each way in which the GPU benchmark trained with Trainer."""
    lines = (RESULTS / "gpu_cuda.md").read_text().splitlines()
    tables = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("|")]
    rows = {cells[1]: cells for cells in tables if cells[1] in METHODS}
    # The heads are those above the first row of Trainer's.
    heads = tables[tables.index(rows["Trainer: Trainer"]) - 2]
    speed_of, set_up_of = (heads.index(name) for name in ("tokens per second", "set up seconds"))
    speeds = {shown: float(rows[name][speed_of]) for name, shown in METHODS.items()}
    scale = 380 / max(speeds.values())
    title = "Tokens per second with Trainer, 0.5 billion parameters on an H100"
    shapes = [text(0, 16, title)]
    for number, (shown, speed) in enumerate(speeds.items()):
        y = 30 + 26 * number
        shapes += [
            text(0, y + 14, shown),
            rect(180, y, speed * scale, "data" if "adaptive" in shown else "other"),
            text(188 + speed * scale, y + 14, f"{round(speed, -2):,.0f}"),
        ]
    set_up = rows["Trainer: adaptive"][set_up_of]
    foot = f"64 samples of up to 1,024 tokens a step, without flash-attn; ours after {set_up} s of set-up"
    shapes.append(text(0, 30 + 26 * len(speeds) + 16, foot, "small"))
    return svg(640, 30 + 26 * len(speeds) + 24, title, shapes)


DRAWN = {"packed.svg": packed, "throughput.svg": throughput}


def take(page: Path, name: str, height: int) -> None:
    """Take pictures of the top of a page, in light and dark mode."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("install Chromium to take pictures of pages")
    for mode, scheme in {"light": 1, "dark": 0}.items():
        picture = PICTURES / f"{name}-{mode}.png"
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--window-size=1000,{height}", f"--blink-settings=preferredColorScheme={scheme}",
            f"--screenshot={picture}", page.resolve().as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="the page of a run")
    parser.add_argument("--dry-run", type=Path, help="the page of a dry run")
    args = parser.parse_args()
    for name, draw in DRAWN.items():
        (PICTURES / name).write_text(draw())
    if args.run:
        take(args.run, "run", 960)
    if args.dry_run:
        take(args.dry_run, "dry-run", 960)


if __name__ == "__main__":
    main()
