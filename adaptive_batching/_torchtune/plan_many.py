"""Plans of many runs: with each lever pulled, and over lengths and batch sizes. They are made in parallel.

Their processes are forked from one that has only imported what they need, not from the one that asks: where autograd
has run with a CUDA build of torch, which the plan itself has it do, it refuses to run in a fork.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from typing import Any

from adaptive_batching._plan import text
from adaptive_batching._plan.forecast import Need
from adaptive_batching._torchtune.levers import Lever, levers
from adaptive_batching._torchtune.planning import Question, Sketch, TooLongError, sketch

LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Tokens of a sample in a table, where they are not given."""

BATCHES = (1, 2, 4, 8, 16, 32)
"""Samples of a forward in a table."""


_CORES = os.cpu_count() or 1
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["adaptive_batching._torchtune.plan_process"])


def start_processes() -> None:
    """Start the process that others are forked from. What it imports takes seconds, in which this one can go on."""
    if _CORES > 1:
        forkserver.ensure_running()


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def pull_levers(question: Question, made: Sketch, need: Need, memory_bytes: int | None) -> list[dict[str, Any]]:
    """Return what each lever saves and the largest batch with it, best first."""
    tasks = [(lever, made.asked, memory_bytes) for lever in levers(question, made.length)]
    found = _in_parallel(_pulled, tasks)
    for each in found:
        if each["reserved_bytes"] is not None:
            each["saved_bytes"] = need.reserved.by_default - each["reserved_bytes"]
    return sorted(found, key=lambda each: -(each["saved_bytes"] if each["saved_bytes"] is not None else -(2**62)))


def show_levers(found: Sequence[dict[str, Any]], made: Sketch) -> list[str]:
    """Return the lines that say what :func:`pull_levers` found."""
    rows = [["", "saves", "then fits", "to paste"]]
    for each in found:
        saved = "?" if each["saved_bytes"] is None else text.size(each["saved_bytes"])
        largest = each["largest_micro_batch"]
        fits = "?" if largest is None else f"{largest} x {each['sequence_length']:,}"
        rows.append(
            [each["name"], saved, fits, each["paste"] if each["reason"] is None else f"not planned: {each['reason']}"]
        )
    return [f"What would help, of {made.asked} x {made.length:,} tokens", *text.table(rows)]


def over_lengths(question: Question, longest: int | None, memory_bytes: int | None) -> list[dict[str, Any]]:
    """Return what forwards need at each length that the model takes, up to ``longest`` tokens if that is known.

    That is the least forward that the config asks for, those of :data:`BATCHES`, and the largest that fits.
    """
    lengths = LENGTHS if longest is None else (*(length for length in LENGTHS if length < longest), longest)
    found = _in_parallel(_at_length, [(question, length, memory_bytes) for length in lengths])
    return [each for each in found if each is not None]


def show_lengths(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of :func:`over_lengths`."""
    rows = [["tokens", *(f"{batch} need" for batch in BATCHES), "largest micro-batch"]]
    for each in found:
        largest = "?" if each["largest_micro_batch"] is None else str(each["largest_micro_batch"])
        needs = [text.size(each["needed_by_batch"][str(batch)]) for batch in BATCHES]
        rows.append([f"{each['sequence_length']:,}", *needs, largest])
    return ["Samples in a forward", *text.table(rows)]


def _pulled(task: tuple[Lever, int, int | None]) -> dict[str, Any]:
    lever, batch_size, memory_bytes = task
    found: dict[str, Any] = {"name": lever.name, "paste": lever.paste, "saved_bytes": None, "reserved_bytes": None,
                             "largest_micro_batch": None, "sequence_length": lever.length, "reason": None}  # fmt: skip
    try:
        made = sketch(lever.question, lever.length)
        found["reserved_bytes"] = made.forecast.need(batch_size).reserved.by_default
        found["largest_micro_batch"] = None if memory_bytes is None else made.forecast.largest(memory_bytes)
    except Exception as error:  # whatever stock refuses or a trace cannot follow
        found["reason"] = first_line(error)[:200]
    return found


def _at_length(task: tuple[Question, int, int | None]) -> dict[str, Any] | None:
    question, length, memory_bytes = task
    try:
        made = sketch(question, length)
    except TooLongError:
        return None
    forecast = made.forecast
    return {
        "sequence_length": length,
        "batch_size": made.asked,
        "needed_bytes": forecast.most_bytes(made.asked),
        "needed_by_batch": {str(batch): forecast.most_bytes(batch) for batch in BATCHES},
        "largest_micro_batch": None if memory_bytes is None else forecast.largest(memory_bytes),
    }


def _in_parallel(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
    workers = min(_CORES, len(tasks), 4)  # each takes some hundred MiB
    if workers < 2:
        return [function(task) for task in tasks]
    with ProcessPoolExecutor(workers, mp_context=_PROCESSES) as pool:
        return list(pool.map(function, tasks))
