"""A plan as an answer: in words or as one object, with what would help, each planned as its own run."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from adaptive_batching._gpus import Gpu
from adaptive_batching._plan import Answer, MemoryEstimate
from adaptive_batching._step.share import SampleCost, share_out
from adaptive_batching._step_time.forecast import AGAINST_PUBLISHED as AGAINST_PUBLISHED_TIMES
from adaptive_batching._step_time.forecast import in_seconds
from adaptive_batching._step_time.seconds import LIMITS
from adaptive_batching._torchtune.plan import planning
from adaptive_batching._torchtune.plan.planning import PlanRequest, TracedPlan
from adaptive_batching._trace.allocator import MIB
from adaptive_batching._trace.traced_step import BACKWARD, FORWARD
from adaptive_batching._values import memory_size

VERSION = 1
"""Of the object that ``--json`` prints."""

AGAINST_ALLOCATOR = {
    "rows": 45, "max_allocated_error": 0.0007, "max_reserved_error": 0.0177, "largest_batch_equal": 0.992,
}  # fmt: skip
"""Runs that were planned, and trained on PyTorch's own allocator on the emulated device: the largest errors as shares
of real figures, and the share of largest batches planned right. ``benchmarks/plan_vs_allocator.py`` measures again."""

AGAINST_PUBLISHED = {"peaks": 17, "half_within": 0.003, "all_within": 0.095}
"""Peaks that torchtune's README and pull requests publish of GPUs: within what share of them half of those that were
planned are, and all. ``benchmarks/published_memory.py`` plans them again."""

_STEPS_DRAWN = 50

# Entries of the object that a sketch and its need have under the same names
_OF_RUN = ("paged_bytes", "parameters", "trained_parameters", "frozen_parameters", "assumes")
_OF_STEP = ("batch_size", "peak_bytes", "resting_bytes", "flops", "recomputed_flops")


@dataclass(frozen=True)
class Asked:
    """The command line, read."""

    config: str
    request: PlanRequest
    length: int | None
    length_unknown: str  # why, where it is not known
    lengths: Sequence[int] | None  # tokens of each sample, where the data are at hand
    gpus: Sequence[Gpu]  # the request is about the smallest
    levers: bool
    table: bool

    @property
    def gpu(self) -> Gpu | None:
        return min(self.gpus, key=lambda gpu: gpu.memory_bytes, default=None)


def answer(asked: Asked, *, as_json: bool) -> int:
    """Print the plan that is asked for, and return the exit code."""

    def show(*lines: str) -> None:
        if not as_json:
            print("\n".join(lines), flush=True)

    request, length = asked.request, asked.length
    if length is None or asked.table or asked.levers:
        planning.start_processes()
    if length is None:
        lengths, unknown = planning.over_lengths(request), Answer.CANNOT_TELL
        shown: dict[str, Any] = {"version": VERSION, "config": asked.config, "answer": str(unknown), "fits": None}
        shown |= {"reason": f"length unknown: {asked.length_unknown}", "lengths": lengths}
        show(f"{unknown}: length unknown, because {asked.length_unknown}; give --sequence-length", *_lengths(lengths))
        code = unknown
    else:
        start = time.perf_counter()
        traced = planning.sketch(request, length)
        shown, lines = _plan(asked, traced)
        show(*lines)
        if asked.table:
            shown["lengths"] = planning.over_lengths(request, length)
            show("", *_lengths(shown["lengths"]))
        if asked.levers:
            shown["levers"] = planning.pull_levers(traced)
            show("", f"What would help, for {traced.asked} x {length:,} tokens", *_levers(shown["levers"]))
        shown["seconds"] = round(time.perf_counter() - start, 2)
        code = traced.need.within(request.memory_bytes)
    if as_json:
        print(json.dumps(shown, indent=1))
    return int(code.value)


def _plan(asked: Asked, traced: TracedPlan) -> tuple[dict[str, Any], list[str]]:
    """Return the plan as an object, and in words."""
    request, need, largest = asked.request, traced.need, traced.largest
    memory, verdict = request.memory_bytes, need.within(request.memory_bytes)
    epochs, of_epochs = _epochs(traced)
    epoch_flops = _epoch_flops(asked, traced)
    slowest = _slowest(asked, traced)
    time = None if asked.gpu is None else _time_as_object(asked, traced, asked.gpu)
    shown = {
        "version": VERSION,
        "config": asked.config,
        **{key: getattr(request, key) for key in ("recipe", "devices", "memory_bytes")},
        **{key: getattr(traced, key) for key in _OF_RUN},
        **{key: getattr(need, key) for key in _OF_STEP},
        "answer": str(verdict),
        "fits": None if verdict is Answer.CANNOT_TELL else verdict is Answer.FITS,
        "needed_bytes": {"least": need.least_bytes, "most": need.most_bytes},
        "left_bytes": None if memory is None else memory - need.most_bytes,
        "sequence_length": traced.length,
        "error": AGAINST_PUBLISHED,
        "allocator": AGAINST_ALLOCATOR,
        "set_up_bytes": traced.forecast.set_up.most_bytes,
        "reserved_bytes": need.reserved.by_default,
        "reserved": asdict(need.reserved),
        "outside_bytes": {overhead.name: [overhead.least, overhead.most] for overhead in need.outside},
        "peak": {"moment": need.moment, **need.kinds},
        "largest_micro_batch": largest,
        "token_budget": None if largest is None else largest * traced.length,
        "gpus": [{**_on(gpu, traced), "time": _time_as_object(asked, traced, gpu)} for gpu in asked.gpus],
        "epochs": epochs,
        "epoch_flops": epoch_flops,
        "hours_per_epoch": None if time is None else time["hours_per_epoch"],
        "time": time,
        "slowest_device": slowest,
    }
    several = len(asked.gpus) > 1
    head = _heads(shown["gpus"], traced) if several else _head(asked, traced)
    lines = [*head, "", "What it takes", *_what_counts(need, traced.paged_bytes), "", *_peak(need), ""]
    if not several:
        work = [*_work(asked, traced, epoch_flops), *_time(asked, traced), *_waits(request, slowest)]
        lines += [*of_epochs, "", *work, ""]
    return shown, [*lines, how_sure(AGAINST_ALLOCATOR, AGAINST_PUBLISHED)]


def _on(gpu: Gpu, traced: TracedPlan) -> dict[str, Any]:
    verdict, memory = traced.need.within(gpu.memory_bytes), gpu.memory_bytes
    largest = traced.forecast.largest(memory)
    return {"name": gpu.name, "memory_bytes": memory, "answer": str(verdict), "largest_micro_batch": largest}


def _heads(gpus: Sequence[Mapping[str, Any]], traced: TracedPlan) -> list[str]:
    """Return the answer on several GPUs, one line each."""
    rows = [["GPU", "memory", "answer", "largest micro-batch", "tokens/s", "hours an epoch"]]
    for gpu in gpus:
        time = gpu["time"] or {"tokens_per_second": None, "hours_per_epoch": None}
        rate, hours = time["tokens_per_second"], time["hours_per_epoch"]
        rows.append([
            gpu["name"], memory_size(gpu["memory_bytes"]), gpu["answer"], str(gpu["largest_micro_batch"]),
            "-" if rate is None else f"{rate:,.0f}", "-" if hours is None else f"{hours:,.3g}",
        ])  # fmt: skip
    span = f"{memory_size(traced.need.least_bytes)} to {memory_size(traced.need.most_bytes)}"
    need = f"{_forward(traced)}{_of_devices(traced)} needs {span}{_on_the_host(traced.paged_bytes)}"
    return [need, *_table(rows), *_assumed(traced)]


def _head(asked: Asked, traced: TracedPlan) -> list[str]:
    length, largest = traced.length, traced.largest
    where = (f" on {asked.gpu.name}" if asked.gpu else "") + _of_devices(traced)
    line = first_line(traced.need, traced.request.memory_bytes, _forward(traced), where)
    lines = [line + _on_the_host(traced.paged_bytes)]
    if largest is not None:
        lines.append(f"largest micro-batch: {_samples(largest)} of {length:,} tokens")
        lines.append(f"token budget: {largest * length:,} padded tokens in a forward")
    return lines + _assumed(traced)


def _forward(traced: TracedPlan) -> str:
    return f"a forward of {traced.asked} x {traced.length:,} tokens"


def _of_devices(traced: TracedPlan) -> str:
    return f" on each of {traced.request.devices} devices" if traced.request.devices > 1 else ""


def _on_the_host(paged_bytes: int) -> str:
    return f"; plus up to {memory_size(paged_bytes)} of host memory for paged optimizer states" if paged_bytes else ""


def _assumed(traced: TracedPlan) -> list[str]:
    return [] if traced.assumes is None else [f"assumed: {traced.assumes}"]


def first_line(need: MemoryEstimate, memory: int | None, what: str, where: str) -> str:
    """Return the answer, on how much memory, and how much is left; ``what`` is the forward, ``where`` the device."""
    verdict, least, most = need.within(memory), need.least_bytes, need.most_bytes
    if memory is None:
        return f"{verdict}: {what} needs {memory_size(least)} to {memory_size(most)}; give --memory or --gpu"
    of_memory = f"of {memory_size(memory)}{where}"
    if verdict is Answer.FITS:
        return f"{verdict}: {what} needs at most {memory_size(most)} {of_memory}, {memory_size(memory - most)} left"
    if verdict is Answer.TIGHT:
        return (
            f"{verdict}: {what} needs {memory_size(least)} to {memory_size(most)} {of_memory}; "
            f"{memory_size(memory - least)} left in the best case, {memory_size(most - memory)} too little in the worst"
        )
    lacks = memory_size(least - memory)
    return f"{verdict}: {what} needs at least {memory_size(least)} {of_memory}, {lacks} too little"


def _what_counts(need: MemoryEstimate, paged_bytes: int) -> list[str]:
    reserved = need.reserved
    best = "by default" if reserved.least <= reserved.least_expandable else "with expandable segments"
    rows = [
        ["tensors", memory_size(need.peak_bytes), f"{memory_size(need.resting_bytes)} between steps"],
        [
            "reserved by the allocator",
            memory_size(reserved.by_default),
            f"{memory_size(reserved.least)} is enough, with retries",
        ],
        [
            "with expandable segments",
            memory_size(reserved.expandable),
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ],
        *([x.name, f"{memory_size(x.least)} to {memory_size(x.most)}", x.source] for x in need.outside),
        ["fits from", memory_size(need.most_bytes), "reserved, and the upper figures above"],
        ["does not fit below", memory_size(need.least_bytes), f"least that is enough {best}, and the lower figures"],
    ]
    if paged_bytes:
        why = "moved to host memory when the GPU is short of room"
        rows.append(["paged optimizer states", memory_size(paged_bytes), why])
    return _table(rows)


def _peak(need: MemoryEstimate) -> list[str]:
    kinds = sorted(need.kinds.items(), key=lambda kind: -kind[1])
    rows = [[kind, memory_size(size), f"{100 * size / need.peak_bytes:.0f} %"] for kind, size in kinds if size >= MIB]
    during = f"{need.moment} pass" if need.moment in (FORWARD, BACKWARD) else need.moment
    return [f"At the peak, in the {during}:", *_table(rows)]


def _epochs(traced: TracedPlan) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Return the epochs as objects, None if they are not known, and in words."""
    if traced.request.samples is None:
        return None, ["Epochs: number of samples unknown; give --samples"]
    if not traced.largest:
        return None, ["Epochs: not planned, as no memory is given or nothing fits"]
    planned_sizes, epochs, is_decided = planning.look_out(traced.request, traced.length, traced.largest)
    rows = [["epoch", "batch size", "global batch", "steps", "samples dropped"]]
    for epoch in epochs:
        sizes, windows = (" -> ".join(map(str, values)) for values in (epoch.batch_sizes, epoch.global_batch_sizes))
        rows.append([str(epoch.epoch), sizes, windows, str(epoch.steps), str(epoch.dropped_samples)])
    head = f"Epochs, with batches of at most {planned_sizes.maximum} ({planned_sizes.reason})"
    head += "" if is_decided else "; growth is decided during training and not shown"
    return [asdict(epoch) for epoch in epochs], [head, *_table(rows)]


def _epoch_flops(asked: Asked, traced: TracedPlan) -> float | None:
    """Return model FLOPs of an epoch on all devices, without padding; None if its samples are not known."""
    need, samples, length = traced.need, asked.request.samples, traced.length
    attention = need.attention_flops / need.batch_size
    others = (need.flops - need.recomputed_flops) / need.batch_size - attention
    if asked.lengths is None:
        return None if samples is None else samples * (others + attention)
    shares = [min(tokens, length) / length for tokens in asked.lengths]  # attention grows with their square
    return sum(share * others + share * share * attention for share in shares)


def _work(asked: Asked, traced: TracedPlan, epoch_flops: float | None) -> list[str]:
    need, length = traced.need, traced.length
    line = f"Work: {_flops(need.flops - need.recomputed_flops)} a forward and backward"
    if need.recomputed_flops:
        line += f", and {_flops(need.recomputed_flops)} to recompute activations"
    lines = [line + f" ({need.batch_size} x {length:,} tokens, per device)"]
    if epoch_flops is not None:
        tokens = f", {sum(asked.lengths):,} tokens" if asked.lengths else f" of {length:,} tokens"
        line = f"  an epoch of {_samples(asked.request.samples or 0)}{tokens}: {_flops(epoch_flops)} on all devices"
        lines.append(line)
    return lines


def _time_as_object(asked: Asked, traced: TracedPlan, gpu: Gpu) -> dict[str, Any] | None:
    """Return how long forwards take on a GPU; None if that is not known."""
    time = traced.time_on(gpu)
    if isinstance(time, str):
        return None
    lengths, samples = asked.lengths, asked.request.samples
    tokens = None if samples is None else samples * traced.length
    if lengths is not None:
        tokens = sum(min(length, traced.length) for length in lengths)
    return {
        "samples_per_forward": time.samples,
        "seconds_per_forward": time.seconds,
        "tokens_per_second": time.tokens_per_second,
        "limits": {LIMITS[name]: seconds / time.step.seconds for name, seconds in time.step.limits.items()},
        "hours_per_epoch": None if tokens is None else tokens / time.tokens_per_second / 3600,
    }


def _time(asked: Asked, traced: TracedPlan) -> list[str]:
    """Return how long forwards take, in words, and how well that is known."""
    if asked.gpu is None:
        return []
    time, shown = traced.time_on(asked.gpu), _time_as_object(asked, traced, asked.gpu)
    if isinstance(time, str) or shown is None:
        return [f"Time: not planned {time}; a dry run tells it"]
    shares = sorted(shown["limits"].items(), key=lambda limit: -limit[1])
    limits = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share >= 0.005)
    took = f"{in_seconds(time.seconds)} for {_samples(time.samples)} of {traced.length:,} tokens"
    line = f"Time: {took}, {time.tokens_per_second:,.0f} tokens/s on {asked.gpu.name}: {limits}"
    hours = shown["hours_per_epoch"]
    accuracy, card = AGAINST_PUBLISHED_TIMES.get(time.kind), asked.gpu.name
    known = f"no published time of this kind ({time.kind}) to hold it against"
    if accuracy is not None:
        known = f"nine in ten published times are within {100 * accuracy.share_on(card):.0f} % ({time.kind})"
        known += "" if accuracy.knows(card) else f", as far as on a new card: none was on {card}"
    epoch = "" if hours is None else f"{hours:,.3g} hours an epoch without padding; "
    return [line, f"  {epoch}{known}"]


def _slowest(asked: Asked, traced: TracedPlan) -> dict[str, float] | None:
    """Return the work of the device that has most over the mean of all, in steps that are drawn from the data."""
    request, need = asked.request, traced.need
    if asked.lengths is None or request.devices == 1 or request.cfg.get("tensor_parallel_dim", 1) > 1:
        return None
    attention, flops = need.attention_flops, need.flops - need.recomputed_flops
    cost = SampleCost(0, (flops - attention) / traced.length, attention / traced.length**2)
    per_device = request.cfg.batch_size * request.cfg.get("gradient_accumulation_steps", 1)
    draw, lengths = random.Random(0), [min(tokens, traced.length) for tokens in asked.lengths]
    steps = [
        share_out([draw.choices(lengths, k=per_device) for _ in range(request.devices)], cost)
        for _ in range(_STEPS_DRAWN)
    ]
    as_drawn, shared = (
        statistics.fmean(time.over_mean for time in times)
        for times in ([step.as_drawn for step in steps], [step.time for step in steps])
    )
    return {"as_drawn": as_drawn, "shared": shared}


def _waits(request: PlanRequest, slowest: Mapping[str, float] | None) -> list[str]:
    if slowest is None:
        return []
    as_drawn, shared = slowest["as_drawn"], slowest["shared"]
    return [
        f"  the slowest of {request.devices} devices has {as_drawn:.2f} times the mean work with samples as drawn, and "
        f"{shared:.2f} times where they are shared out, as by micro_batch_size=auto"
    ]


def how_sure(allocator: Mapping[str, float], published: Mapping[str, float]) -> str:
    """Return how far off plans were, in per cent, rounded up."""
    reserved = math.ceil(1000 * allocator["max_reserved_error"]) / 10
    return (
        f"How sure: the answer rests on reserved memory. In {allocator['rows']} runs on PyTorch's own allocator, "
        f"without a GPU, that was within {reserved:g} % of the plan. {published['peaks']} peaks published for GPUs "
        f"were within {math.ceil(100 * published['all_within'])} %."
    )


def _lengths(lengths: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [["tokens", *(f"{batch} need" for batch in planning.BATCHES), "largest micro-batch"]]
    for row in lengths:
        largest = "?" if row["largest_micro_batch"] is None else str(row["largest_micro_batch"])
        needs = [memory_size(row["needed_by_batch"][str(batch)]) for batch in planning.BATCHES]
        rows.append([f"{row['sequence_length']:,}", *needs, largest])
    return ["Samples in a forward", *_table(rows)]


def _levers(levers: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [["", "saves", "then fits", "to paste"]]
    for lever in levers:
        saved = "?" if lever["saved_bytes"] is None else memory_size(lever["saved_bytes"])
        largest = lever["largest_micro_batch"]
        fits = "?" if largest is None else f"{largest} x {lever['sequence_length']:,}"
        paste = lever["paste"] if lever["reason"] is None else f"not planned: {lever['reason']}"
        rows.append([lever["name"], saved, fits, paste])
    return _table(rows)


def _samples(number: int) -> str:
    return "1 sample" if number == 1 else f"{number:,} samples"


def _flops(flops: float) -> str:
    for unit, name in ((1e18, "EFLOPs"), (1e15, "PFLOPs"), (1e12, "TFLOPs")):
        if flops >= unit:
            return f"{flops / unit:.1f} {name}"
    return f"{flops / 1e9:.1f} GFLOPs"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return indented lines with columns that line up; the last column is as wide as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
