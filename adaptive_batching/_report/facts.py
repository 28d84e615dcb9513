"""A run in words: numbers as people read them, and its facts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from adaptive_batching._report.events import (
    DecisionTotals,
    Event,
    RunRecord,
    balance_of,
    by_dataset,
    totals_of_decisions,
)
from adaptive_batching._values import ConfigError, MemoryAmount, memory_size, plural

NOT_RECORDED = "not recorded"

# Factor by which a step may take longer for each doubling of the batch where growth can pay, and from which on it does
# not: the rule of docs/grow-the-batch.md.
_CAN_PAY, _DOES_NOT_PAY = 1.25, 1.5

# When the functions of this package grow the batch; an argument takes the place of its name.
_GROWTH = {
    "step": "every {every} epochs", "multistep": "at a milestone", "staged": "at a stage",
    "fixed_increase": "each epoch",
    "polynomial": "on a ramp", "linear": "on a linear ramp", "cosine": "on a cosine ramp", "late_switch": "late",
    "replace_lr_decay": "in place of a lower learning rate", "on_plateau": "on a plateau of the validation loss",
}  # fmt: skip
_OF_PACKAGE = re.compile(r"adaptive_batching\.(?:growth|_growth\.schedules)\.(\w+)")


class Fact(NamedTuple):
    """Something that a run is known by: a number where two runs can be compared by it."""

    name: str
    value: str
    more: str = ""  # small print
    number: float | None = None


def count(number: float) -> str:
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """Return a time: ``0.35 s``, ``12.3 s``, ``5 min 02 s``, ``3 h 07 min``."""
    if seconds < 1:
        return f"{seconds:.3g} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    if seconds < 5995:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02} s"
    return f"{round(seconds / 60) // 60:,} h {round(seconds / 60) % 60:02} min"


def moment(iso: str) -> str:
    return f"{datetime.fromisoformat(iso):%Y-%m-%d %H:%M} UTC"


def loss(value: float) -> str:
    return f"{value:.3f}" if abs(value) >= 0.1 or not math.isfinite(value) else f"{value:.3g}"


def from_to(first: str, last: str) -> str:
    return first if first == last else f"{first} → {last}"


def facts(run: RunRecord) -> list[Fact]:
    """Return what a run is known by; names and order are the same for any two runs."""
    totals, steps, probe = totals_of_decisions(run.events), run.events["step"], run.last("probe")
    seconds, timed = sum(each.seconds for each in totals), sum(each.timed_samples for each in totals)
    tokens, padded = sum(each.tokens for each in totals), sum(each.padded_tokens for each in totals)
    samples, (mean_loss, more) = sum(step["samples"] for step in steps), _losses(totals, run.events["validation"])
    dropped = sum(epoch["dropped_samples"] for epoch in run.events["epoch"])
    epochs = plural(len(run.events["epoch"]), "epoch") + (
        f"; {count(dropped)} left over at their ends" if dropped else ""
    )
    speed, padding = Fact("Tokens per second", NOT_RECORDED), Fact("Padding", NOT_RECORDED)
    if tokens:
        where = "; tokens of one device" if (run.last("run") or {}).get("ranks", 1) > 1 else ""
        said = f"{count(padded / seconds)} with padding, {timed / seconds:,.1f} samples{where}"
        speed = Fact("Tokens per second", count(tokens / seconds), said, tokens / seconds)
        said = "tokens computed for each token of the data"
        balance = balance_of(totals)
        said += f"; of the devices, {balance}" if balance else ""
        padding = Fact("Padding", f"{padded / tokens:.2f}", said, padded / tokens)
    elif seconds:
        speed = Fact("Samples per second", f"{timed / seconds:,.1f}", "in steps", timed / seconds)
    last = next((each for each in reversed(totals) if each.samples), None)
    return [
        Fact("Batch size", *_batch_size(totals)),
        Fact("Largest that fits", *_largest(probe, run.last("maximum"))),
        Fact("Optimizer steps", count(len(steps)), _state(run), len(steps)),
        Fact("Samples", count(samples), epochs, samples),
        Fact("Loss", mean_loss, more, None if last is None else last.mean_loss),
        _time(run, seconds),
        speed,
        padding,
        _peak(run),
        Fact("Out of memory", *_out_of_memory(run)),
    ]


def change(first: Fact, second: Fact) -> str:
    """Return how a fact differs between two runs, as a share of the first; empty if it is no number."""
    if first.number is None or second.number is None or first.name != second.name:
        return ""
    if first.number == second.number:
        return "same"
    return f"{100 * (second.number / first.number - 1):+,.1f} %" if first.number else ""


def _time(run: RunRecord, of_steps: float) -> Fact:
    """Return the time of a run from its beginning to its end, and what took it, as far as that is known."""
    begun, ends, probe = run.events["run"], [*run.events["end"], *run.events["error"]], run.last("probe") or {}
    parts = {"probe": probe["waited"] if probe else 0.0, "steps": of_steps}
    for pause in run.events["took"]:
        parts[f"{pause['what']}s"] = parts.get(f"{pause['what']}s", 0.0) + pause["seconds"]
    parts = {name: seconds for name, seconds in parts.items() if seconds}
    total = sum(parts.values())
    if len(begun) == 1 and ends:  # what passed before a run was resumed is not known
        start, end = (datetime.fromisoformat(event["time"]) for event in (begun[0], ends[0]))
        passed = (end - start).total_seconds()
        if (other := passed - total) > 0.5:
            parts["else"] = other
        total = max(passed, total)
    if not total:
        return Fact("Time", NOT_RECORDED)
    said = ", ".join(f"{part} {duration(seconds)}" for part, seconds in parts.items())
    return Fact("Time", duration(total), said, total)


def memory_limit(run: RunRecord) -> tuple[int, str] | None:
    """Return the bytes that a run may take, as its peaks are counted, and what sets them; None if that is not known."""
    begun, total = run.last("run") or {}, (run.last("probe") or {}).get("total_bytes")
    value = ((begun.get("config") or {}).get("adaptive_batching") or {}).get("memory_limit")
    if value is None:
        return None if total is None or begun.get("device", "cpu") == "cpu" else (total, "the device has")
    try:
        limit = MemoryAmount.parse("memory_limit", value)
    except ConfigError:  # a reference that could not be resolved
        return None
    if limit.num_bytes is None and total is None:
        return None
    return limit.bytes_of(total or 0), "memory_limit"


def _peak(run: RunRecord) -> Fact:
    peaks = [step["peak_bytes"] for step in run.events["step"] if step.get("peak_bytes") is not None]
    if not peaks:
        return Fact("Peak memory", NOT_RECORDED)
    limit, more = memory_limit(run), ""
    if limit is not None:
        more = f"of {memory_size(limit[0])}, {limit[1]}"
        if max(peaks) > limit[0] and any(pause["what"] == "checkpoint" for pause in run.events["took"]):
            more += "; checkpoints are saved outside of it"
    return Fact("Peak memory", memory_size(max(peaks)), more, max(peaks))


def _state(run: RunRecord) -> str:
    """Return how far a run has come."""
    ended, plan, errors = run.last("end"), run.last("plan"), run.events["error"]
    if ended is not None:
        return f"ended {moment(ended['time'])}"
    if run.last("run") is None:
        return ""
    cut_off = "the record ends here: the run is still going, or was killed"
    early = f"ended early, {moment(errors[0]['time'])}" if errors else cut_off
    planned = 0 if plan is None else sum(epoch["steps"] for epoch in plan["epochs"])
    return early + (f"; about {count(planned)} planned" if planned else "")


def _batch_size(totals: list[DecisionTotals]) -> tuple[str, str]:
    if not totals:
        return "none yet", ""
    first, last = totals[0], totals[-1]
    value = from_to(count(first.batch_size), count(last.batch_size))
    if not last.global_batch_size or last.global_batch_size == last.batch_size:
        return value, "samples per optimizer step"
    globally = from_to(count(first.global_batch_size), count(last.global_batch_size))
    return value, f"samples per device; {globally} per optimizer step"


def unrounded_maximum(probe: Event) -> int | None:
    """Return the size that would fit where the probe has rounded it down, else None."""
    largest: int | None = probe["exact"]
    return largest if largest is not None and largest > probe["batch_size"] and probe["enough"] is None else None


def bound(probe: Event) -> str:
    """Return what bounds the size that a probe has found."""
    if (fits := unrounded_maximum(probe)) is None:
        return str(probe["reason"])
    rounded = f"rounded down to {count(probe['batch_size'])} (round_to_power_of_two)"
    return f"{probe['reason']}: about {count(fits)} fit, {rounded}"


def reason(totals: DecisionTotals, before: DecisionTotals | None, config: Mapping[str, Any]) -> str:
    """Return why a size was chosen, without the paths of this package's functions: ``doubled each epoch``."""
    grown = re.match(rf"{_OF_PACKAGE.pattern} added (\d+)", totals.reason)
    if grown is None or grown[1] not in _GROWTH:
        return _OF_PACKAGE.sub(r"\1", totals.reason)
    added, function = int(grown[2]), config.get("batch_increase_function")
    every = function.get("every", 1) if isinstance(function, Mapping) else 1
    when = "each epoch" if grown[1] == "step" and every == 1 else _GROWTH[grown[1]].format(every=every)
    doubled = before is not None and totals.batch_size == 2 * before.batch_size
    return (f"doubled {when}" if doubled else f"{count(added)} more, {when}") + totals.reason[grown.end() :]


def _largest(probe: Event | None, maximum: Event | None) -> tuple[str, str]:
    if probe is not None and probe["enough"] is not None:
        return f"{count(probe['enough'])} or more", "larger forward passes would gain little"
    if probe is not None:
        length = count(probe["sequence_length"])
        return count(probe["batch_size"]), f"samples of {length} tokens, bound by {bound(probe)}"
    if maximum is not None:
        return "not probed", f"at most {count(maximum['batch_size'])}: {maximum['reason']}"
    return NOT_RECORDED, ""


def _losses(totals: list[DecisionTotals], validations: list[Event]) -> tuple[str, str]:
    last = next((each for each in reversed(totals) if each.samples), None)
    if last is None:
        return "none yet", ""
    more = f"mean since epoch {last.epoch:g}" + (" began" if last.epoch == int(last.epoch) else "")
    for on, events in by_dataset(validations).items():
        least = min(events, key=lambda event: event["loss"])
        more += f"; validation{on} {loss(events[-1]['loss'])}, least {loss(least['loss'])}"
        more += f" after step {count(least['step'])}"
    return loss(last.mean_loss), more


def _out_of_memory(run: RunRecord) -> tuple[str, str]:
    recoveries = (run.last("step") or {"recoveries": 0})["recoveries"]
    at_the_end = any("out of memory" in error["message"].lower() for error in run.events["error"])
    if not recoveries:
        return ("at the end", "which ended the run") if at_the_end else ("never", "")
    often = "once" if recoveries == 1 else f"{count(recoveries)} times"
    recovered = "recovered: the same samples ran again in smaller parts"
    return (f"{often}, and at the end", f"{recovered}, until the end") if at_the_end else (often, recovered)


def model(run: RunRecord) -> str:
    """Return the name of the model, such as ``lora_llama3_2_1b``; empty if the record does not say."""
    return str((run.last("run") or {}).get("model", ""))


def describe(run: RunRecord) -> str:
    """Return the recipe or trainer, the device and the time of a run; empty if the record does not say."""
    begun = run.last("run")
    if begun is None:
        return ""
    device = begun.get("device", "")
    said = [
        str(begun.get("recipe", "")),
        model(run),
        f"{begun['ranks']} x {device}" if begun.get("ranks", 1) > 1 else str(device),
        f"began {moment(begun['time'])}",
        "resumed" if begun.get("resumed") else "",
        f"on {begun['processor']}" if "processor" in begun else "",
        f"adaptive-batching {begun.get('adaptive_batching', '')}",
        *(f"{name} {version}" for name, version in begun.get("versions", {}).items()),
    ]
    return ", ".join(filter(None, said))


def grows(config: Mapping[str, Any]) -> bool:
    """Return True if a config names an increase function, which a command line takes away as a null component."""
    function = config.get("batch_increase_function")
    return function is not None and not (isinstance(function, Mapping) and function.get("_component_") is None)


def cost_of_growth(probe: Mapping[str, Any]) -> str:
    """Return how much longer a step took for each doubling of the batch in a probe, and whether growth pays by that.

    It compares the first step at the smallest and at the largest size that ran, d doublings apart: the factor is the
    d-th root of their times. Empty where fewer than two sizes ran to their end, a doubling apart. The verdict is the
    rule of docs/grow-the-batch.md, "Does it help?", which rests on one small model.
    """
    ran = {trial["batch_size"]: trial["seconds"] for trial in probe["measurements"] if trial["peak_bytes"] is not None}
    small, large = min(ran, default=1), max(ran, default=1)
    if large < 2 * small or min(ran[small], ran[large]) <= 0:
        return ""
    longer = (ran[large] / ran[small]) ** (1 / math.log2(large / small))
    verdict = "whether growing it saves time is open"
    if longer <= _CAN_PAY:
        verdict = "growing it can save time"
    elif longer >= _DOES_NOT_PAY:
        verdict = "growing it costs more than it saves"
    times = f"the probe's steps: {duration(ran[small])} at {count(small)}, {duration(ran[large])} at {count(large)}"
    rule = 'rule: docs/grow-the-batch.md, "Does it help?"'
    return f"doubling the batch makes a step {longer:.2f} times as long here ({times}): {verdict} ({rule})"


def first_too_large(predicted: Iterable[Sequence[int]], fits: int, budget_bytes: int) -> Sequence[int] | None:
    """Return the first (batch size, peak in bytes) predicted above the size that fits and the budget, if any."""
    return next(((size, peak) for size, peak in predicted if size > fits and peak > budget_bytes), None)


def probe_in_words(probe: Event) -> list[str]:
    """Return what a probe has found, a sentence each."""
    length, budget = count(probe["sequence_length"]), memory_size(probe["budget_bytes"])
    steps = sum(trial["steps"] for trial in probe["measurements"])
    failed = sum(trial["peak_bytes"] is None for trial in probe["measurements"])
    how = (
        f"Found by {probe['search']} with {plural(steps, 'training step')}, {count(failed) if failed else 'none'} of "
        f"them out of memory, in {duration(probe['seconds'])}."
    )
    peaks = {trial["batch_size"]: trial["peak_bytes"] for trial in probe["measurements"]}
    took = memory_size(peaks[probe["batch_size"]])
    if probe["enough"] is not None:
        return [
            f"Forward passes of up to {plural(probe['enough'], 'sample')} of {length} tokens are large enough: larger "
            f"ones would gain little. At most {count(probe['batch_size'])} have run, which took {took} of {budget}.",
            how,
        ]
    words = [
        f"At most {plural(probe['batch_size'], 'sample')} of {length} tokens, bound by {probe['reason']}: a full "
        f"training step took {took} of {budget}."
    ]
    too_large = first_too_large(probe["predicted"], probe["batch_size"], probe["budget_bytes"])
    if (fits := unrounded_maximum(probe)) is not None:
        words.append(f"About {count(fits)} fit, rounded down to {count(probe['batch_size'])} (round_to_power_of_two).")
    elif too_large is not None:
        words.append(f"A step of {count(too_large[0])} would take about {memory_size(too_large[1])}.")
    return [*words, how]
