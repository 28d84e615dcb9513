"""The config to paste: the settings of a run with what it has found, so that the next need not look for it again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaptive_batching._report.events import Run

_FIELDS = ("batch_size", "use_maximum_batch_size", "batch_increase_function", "micro_batch_size", "adaptive_batching")
# Scalars that YAML reads back as the text that they are.
_PLAIN = re.compile(r"[A-Za-z_./$][\w./$%{}-]*|[\d.]+(GiB|MiB|KiB|GB|MB|KB|%)")
_READ_AS_OTHERS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")


@dataclass(frozen=True)
class Snippet:
    """Lines of YAML, and a sentence on what they spare the next run."""

    yaml: str
    spares: str


def snippet(run: Run) -> Snippet | None:
    """Return the settings to paste; None for a record that does not hold those of its run."""
    begun = run.last("run")
    if begun is None or "config" not in begun:
        return None
    config: Mapping[str, Any] = begun["config"]
    settings = {key: config[key] for key in _FIELDS if config.get(key) is not None}
    section = {
        key: value for key, value in (settings.pop("adaptive_batching", None) or {}).items() if value is not None
    }
    function = settings.get("batch_increase_function")
    if (
        isinstance(function, Mapping) and function.get("_component_") is None
    ):  # as a command line leaves it that says null
        del settings["batch_increase_function"]
    found, notes, spared = _found(run, settings, section)
    settings |= {key: value for key, value in found.items() if key in _FIELDS}
    section |= {key: value for key, value in found.items() if key not in _FIELDS}
    if section:
        settings["adaptive_batching"] = section
    if not found:
        said = "Nothing to change: what the probe found is kept in the folder of the record, and the next run reads it."
    else:
        said = f"With these settings the next run {' and '.join(spared)}."
    return Snippet("\n".join(_yaml(settings, notes)), said)


def _found(
    run: Run, settings: Mapping[str, Any], section: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return the settings that the run has found, what to say of each, and what they spare."""
    found: dict[str, Any] = {}
    notes: dict[str, str] = {}
    spared: list[str] = []
    explored, probed, first = run.last("exploration"), run.last("probe"), next(iter(run.events["epoch"]), None)
    size, is_whole = settings.get("micro_batch_size"), settings.get("micro_batch_size") is None
    if explored is not None:
        best = explored["recommended"]
        size = found["micro_batch_size"] = best["candidate"]
        base = explored["estimates"][0]["candidate"]
        notes["micro_batch_size"] = f"the fastest, {best['speedup']:.2f} times as fast as {base}"
        spared.append("explores nothing")
    grows = settings.get("batch_increase_function") is not None
    kept = section.get("grow_beyond_memory") or section.get("keep_global_batch")
    if probed is None or first is None or size == "auto" or kept:
        return found, notes, spared  # forwards are filled by what fits, which a probe has to say
    if not grows and settings.get("use_maximum_batch_size"):
        found["batch_size"] = first["batch_size"]
        notes["batch_size"] = f"what this run trained with; was {settings.get('batch_size')}"
    elif grows and is_whole:
        found["max_batch_size"] = probed["batch_size"]
        notes["max_batch_size"] = f"what the probe found, bound by {probed['reason']}"
    else:
        return found, notes, spared
    spared.append("needs no probe")
    if settings.get("use_maximum_batch_size"):
        found["use_maximum_batch_size"] = False
        notes["use_maximum_batch_size"] = "was True"
    return found, notes, spared


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
