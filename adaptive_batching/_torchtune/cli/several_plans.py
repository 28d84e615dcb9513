"""Several plans, of other GPUs or other settings: each in a process of its own, two at a time, as they come."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from adaptive_batching._dry_run.cards import Gpu
from adaptive_batching._dry_run.on_cards import interruptible
from adaptive_batching._dry_run.verdict import Answer
from adaptive_batching._torchtune.cli.levers import Lever, Planned, levers
from adaptive_batching._torchtune.cli.one_plan import SAID
from adaptive_batching._values import memory_size

AT_ONCE = 2  # processes


def _others(commands: Iterable[Sequence[str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each plan as it is made, in a process of its own."""

    def plan(arguments: Sequence[str]) -> dict[str, Any]:
        command = [sys.executable, "-m", "adaptive_batching", "plan", "--json", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(process)
        printed, said = process.communicate()
        try:
            found: dict[str, Any] = json.loads(printed)
            return found
        except ValueError:
            errors = SAID.findall(said)
            return {"answer": str(Answer.CANNOT_TELL), "reason": errors[-1] if errors else "it ended without an answer"}

    running: list[subprocess.Popen[str]] = []
    listed = [*commands]
    with interruptible(), ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            waiting = {pool.submit(plan, arguments): number for number, arguments in enumerate(listed)}
            while waiting:
                for future in [future for future in waiting if future.done()]:
                    yield waiting.pop(future), future.result()
                time.sleep(0.1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.terminate()
            raise


def compare_gpus(args: argparse.Namespace, gpus: Sequence[Gpu]) -> int:
    """Print the answer on several GPUs, one line each; return the exit code of the smallest."""
    config = [] if args.config is None else ["--config", args.config]
    rest = [*args.overrides, *config, *_options(args, args.sequence_length, args.gpus)]
    found = dict(_others([*rest, "--gpu", gpu.name] for gpu in gpus))
    plans = [found[number] for number in range(len(gpus))]
    smallest = plans[min(range(len(gpus)), key=lambda number: gpus[number].memory_bytes)]
    codes = {str(answer): answer.value for answer in Answer}
    if args.json:
        keys = ("answer", "reason", "memory_bytes", "largest_micro_batch", "token_budget", "time")
        of_gpus = [
            {"name": gpu.name, **{key: plan.get(key) for key in keys}} for gpu, plan in zip(gpus, plans, strict=True)
        ]
        print(json.dumps({**smallest, "gpus": of_gpus}, indent=1))
        return codes[smallest["answer"]]
    rows = [["GPU", "memory", "answer", "largest micro-batch", "tokens/s", "hours", "cost"]]
    for gpu, plan in zip(gpus, plans, strict=True):
        took = plan.get("time") or {}
        rate, hours, cost = (took.get(key) for key in ("tokens_per_second", "hours", "cost"))
        largest = plan.get("largest_micro_batch")
        rows.append([
            gpu.name, memory_size(gpu.memory_bytes), plan["answer"], "-" if largest is None else f"{largest:,}",
            "-" if rate is None else f"{rate:,.0f}", "-" if hours is None else f"{hours:,.3g}",
            "-" if cost is None else f"{cost:,.2f}",
        ])  # fmt: skip
    print("\n".join(_table(rows)))
    for gpu, plan in zip(gpus, plans, strict=True):
        if plan.get("reason"):
            print(f"  {gpu.name}: {plan['reason']}")
    return codes[smallest["answer"]]


def pull_levers(args: argparse.Namespace, run: Planned, length: int) -> list[dict[str, Any]]:
    """Plan each lever, and print it as its answer comes; return them, those with the most tokens first."""
    pulled = [*levers(Planned(run.recipe, run.config, run.cfg, run.overrides, length, run.devices))]
    device = ["--memory", args.memory] if args.memory is not None else ["--gpu", args.gpu[0]]
    rows: list[dict[str, Any]] = []
    if not args.json:
        print("\nWhat would help (each by itself)\n" + _lever_line("", "largest", "tokens/s", "to paste"), flush=True)
    for number, plan in _others([*_arguments(args, lever), *device] for lever in pulled):
        lever, took = pulled[number], plan.get("time") or {}
        row = {
            "name": lever.name, "paste": lever.paste, "sequence_length": lever.length,
            "largest_micro_batch": plan.get("largest_micro_batch"), "token_budget": plan.get("token_budget"),
            "tokens_per_second": took.get("tokens_per_second"), "reason": plan.get("reason"),
        }  # fmt: skip
        rows.append(row)
        if not args.json:
            largest, rate = row["largest_micro_batch"], row["tokens_per_second"]
            fits = "?" if largest is None else f"{largest:,} x {lever.length:,}"
            paste = lever.paste if row["reason"] is None else f"{lever.paste}: {row['reason']}"
            print(_lever_line(lever.name, fits, "-" if rate is None else f"{rate:,.0f}", paste), flush=True)
    return sorted(rows, key=lambda row: -(row["token_budget"] or 0))


def _arguments(args: argparse.Namespace, lever: Lever) -> list[str]:
    command = [lever.recipe, "--config", lever.config, *lever.overrides]
    return [*command, *_options(args, lever.length, lever.devices, recipe=False)]


def _options(args: argparse.Namespace, length: int | None, devices: int | None, *, recipe: bool = True) -> list[str]:
    """Return the options that plans which are made for another one have in common with it."""
    given = {
        "--recipe": args.recipe if recipe else None, "--sequence-length": length, "--gpus": devices,
        "--samples": args.samples, "--tokens": args.tokens, "--price": args.price,
    }  # fmt: skip
    return [part for name, value in given.items() if value is not None for part in (name, str(value))]


def _lever_line(name: str, fits: str, rate: str, paste: str) -> str:
    return f"  {name:<38}  {fits:<14}  {rate:<8}  {paste}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with columns that line up; the last column is as wide as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
