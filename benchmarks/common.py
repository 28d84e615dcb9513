"""What the benchmarks share: fresh processes, and the file that a result is kept in.

Nothing of the package is imported at the top: a process that measures something else must not pay for it.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

PACKAGES = ("torch", "torchtune", "torchao")


class Recipe(Protocol):
    """A recipe that has been set up: ours, or torchtune's."""

    _device: Any
    _metric_logger: Any
    _model: Any
    _tokenizer: Any
    save_checkpoint: Any

    def train(self) -> None: ...


class ProcessFailed(RuntimeError):
    """A process ended with an error; the message is what it wrote."""


def measure_in_fresh_process(
    *arguments: str, script: str = "", environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run ``script``, or else this one, with ``arguments`` in a process of its own; its last line is a JSON object.

    Raises:
        ProcessFailed: If it ends with another status than 0.
    """
    command = [sys.executable, script or sys.argv[0], *arguments]
    # Threads that spin while they wait would take ten times as long beside another program.
    env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise ProcessFailed(done.stderr[-4000:].strip() or f"status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def by_bisection(fits: Callable[[int], bool]) -> int:
    """Return a largest size that fits, by doubling and bisection; 0 if not even 1 does."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_of_all(fits: Callable[[int], bool]) -> int:
    """Return the largest size that fits, among all from 4 below the boundary up to 4 failures in a row above it."""
    largest = by_bisection(fits)
    size = max(largest - 4, 1)
    while size <= largest + 4:
        if fits(size):
            largest = max(largest, size)
        size += 1
    return largest


def measure_in_turns(
    ways: Iterable[str], repeats: int, arguments: Callable[[str], Sequence[str]]
) -> dict[str, list[dict[str, Any]]]:
    """Measure each way ``repeats`` times, in processes of their own; each repeat begins with another way.

    Args:
        ways: Their names.
        repeats: Results of each way.
        arguments: Returns those of the process that measures a way.
    """
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for repeat in range(repeats):
        first = repeat % len(results)
        for way in [*results][first:] + [*results][:first]:
            results[way].append(measure_in_fresh_process(*arguments(way)))
            shown = {key: value for key, value in results[way][-1].items() if key != "losses"}
            print(f"{way}: {shown}", flush=True)
    return results


def write_report(
    title: str,
    *,
    device: str,
    facts: Sequence[str],
    rows: Sequence[str],
    figures: Mapping[str, Any],
    output: Path | None,
    packages: Sequence[str] = PACKAGES,
    quiet: bool = False,
    device_name: str = "",
) -> None:
    """Write a result with what it was measured on; print its table and, in the last line, its figures.

    Args:
        title: Heading of the file.
        device: ``cpu``, ``cuda`` or ``emulated``, which is CUDA to torch.
        facts: What else a reader has to know, a line for each.
        rows: The table, in Markdown.
        figures: The result in numbers.
        output: The file; None: ``benchmarks/results/<script>_<device>.md``.
        packages: Distributions whose versions matter.
        quiet: Print nothing.
        device_name: For a process that must not ask the device, as one that is to be forked.
    """
    from adaptive_batching._memory.meter import memory_meter

    name = device_name or memory_meter("cuda" if device == "emulated" else device).device_name
    versions = ", ".join(f"{package} {_version(package)}" for package in packages)
    report = [
        f"# {title}",
        f"\n    {shlex.join(['python', *sys.argv])}\n",
        f"- {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC; {name}, {len(os.sched_getaffinity(0))} CPU cores; "
        f"Python {platform.python_version()}, {versions}; commit {commit()}",
        *(f"- {fact}" for fact in facts),
        "",
        *rows,
        f"\n    {json.dumps(figures)}",
    ]
    output = output or Path(__file__).parent / "results" / f"{Path(sys.argv[0]).stem}_{device}.md"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(report) + "\n")
    if not quiet:
        print("\n".join(rows))
        print(json.dumps(figures))


def commit() -> str:
    """Return the measured commit, with ``-dirty`` where files differ from it; results may, as each run writes some."""
    git = ["git", "-C", str(Path(__file__).parent)]
    changed = ["status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)benchmarks/results"]
    try:
        commit, changes = (
            subprocess.run([*git, *arguments], capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (["rev-parse", "--short", "HEAD"], changed)
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changes else commit


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"
