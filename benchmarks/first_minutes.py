"""Measure what a new user waits for: the quickstart, a script, the set-up of ``micro_batch_size: auto``, mistakes.

    pip install -e .[bench,dev]
    python benchmarks/first_minutes.py               # about 15 minutes on 2 cores

The quickstart runs in an empty folder, in a fresh process, from the command to its end; the first decision is the line
that says the maximum batch size. The first lines of each door are README's for Trainer and for a loop, and the example
of GRPO, as they stand. What ``auto`` costs and gains is measured as ``epoch_time.py`` does it, each run in a fresh
process. Mistakes are those of ``tests``: commands, settings and calls, each with the words that its answer has to hold.
The last line printed is a JSON object.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import measure_in_fresh_process, write_report
from epoch_time import BOUND, FULLY, NEAR, OURS, of_auto

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PROGRAM = [sys.executable, "-m", "adaptive_batching"]
FIRST_DECISION = "maximum batch size"


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def help_seconds(folder: Path) -> float:
    """Return the seconds that ``--help`` takes in a fresh process: the least of five, as the first reads the disk."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([*PROGRAM, "--help"], cwd=folder, env=environment(), stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - start)
    return round(min(seconds), 3)


def quickstart(folder: Path) -> dict[str, float]:
    """Run the quickstart in ``folder``; return the seconds to its first decision and to its end."""
    start = time.perf_counter()
    decided: float | None = None
    process = subprocess.Popen(
        [*PROGRAM, "quickstart"], cwd=folder, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if decided is None and FIRST_DECISION in line:
            decided = time.perf_counter() - start
    if process.wait() or decided is None:
        raise RuntimeError("".join(lines[-30:]))
    return {"first_decision": decided, "end": time.perf_counter() - start}


def doors(folder: Path) -> dict[str, float]:
    """Run the first lines that README has for each kind of user; return the seconds to their end, imports included."""
    shown = re.findall(r"(?s)```python\n(.*?)```", README.read_text())
    [of_trainer], [of_loop] = (
        [text for text in shown if name in text] for name in ("adaptive(Trainer)", "AdaptiveStep")
    )
    programs = {
        "trainer": ["-c", of_trainer],
        "loop": ["-c", of_loop],
        "grpo": [str(ROOT / "examples" / "grpo.py")],
    }
    seconds = {}
    for name, arguments in programs.items():
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], cwd=folder, env=environment(), check=True, capture_output=True)
        seconds[f"first_lines_of_{name}_seconds"] = round(time.perf_counter() - start, 1)
    return seconds


def mistakes() -> dict[str, int]:
    """Return how many mistaken commands, settings and calls the tests try, and how many are answered as they should."""
    files = [str(ROOT / "tests" / name) for name in ("integration/test_mistakes.py", "transformers/test_arguments.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-k", "mistake", *files]
    said = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True).stdout
    passed, failed = (sum(map(int, re.findall(rf"(\d+) {how}", said.splitlines()[-1]))) for how in ("passed", "failed"))
    return {"commands_tried": passed + failed, "commands_well_met": passed}


def main() -> None:
    """Measure everything and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/first_minutes_cpu.md")
    args = parser.parse_args()
    times: list[dict[str, float]] = []
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in (OURS, NEAR, FULLY, BOUND)}
    epochs = str(Path(__file__).with_name("epoch_time.py"))
    with tempfile.TemporaryDirectory() as directory:
        answered, first_lines = help_seconds(Path(directory)), doors(Path(directory))
        for repeat in range(args.repeats):
            folder = Path(directory) / str(repeat)
            folder.mkdir()
            times.append(quickstart(folder))
            print("quickstart:", times[-1], flush=True)
            ways = [*results][repeat % len(results) :] + [*results][: repeat % len(results)]
            for way in ways:
                result = measure_in_fresh_process("--measure", way, str(folder / "data/quickstart"), script=epochs)
                results[way].append(result)
                print(f"{way}:", {k: v for k, v in result.items() if k != "losses"}, flush=True)

    def median(key: str) -> float:
        return round(statistics.median(each[key] for each in times), 1)

    figures = {
        "quickstart_seconds_after_install": median("end"),
        "first_decision_seconds": median("first_decision"),
        **of_auto(results),
        "help_seconds": answered,
        **first_lines,
        **mistakes(),
    }
    rows = ["| what | measured |", "|---|---|", *(f"| {key} | {value} |" for key, value in figures.items())]
    facts = [f"medians of {args.repeats}; `auto`: 1280 samples, 64 in each optimizer step"]
    write_report("The first minutes", device="cpu", facts=facts, rows=rows, figures=figures, output=args.output)


if __name__ == "__main__":
    main()
