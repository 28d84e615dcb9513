"""A plan as an answer: in words or as one object, with what would help, each planned as a run of its own."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adaptive_batching._plan import text
from adaptive_batching._plan.against_allocator import AGREEMENT
from adaptive_batching._plan.devices import Gpu
from adaptive_batching._plan.forecast import Need
from adaptive_batching._plan.published import error_band
from adaptive_batching._plan.varying import Varying
from adaptive_batching._plan.verdict import Answer, Verdict
from adaptive_batching._torchtune.data_at_hand import DataAtHand
from adaptive_batching._torchtune.plan_many import over_lengths, pull_levers, show_lengths, show_levers, start_processes
from adaptive_batching._torchtune.planning import Outlook, Question, Sketch, as_they_come, look_out, sketch
from adaptive_batching._trace.traced_step import TraceError

VERSION = 1
"""Of the object that ``--json`` prints."""


@dataclass(frozen=True)
class Asked:
    """The command line, read."""

    config: str
    question: Question
    length: int | None
    length_unknown: str
    """Why the length is not known, where it is not."""

    data: DataAtHand | None
    memory_bytes: int | None
    gpu: Gpu | None
    mfu: float | None
    levers: bool
    table: bool
    plot: Path | None


@dataclass(frozen=True)
class _Found:
    made: Sketch
    need: Need
    verdict: Verdict
    largest: int | None
    outlook: Outlook | None
    varying: Varying | None
    not_replayed: str | None
    """Why samples of varying lengths could not be replayed."""


def answer(asked: Asked, *, as_json: bool) -> int:
    """Print the plan that is asked for, and return the exit code."""
    if asked.length is None or asked.table or asked.levers:
        start_processes()
    if asked.length is None:
        return _plan_over_lengths(asked, as_json=as_json)
    start = time.perf_counter()
    plan = _plan(asked, asked.length)
    shown = _as_object(asked, plan)
    if not as_json:
        _show(asked, plan)
    if asked.plot is not None:
        _draw(asked, plan, asked.plot)
        if not as_json:
            print(f"\nPicture: {asked.plot}", flush=True)
    if asked.table:
        shown["lengths"] = over_lengths(asked.question, asked.length, asked.memory_bytes)
        if not as_json:
            print("\n".join(["", *show_lengths(shown["lengths"])]), flush=True)
    if asked.levers:
        shown["levers"] = pull_levers(asked.question, plan.made, plan.need, asked.memory_bytes)
        if not as_json:
            print("\n".join(["", *show_levers(shown["levers"], plan.made)]), flush=True)
    shown["seconds"] = round(time.perf_counter() - start, 2)
    if as_json:
        print(json.dumps(shown, indent=1))
    return plan.verdict.answer.value


def _plan(asked: Asked, length: int) -> _Found:
    question, memory = asked.question, asked.memory_bytes
    made = sketch(question, length)
    need = made.forecast.need(made.asked)
    largest = None if memory is None else made.forecast.largest(memory)
    outlook = look_out(question, length, largest) if question.samples is not None and largest else None
    varying = not_replayed = None
    if asked.data is not None and outlook is not None and largest and memory is not None:
        try:
            varying = as_they_come(question, made, asked.data, outlook, largest, memory)
        except TraceError as error:
            not_replayed = str(error)
    return _Found(made, need, made.forecast.judge(need, memory), largest, outlook, varying, not_replayed)


def _plan_over_lengths(asked: Asked, *, as_json: bool) -> int:
    found = over_lengths(asked.question, None, asked.memory_bytes)
    if as_json:
        reason = f"length unknown: {asked.length_unknown}"
        print(json.dumps({"version": VERSION, "config": asked.config, "answer": "cannot tell", "fits": None,
                          "reason": reason, "lengths": found}, indent=1))  # fmt: skip
    else:
        print(f"cannot tell: length unknown, as {asked.length_unknown}; give --sequence-length")
        print("\n".join(show_lengths(found)))
    return Answer.CANNOT_TELL.value


def _draw(asked: Asked, plan: _Found, path: Path) -> None:
    from adaptive_batching._plan.picture import draw_plan  # needs matplotlib, which is optional

    title = f"{asked.config}, samples of {plan.made.length:,} tokens"
    title += f", one of {plan.made.devices} devices" if plan.made.devices > 1 else ""
    draw_plan(plan.made.forecast, path, title, plan.need.batch_size, plan.largest, asked.memory_bytes)


def _show(asked: Asked, plan: _Found) -> None:
    made, need = plan.made, plan.need
    what = f"a forward of {need.batch_size} x {made.length:,} tokens"
    where = f" on {asked.gpu.name}" if asked.gpu else ""
    where += f" on each of {made.devices} devices" if made.devices > 1 else ""
    lines = [text.first_line(plan.verdict, what, where)]
    if plan.largest is not None:
        lines += [
            f"largest micro-batch: {plan.largest} samples of {made.length:,} tokens",
            f"token budget: {plan.largest * made.length:,} padded tokens in a forward",
        ]
    if made.assumes is not None:
        lines.append(f"assumed: {made.assumes}")
    lines += ["", *text.what_counts(need, made.forecast.outside, made.paged_bytes)]
    lines += [*_varying(plan), "", *text.what_sets_the_peak(need)]
    lines += [
        "",
        *_epochs(asked, plan.outlook),
        "",
        *_work(asked, made, need),
        "",
        text.how_sure(AGREEMENT, error_band()),
    ]
    print("\n".join(lines), flush=True)


def _varying(plan: _Found) -> list[str]:
    if plan.not_replayed is not None:
        return [f"  lengths as they come were not replayed: {plan.not_replayed}"]
    if plan.varying is None:
        return []
    seen = plan.varying
    run = "runs in what there is" if seen.runs else "does not run in what there is, by default"
    if seen.retries:
        run += f", its cache emptied {seen.retries} times"
    return [
        f"  lengths as they come, {seen.forwards} forwards in {seen.steps} optimizer steps: reserves "
        f"{text.size(seen.by_default)}, with expandable segments {text.size(seen.expandable)}; {run}"
    ]


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
    line = f"Work: {text.work(flops)} a forward and backward"
    if need.recomputed_flops:
        line += f", and {text.work(need.recomputed_flops)} to compute activations again"
    lines = [line + f" ({need.batch_size} x {made.length:,} tokens, a device)"]
    epoch = _epoch_flops(asked, need, made)
    if epoch is not None:
        tokens = f", {sum(asked.data.lengths):,} tokens" if asked.data else f" of {made.length:,} tokens each"
        line = f"  an epoch of {asked.question.samples:,} samples{tokens}: {text.work(epoch)} on all devices"
        hours = _hours(asked, need, made)
        if hours is not None and asked.gpu is not None:
            peak = f"{asked.mfu:.0%} of {asked.gpu.name}'s {asked.gpu.peak_tflops:g} TFLOPS"
            line += f", {hours:.2f} hours at {peak}"
        lines.append(line)
    return lines


def _epoch_flops(asked: Asked, need: Need, made: Sketch) -> float | None:
    """Return the model FLOPs of an epoch on all devices, without padding; None if its samples are not known.

    Attention grows with the square of a sample's length, all else with the length.
    """
    attention = need.attention_flops / need.batch_size
    others = (need.flops - need.recomputed_flops) / need.batch_size - attention
    if asked.data is None:
        return None if asked.question.samples is None else asked.question.samples * (others + attention)
    shares = [min(length, made.length) / made.length for length in asked.data.lengths]
    return sum(share * others + share * share * attention for share in shares)


def _hours(asked: Asked, need: Need, made: Sketch) -> float | None:
    """Return the hours of an epoch by its model FLOPs, as MFU is defined on."""
    flops = _epoch_flops(asked, need, made)
    if asked.mfu is None or asked.gpu is None or flops is None:
        return None
    return flops / made.devices / (asked.gpu.peak_tflops * 1e12 * asked.mfu) / 3600


def _as_object(asked: Asked, plan: _Found) -> dict[str, Any]:
    made, need, verdict, largest, outlook = plan.made, plan.need, plan.verdict, plan.largest, plan.outlook
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
        "allocator": asdict(AGREEMENT),
        "set_up_bytes": made.forecast.set_up.most_bytes,
        "resting_bytes": need.resting_bytes,
        "reserved_bytes": need.reserved.by_default,
        "reserved": asdict(need.reserved),
        "outside_bytes": {each.name: [each.least, each.most] for each in made.forecast.outside},
        "paged_bytes": made.paged_bytes,
        "varying_lengths": None if plan.varying is None else asdict(plan.varying),
        "peak": {"moment": need.moment, **need.kinds},
        "largest_micro_batch": largest,
        "token_budget": None if largest is None else largest * made.length,
        "epochs": None if outlook is None else [asdict(epoch) for epoch in outlook.epochs],
        "flops": need.flops,
        "recomputed_flops": need.recomputed_flops,
        "epoch_flops": _epoch_flops(asked, need, made),
        "hours_per_epoch": _hours(asked, need, made),
        "parameters": made.parameters,
        "trained_parameters": made.trained_parameters,
        "frozen_parameters": made.frozen_parameters,
        "assumes": made.assumes,
    }
