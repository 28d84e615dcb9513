"""The config of a run: whole, with what the run has found, and where it differs from others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from adaptive_batching._report.events import Run
from adaptive_batching._report.facts import bound, grows

_OF_TRAINER = "per_device_train_batch_size"
_FIELDS = (
    "batch_size", _OF_TRAINER,
    "use_maximum_batch_size", "batch_increase_function", "micro_batch_size", "adaptive_batching",
)  # fmt: skip
# Scalars that YAML reads back as the text that they are.
_PLAIN = re.compile(r"[A-Za-z_./$][\w./$%{}-]*|[\d.]+(GiB|MiB|KiB|GB|MB|KB|%)")
_READ_AS_OTHERS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")


def differences(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Return (key, value in each run) where configs differ, but for the folders that files are put in."""
    return _differences([(run.last("run") or {}).get("config") for run in runs])


def from_stock(run: Run) -> tuple[str, list[tuple[str, list[str]]]] | None:
    """Return the name of torchtune's config of a run's name, and (key, value there and here) where they differ."""
    begun = run.last("run") or {}
    if (stock := begun.get("stock")) is None:
        return None
    return str(stock["name"]), _differences([stock["config"], begun.get("config")])


def _differences(configs: list[Any]) -> list[tuple[str, list[str]]]:
    flat = []
    for nested in configs:
        config = dict(_flattened(nested))
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


def whole_config(run: Run) -> str:
    """Return all of a run's config as YAML; empty if the record does not hold it."""
    return "\n".join(_yaml((run.last("run") or {}).get("config") or {}, {}))


def snippet(run: Run) -> tuple[str, str] | None:
    """Return a run's settings with what it has found, as YAML, and what they spare the next; None without a record."""
    begun = run.last("run")
    if begun is None or "config" not in begun:
        return None
    config: Mapping[str, Any] = begun["config"]
    settings = {key: config[key] for key in _FIELDS if config.get(key) is not None}
    section = {key: value for key, value in settings.pop("adaptive_batching", {}).items() if value is not None}
    if not grows(settings):
        settings.pop("batch_increase_function", None)
    explored, probed = _explored(run), _probed(run, settings, section)
    found = {**explored, **probed}
    for key, (value, _) in found.items():
        (settings if key in _FIELDS else section)[key] = value
    if section:
        settings["adaptive_batching"] = section
    said = "Nothing to change: these are the settings of this run."
    if run.last("probe") is not None and _OF_TRAINER not in settings:
        said = "Nothing to change: the probe's result is kept next to the record, and the next run reuses it."
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
    maximum = settings.get("use_maximum_batch_size")
    kept = section.get("grow_beyond_memory") or section.get("keep_global_batch")
    if probed is None or not epochs or micro_batch_size == "auto" or kept:
        return {}  # forwards are filled by what fits, which a probe has to say
    found: dict[str, tuple[Any, str]] = {}
    size, largest = _OF_TRAINER if _OF_TRAINER in settings else "batch_size", probed["batch_size"]
    configured = settings.get(size)
    if not grows(settings) and maximum:
        found[size] = epochs[0]["batch_size"], f"what this run trained with; was {configured}"
    elif grows(settings) and settings.get("micro_batch_size") is None:
        found["max_batch_size"] = largest, f"what the probe found, bound by {bound(probed)}"
        if configured is not None and configured > largest:
            found[size] = largest, f"no more fits; was {configured}"
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
