"""Numbers as people read them, and the facts of a run in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from adaptive_batching._report.events import Event, Run
from adaptive_batching._report.rows import Row, rows_of

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
NOT_RECORDED = "not recorded"


def count(number: float) -> str:
    return f"{number:,.0f}"


def size(num_bytes: float) -> str:
    if abs(num_bytes) >= 10 * _GIB:
        return f"{num_bytes / _GIB:,.1f} GiB"
    if abs(num_bytes) >= _MIB:
        return f"{num_bytes / _MIB:,.0f} MiB"
    return f"{num_bytes / _KIB:,.1f} KiB"


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


def rate(value: float) -> str:
    return f"{value:.3g}"


def of(number: int, noun: str) -> str:
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


@dataclass(frozen=True)
class Fact:
    """A fact of a run, as one line of its summary."""

    name: str
    value: str
    more: str = ""
    """An addition in small print."""


def facts(run: Run) -> list[Fact]:
    """Return the facts that a run is known by; those of any two runs have the same names in the same order."""
    rows, steps = rows_of(run.events), run.events["step"]
    seconds, timed = sum(row.seconds for row in rows), sum(row.timed_samples for row in rows)
    tokens, padded = sum(row.tokens for row in rows), sum(row.padded_tokens for row in rows)
    peaks = [step["peak_bytes"] for step in steps if step.get("peak_bytes") is not None]
    recoveries = steps[-1].get("recoveries", 0) if steps else 0
    last = next((row for row in reversed(rows) if row.samples), None)
    return [
        Fact("Batch size", *_batch_size(rows)),
        Fact("Largest that fits", *_largest(run)),
        Fact("Optimizer steps", count(len(steps)), state(run)),
        Fact("Samples", count(sum(step["samples"] for step in steps)), _seen(run)),
        Fact("Loss", "none yet") if last is None
        else Fact("Loss", loss(last.mean_loss), _since(last) + _validation(run)),
        Fact("Time in steps", duration(seconds), f"{timed / seconds:,.1f} samples per second") if seconds
        else Fact("Time in steps", NOT_RECORDED),
        Fact("Padding", f"{padded / tokens:.2f}", "tokens computed for each token of the data") if tokens
        else Fact("Padding", NOT_RECORDED),
        Fact("Peak memory", size(max(peaks)), _limit(run)) if peaks else Fact("Peak memory", NOT_RECORDED),
        Fact("Out of memory", *_out_of_memory(run, recoveries)),
    ]  # fmt: skip


def state(run: Run) -> str:
    """Return how far a run has come."""
    ended = run.last("end")
    if ended is not None:
        return f"ended {moment(ended['time'])}"
    begun, plan, errors = run.last("run"), run.last("plan"), run.events["error"]
    if begun is None:
        return ""
    planned = 0 if plan is None else sum(epoch["steps"] for epoch in plan["epochs"])
    early = "the record ends here: the run goes on, or was cut off"
    if errors:
        early = f"ended early, {moment(errors[0]['time'])}"
    return early + (f"; about {count(planned)} planned" if planned else "")


def _validation(run: Run) -> str:
    found = run.events["validation"]
    if not found:
        return ""
    least = min(found, key=lambda event: event["loss"])
    return f"; validation {loss(found[-1]['loss'])}, least {loss(least['loss'])} after step {count(least['step'])}"


def _batch_size(rows: list[Row]) -> tuple[str, str]:
    if not rows:
        return "none yet", ""
    first, last = rows[0], rows[-1]
    value = count(first.batch_size) + ("" if first.batch_size == last.batch_size else f" → {count(last.batch_size)}")
    if not last.global_batch_size or last.global_batch_size == last.batch_size:
        return value, "samples per optimizer step"
    globally = count(first.global_batch_size)
    if first.global_batch_size != last.global_batch_size:
        globally += f" → {count(last.global_batch_size)}"
    return value, f"samples per device; {globally} per optimizer step"


def _largest(run: Run) -> tuple[str, str]:
    probe, maximum = run.last("probe"), run.last("maximum")
    if probe is not None:
        if probe.get("enough") is not None:
            return f"{count(probe['enough'])} or more", "larger forwards would gain little"
        return count(
            probe["batch_size"]
        ), f"samples of {count(probe['sequence_length'])} tokens, bound by {probe['reason']}"
    return (NOT_RECORDED, "") if maximum is None else (count(maximum["batch_size"]), f"not probed: {maximum['reason']}")


def _seen(run: Run) -> str:
    dropped = sum(epoch.get("dropped_samples", 0) for epoch in run.events["epoch"])
    epochs = of(len(run.events["epoch"]), "epoch")
    return f"{epochs}; {count(dropped)} left over at their ends" if dropped else epochs


def _out_of_memory(run: Run, recoveries: int) -> tuple[str, str]:
    at_the_end = any("out of memory" in error["message"].lower() for error in run.events["error"])
    if not recoveries:
        return ("at the end", "which ended the run") if at_the_end else ("never", "")
    often = "once" if recoveries == 1 else f"{count(recoveries)} times"
    recovered = "recovered: the same samples ran again in smaller parts"
    return (f"{often}, and at the end", f"{recovered}, until the end") if at_the_end else (often, recovered)


def _since(row: Row) -> str:
    return f"mean since epoch {row.epoch:g} began" if row.epoch == int(row.epoch) else f"mean since epoch {row.epoch:g}"


def _limit(run: Run) -> str:
    probe = run.last("probe")
    return "" if probe is None else f"the probe allowed {size(probe['budget_bytes'])}"


def where(run: Run) -> str:
    """Return the recipe, the device and the time of a run; empty if the record does not say."""
    begun = run.last("run")
    if begun is None:
        return ""
    ranks = begun.get("ranks", 1)
    device = f"{ranks} x {begun['device']}" if ranks > 1 else str(begun.get("device", ""))
    began = f"began {moment(begun['time'])}"
    resumed = "resumed" if begun.get("resumed") else ""
    versions = f"adaptive-batching {begun.get('adaptive_batching', '')}"
    return ", ".join(filter(None, [str(begun.get("recipe", "")), device, began, resumed, versions]))


def probe_in_words(probe: Event) -> list[str]:
    """Return what a probe has found, a sentence each."""
    length, budget = count(probe["sequence_length"]), size(probe["budget_bytes"])
    steps = sum(each.get("steps", 1) for each in probe["measurements"])
    failed = sum(each["peak_bytes"] is None for each in probe["measurements"])
    how = (
        f"Found by {probe['search']} with {of(steps, 'training step')}, {count(failed) if failed else 'none'} of them "
        f"out of memory, in {duration(probe['seconds'])}."
    )
    peaks = {each["batch_size"]: each["peak_bytes"] for each in probe["measurements"]}
    took = size(peaks[probe["batch_size"]])
    if probe.get("enough") is not None:
        return [
            f"Forwards of up to {of(probe['enough'], 'sample')} of {length} tokens are large enough: larger ones would "
            f"gain little. At most {count(probe['batch_size'])} have run, which took {took} of {budget}.",
            how,
        ]
    beyond = [
        (at, peak) for at, peak in probe["predicted"] if at > probe["batch_size"] and peak > probe["budget_bytes"]
    ]
    words = [
        f"At most {of(probe['batch_size'], 'sample')} of {length} tokens, bound by {probe['reason']}: a full training "
        f"step took {took} of {budget}."
    ]
    if beyond:
        words.append(f"A step of {count(beyond[0][0])} would take about {size(beyond[0][1])}.")
    if probe.get("shorter"):
        points = " and ".join(f"{count(fit)} of {count(tokens)} tokens" for tokens, fit, _ in probe["shorter"])
        words.append(f"Of shorter samples more fit: {points}.")
    return [*words, how]


def differences(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Return (key, value in each run) where the runs' configs differ, but for the folders that they put files in."""
    flat = []
    for run in runs:
        config = dict(_flattened((run.last("run") or {}).get("config")))
        folder = config.pop("output_dir", "")
        flat.append({key: value.replace(folder, "${output_dir}") if folder else value for key, value in config.items()})
    if not all(flat):
        return []
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = [(key, [config.get(key, "not set") for config in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flattened(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    if not isinstance(values, dict):
        return [(prefix, "null" if values is None else str(values))] if prefix else []
    return [
        pair for key, value in values.items() for pair in _flattened(value, f"{prefix}.{key}" if prefix else str(key))
    ]
