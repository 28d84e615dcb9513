"""A plan as an answer: in words or as one object, with what would help, each planned as a run of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from adaptive_batching.plan import text
from adaptive_batching.plan.devices import Gpu
from adaptive_batching.plan.forecast import Need
from adaptive_batching.plan.published import error_band
from adaptive_batching.plan.verdict import Answer, Verdict
from adaptive_batching.torchtune.levers import Lever, levers
from adaptive_batching.torchtune.planning import Outlook, Question, Sketch, look_out, sketch

VERSION = 1
"""Of the object that ``--json`` prints."""

LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Tokens of a sample in the table for an unknown length."""


@dataclass(frozen=True)
class Asked:
    """The command line, read."""

    config: str
    question: Question
    length: int | None
    memory_bytes: int | None
    gpu: Gpu | None
    mfu: float | None
    levers: bool


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def answer(asked: Asked, *, as_json: bool) -> int:
    """Print the plan that is asked for, and return the exit code.

    Raises:
        TraceError, NotPlannedError: If the step cannot be traced.
        Exception: Whatever stock raises about the config.
    """
    if asked.length is None:
        return _plan_over_lengths(asked, as_json=as_json)
    start = time.perf_counter()
    made = sketch(asked.question, asked.length)
    need = made.forecast.need(made.asked)
    verdict = made.forecast.judge(need, asked.memory_bytes)
    largest = None if asked.memory_bytes is None else made.forecast.largest(asked.memory_bytes)
    outlook = None
    if asked.question.samples is not None and largest:
        outlook = look_out(asked.question, asked.length, largest)
    found = _as_object(asked, made, need, verdict, largest, outlook)
    if not as_json:
        _show(asked, made, need, verdict, largest, outlook)
    if asked.levers:
        helps = _pull(asked, made, need)
        found["levers"] = helps
        if not as_json:
            print("\n".join(["", *_levers_table(helps, made)]), flush=True)
    found["seconds"] = round(time.perf_counter() - start, 2)
    if as_json:
        print(json.dumps(found, indent=1))
    return verdict.answer.value


def _show(
    asked: Asked, made: Sketch, need: Need, verdict: Verdict, largest: int | None, outlook: Outlook | None
) -> None:
    what = f"a forward of {need.batch_size} x {made.length:,} tokens"
    where = f" on {asked.gpu.name}" if asked.gpu else ""
    where += f" on each of {made.devices} devices" if made.devices > 1 else ""
    lines = [text.first_line(verdict, what, where)]
    if largest is not None:
        lines += [
            f"largest micro-batch: {largest} samples of {made.length:,} tokens",
            f"token budget: {largest * made.length:,} padded tokens in a forward",
        ]
    lines += ["", *text.what_counts(need, made.forecast.outside, made.paged_bytes), "", *text.what_sets_the_peak(need)]
    lines += ["", *_epochs(asked, outlook), "", *_work(asked, made, need), "", text.how_sure(error_band())]
    print("\n".join(lines), flush=True)


def _epochs(asked: Asked, outlook: Outlook | None) -> list[str]:
    if asked.question.samples is None:
        return ["Epochs: number of samples unknown; give --samples"]
    if outlook is None:
        return ["Epochs: not planned, as no memory is given or nothing fits"]
    rows = [["epoch", "batch size", "global batch", "steps", "samples dropped"]]
    for epoch in outlook.epochs:
        sizes, windows = (" -> ".join(map(str, each)) for each in (epoch.batch_sizes, epoch.global_batch_sizes))
        rows.append([str(epoch.epoch), sizes, windows, str(epoch.steps), str(epoch.dropped_samples)])
    head = f"Epochs, with batches of at most {outlook.maximum} ({outlook.reason})"
    return [head + ("" if outlook.decided else "; training decides on growth, which is not shown"), *text.table(rows)]


def _work(asked: Asked, made: Sketch, need: Need) -> list[str]:
    flops = need.flops - need.recomputed_flops
    line = f"Work: {flops / 1e12:.1f} TFLOPs a forward and backward"
    if need.recomputed_flops:
        line += f", and {need.recomputed_flops / 1e12:.1f} to compute activations again"
    lines = [line + f" ({need.batch_size} x {made.length:,} tokens, a device)"]
    hours = _hours(asked, need, made)
    if hours is not None and asked.gpu is not None:
        peak = f"{asked.mfu:.0%} of {asked.gpu.name}'s {asked.gpu.peak_tflops:g} TFLOPS"
        lines.append(f"  an epoch of {asked.question.samples:,} samples of that length: {hours:.2f} hours at {peak}")
    return lines


def _hours(asked: Asked, need: Need, made: Sketch) -> float | None:
    """Return the hours of an epoch of samples of the longest length; model FLOPs, as MFU is defined on."""
    if asked.mfu is None or asked.gpu is None or asked.question.samples is None:
        return None
    per_sample = (need.flops - need.recomputed_flops) / need.batch_size
    seconds = per_sample * asked.question.samples / made.devices / (asked.gpu.peak_tflops * 1e12 * asked.mfu)
    return seconds / 3600


def _as_object(
    asked: Asked, made: Sketch, need: Need, verdict: Verdict, largest: int | None, outlook: Outlook | None
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "config": asked.config,
        "recipe": asked.question.recipe,
        "devices": made.devices,
        "answer": verdict.answer.name.lower().replace("_", " "),
        "fits": None if verdict.answer is Answer.CANNOT_TELL else verdict.answer is Answer.FITS,
        "memory_bytes": asked.memory_bytes,
        "needed_bytes": {"least": verdict.least_bytes, "most": verdict.most_bytes},
        "left_bytes": verdict.left_bytes,
        "sequence_length": made.length,
        "batch_size": need.batch_size,
        "peak_bytes": need.peak_bytes,
        "error": asdict(error_band()),
        "set_up_bytes": made.forecast.set_up_bytes,
        "resting_bytes": need.resting_bytes,
        "reserved_bytes": need.reserved.by_default,
        "reserved": asdict(need.reserved),
        "outside_bytes": {each.name: [each.least, each.most] for each in made.forecast.outside},
        "paged_bytes": made.paged_bytes,
        "peak": {"moment": need.moment, **need.kinds},
        "largest_micro_batch": largest,
        "token_budget": None if largest is None else largest * made.length,
        "epochs": None if outlook is None else [asdict(epoch) for epoch in outlook.epochs],
        "flops": need.flops,
        "recomputed_flops": need.recomputed_flops,
        "hours_per_epoch": _hours(asked, need, made),
        "parameters": made.parameters,
        "trained_parameters": made.trained_parameters,
    }


# Levers, and other lengths: each a sketch of its own, made by as many processes as there are cores


def _pull(asked: Asked, made: Sketch, need: Need) -> list[dict[str, Any]]:
    """Return what each lever saves and the largest batch with it, best first."""
    found = _in_parallel(
        _pulled, [(lever, made.asked, asked.memory_bytes) for lever in levers(asked.question, made.length)]
    )
    for each in found:
        if each["reserved_bytes"] is not None:
            each["saved_bytes"] = need.reserved.by_default - each["reserved_bytes"]
    return sorted(found, key=lambda each: -(each["saved_bytes"] if each["saved_bytes"] is not None else -(2**62)))


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


def _levers_table(found: Sequence[dict[str, Any]], made: Sketch) -> list[str]:
    rows = [["", "saves", "then fits", "to paste"]]
    for each in found:
        saved = "?" if each["saved_bytes"] is None else text.size(each["saved_bytes"])
        largest = each["largest_micro_batch"]
        fits = "?" if largest is None else f"{largest} x {each['sequence_length']:,}"
        rows.append(
            [each["name"], saved, fits, each["paste"] if each["reason"] is None else f"not planned: {each['reason']}"]
        )
    return [f"What would help, of {made.asked} x {made.length:,} tokens", *text.table(rows)]


def _plan_over_lengths(asked: Asked, *, as_json: bool) -> int:
    tasks = [(asked.question, length, asked.memory_bytes) for length in LENGTHS]
    found = _in_parallel(_at_length, tasks)
    if as_json:
        print(json.dumps({"version": VERSION, "config": asked.config, "answer": "cannot tell", "fits": None,
                          "reason": "length unknown", "lengths": found}, indent=1))  # fmt: skip
        return Answer.CANNOT_TELL.value
    print("cannot tell: length unknown, as tokenizer.max_seq_len is null; give --sequence-length")
    heads = [f"{found[0]['batch_size']} samples need", *(f"{b} need" for b in (1, 8, 32)), "largest micro-batch"]
    rows = {}
    for each in found:
        needs = [each["needed_bytes"], *(each["needed_by_batch"][b] for b in ("1", "8", "32"))]
        largest = "?" if each["largest_micro_batch"] is None else str(each["largest_micro_batch"])
        rows[each["sequence_length"]] = [*map(text.size, needs), largest]
    print("\n".join(text.lengths_table(rows, heads)))
    return Answer.CANNOT_TELL.value


def _at_length(task: tuple[Question, int, int | None]) -> dict[str, Any]:
    question, length, memory_bytes = task
    made = sketch(question, length)
    forecast = made.forecast

    def needed(batch_size: int) -> int:
        return forecast.judge(forecast.need(batch_size), None).most_bytes

    return {
        "sequence_length": length,
        "batch_size": made.asked,
        "needed_bytes": needed(made.asked),
        "needed_by_batch": {str(b): needed(b) for b in (1, 8, 32)},
        "largest_micro_batch": None if memory_bytes is None else forecast.largest(memory_bytes),
    }


def _in_parallel(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
    workers = min(os.cpu_count() or 1, len(tasks), 4)  # each takes some hundred MiB
    if workers < 2:
        return [function(task) for task in tasks]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(function, tasks))
