"""A run in words: numbers as people read them, its facts, and the config with what it has found."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from adaptive_batching._report.events import Event, Row, Run, rows_of

_KIB, _MIB, GIB = 2**10, 2**20, 2**30
NOT_RECORDED = "not recorded"

_FIELDS = ("batch_size", "use_maximum_batch_size", "batch_increase_function", "micro_batch_size", "adaptive_batching")
# Scalars that YAML reads back as the text that they are.
_PLAIN = re.compile(r"[A-Za-z_./$][\w./$%{}-]*|[\d.]+(GiB|MiB|KiB|GB|MB|KB|%)")
_READ_AS_OTHERS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")


def count(number: float) -> str:
    return f"{number:,.0f}"


def size(num_bytes: float) -> str:
    if abs(num_bytes) >= 10 * GIB:
        return f"{num_bytes / GIB:,.1f} GiB"
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


def of(number: int, noun: str) -> str:
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


def from_to(first: str, last: str) -> str:
    return first if first == last else f"{first} → {last}"


def facts(run: Run) -> list[tuple[str, str, str]]:
    """Return (name, value, small print) of what a run is known by; names and order are the same for any two runs."""
    rows, steps, probe = rows_of(run.events), run.events["step"], run.last("probe")
    seconds, timed = sum(row.seconds for row in rows), sum(row.timed_samples for row in rows)
    tokens, padded = sum(row.tokens for row in rows), sum(row.padded_tokens for row in rows)
    peaks = [step["peak_bytes"] for step in steps if step.get("peak_bytes") is not None]
    allowed = "" if probe is None else f"the probe allowed {size(probe['budget_bytes'])}"
    unknown = NOT_RECORDED, ""
    dropped = sum(epoch.get("dropped_samples", 0) for epoch in run.events["epoch"])
    epochs = of(len(run.events["epoch"]), "epoch") + (f"; {count(dropped)} left over at their ends" if dropped else "")
    speed = (duration(seconds), f"{timed / seconds:,.1f} samples per second") if seconds else unknown
    padding = (f"{padded / tokens:.2f}", "tokens computed for each token of the data") if tokens else unknown
    return [
        ("Batch size", *_batch_size(rows)),
        ("Largest that fits", *_largest(probe, run.last("maximum"))),
        ("Optimizer steps", count(len(steps)), _state(run)),
        ("Samples", count(sum(step["samples"] for step in steps)), epochs),
        ("Loss", *_losses(rows, run.events["validation"])),
        ("Time in steps", *speed),
        ("Padding", *padding),
        ("Peak memory", *((size(max(peaks)), allowed) if peaks else unknown)),
        ("Out of memory", *_out_of_memory(run)),
    ]


def _state(run: Run) -> str:
    """Return how far a run has come."""
    ended, plan, errors = run.last("end"), run.last("plan"), run.events["error"]
    if ended is not None:
        return f"ended {moment(ended['time'])}"
    if run.last("run") is None:
        return ""
    cut_off = "the record ends here: the run goes on, or was cut off"
    early = f"ended early, {moment(errors[0]['time'])}" if errors else cut_off
    planned = 0 if plan is None else sum(epoch["steps"] for epoch in plan["epochs"])
    return early + (f"; about {count(planned)} planned" if planned else "")


def _batch_size(rows: list[Row]) -> tuple[str, str]:
    if not rows:
        return "none yet", ""
    first, last = rows[0], rows[-1]
    value = from_to(count(first.batch_size), count(last.batch_size))
    if not last.global_batch_size or last.global_batch_size == last.batch_size:
        return value, "samples per optimizer step"
    globally = from_to(count(first.global_batch_size), count(last.global_batch_size))
    return value, f"samples per device; {globally} per optimizer step"


def _largest(probe: Event | None, maximum: Event | None) -> tuple[str, str]:
    if probe is not None and probe.get("enough") is not None:
        return f"{count(probe['enough'])} or more", "larger forwards would gain little"
    if probe is not None:
        length = count(probe["sequence_length"])
        return count(probe["batch_size"]), f"samples of {length} tokens, bound by {probe['reason']}"
    if maximum is not None:
        return count(maximum["batch_size"]), f"not probed: {maximum['reason']}"
    return NOT_RECORDED, ""


def _losses(rows: list[Row], validations: list[Event]) -> tuple[str, str]:
    row = next((row for row in reversed(rows) if row.samples), None)
    if row is None:
        return "none yet", ""
    more = f"mean since epoch {row.epoch:g}" + (" began" if row.epoch == int(row.epoch) else "")
    if validations:
        least = min(validations, key=lambda event: event["loss"])
        more += f"; validation {loss(validations[-1]['loss'])}, least {loss(least['loss'])}"
        more += f" after step {count(least['step'])}"
    return loss(row.mean_loss), more


def _out_of_memory(run: Run) -> tuple[str, str]:
    recoveries = (run.last("step") or {}).get("recoveries", 0)
    at_the_end = any("out of memory" in error["message"].lower() for error in run.events["error"])
    if not recoveries:
        return ("at the end", "which ended the run") if at_the_end else ("never", "")
    often = "once" if recoveries == 1 else f"{count(recoveries)} times"
    recovered = "recovered: the same samples ran again in smaller parts"
    return (f"{often}, and at the end", f"{recovered}, until the end") if at_the_end else (often, recovered)


def where(run: Run) -> str:
    """Return the recipe, the device and the time of a run; empty if the record does not say."""
    begun = run.last("run")
    if begun is None:
        return ""
    device = begun.get("device", "")
    said = [
        str(begun.get("recipe", "")),
        f"{begun['ranks']} x {device}" if begun.get("ranks", 1) > 1 else str(device),
        f"began {moment(begun['time'])}",
        "resumed" if begun.get("resumed") else "",
        f"adaptive-batching {begun.get('adaptive_batching', '')}",
    ]
    return ", ".join(filter(None, said))


def first_too_large(predicted: Iterable[Sequence[int]], fits: int, budget_bytes: int) -> Sequence[int] | None:
    """Return the first (batch size, peak in bytes) predicted above the size that fits and the budget, if any."""
    return next((each for each in predicted if each[0] > fits and each[1] > budget_bytes), None)


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
    words = [
        f"At most {of(probe['batch_size'], 'sample')} of {length} tokens, bound by {probe['reason']}: a full training "
        f"step took {took} of {budget}."
    ]
    too_large = first_too_large(probe["predicted"], probe["batch_size"], probe["budget_bytes"])
    if too_large is not None:
        words.append(f"A step of {count(too_large[0])} would take about {size(too_large[1])}.")
    if probe.get("shorter"):
        points = " and ".join(f"{count(fit)} of {count(tokens)} tokens" for tokens, fit, _ in probe["shorter"])
        words.append(f"Of shorter samples more fit: {points}.")
    return [*words, how]


def differences(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Return (key, value in each run) where configs differ, but for the folders that files are put in."""
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
    return [pair for key in values for pair in _flattened(values[key], f"{prefix}.{key}" if prefix else str(key))]


def snippet(run: Run) -> tuple[str, str] | None:
    """Return a run's settings with what it has found, as YAML, and what they spare the next; None without a record."""
    begun = run.last("run")
    if begun is None or "config" not in begun:
        return None
    config: Mapping[str, Any] = begun["config"]
    settings = {key: config[key] for key in _FIELDS if config.get(key) is not None}
    section = {key: value for key, value in settings.pop("adaptive_batching", {}).items() if value is not None}
    function = settings.get("batch_increase_function")
    if isinstance(function, Mapping) and function.get("_component_") is None:  # as a command line says null
        del settings["batch_increase_function"]
    explored, probed = _explored(run), _probed(run, settings, section)
    found = {**explored, **probed}
    for key, (value, _) in found.items():
        (settings if key in _FIELDS else section)[key] = value
    if section:
        settings["adaptive_batching"] = section
    said = "Nothing to change: what the probe found is kept in the folder of the record, and the next run reads it."
    if found:
        spared = ["explores nothing"] * bool(explored) + ["needs no probe"] * bool(probed)
        said = f"With these settings the next run {' and '.join(spared)}."
    return "\n".join(_yaml(settings, {key: note for key, (_, note) in found.items()})), said


def _explored(run: Run) -> dict[str, tuple[Any, str]]:
    """Return the setting that the run has explored, with what to say of it."""
    if (explored := run.last("exploration")) is None:
        return {}
    best, base = explored["recommended"], explored["estimates"][0]["candidate"]
    return {"micro_batch_size": (best["candidate"], f"the fastest, {best['speedup']:.2f} times as fast as {base}")}


def _probed(run: Run, settings: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the settings that the run has probed for, each with what to say of it."""
    probed, epochs = run.last("probe"), run.events["epoch"]
    micro_batch_size, _ = _explored(run).get("micro_batch_size", (settings.get("micro_batch_size"), ""))
    grows, maximum = settings.get("batch_increase_function") is not None, settings.get("use_maximum_batch_size")
    kept = section.get("grow_beyond_memory") or section.get("keep_global_batch")
    if probed is None or not epochs or micro_batch_size == "auto" or kept:
        return {}  # forwards are filled by what fits, which a probe has to say
    found: dict[str, tuple[Any, str]] = {}
    if not grows and maximum:
        found["batch_size"] = epochs[0]["batch_size"], f"what this run trained with; was {settings.get('batch_size')}"
    elif grows and settings.get("micro_batch_size") is None:
        found["max_batch_size"] = probed["batch_size"], f"what the probe found, bound by {probed['reason']}"
    if found and maximum:
        found["use_maximum_batch_size"] = False, "was True"
    return found


def _yaml(values: Mapping[str, Any], notes: Mapping[str, str], indent: str = "") -> list[str]:
    lines = []
    for key, value in values.items():
        note = f"  # {notes[key]}" if key in notes else ""
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{key}:", *_yaml(value, notes, f"{indent}  ")]
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}{note}")
    return lines


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _READ_AS_OTHERS:
        return value
    return json.dumps(value)  # YAML reads JSON
