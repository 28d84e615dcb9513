"""One plan: a dry run of a recipe with its own probe, and what it says, in words and as an object."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptive_batching._dry_run.answer import DryRun
from adaptive_batching._dry_run.answer_in_words import peak_in_words
from adaptive_batching._dry_run.on_cards import Launch
from adaptive_batching._dry_run.time.forecast import RunLength
from adaptive_batching._dry_run.time.seconds import UNCORRECTED
from adaptive_batching._dry_run.times import time_as_object, time_in_words
from adaptive_batching._dry_run.verdict import Answer, outside_of_allocator
from adaptive_batching._report.events import RecordError, read_events
from adaptive_batching._torchtune.cli.levers import Planned
from adaptive_batching._torchtune.names import REPORTED, command_of_recipe
from adaptive_batching._values import ConfigError, memory_size

VERSION = 2
"""Of the object that ``--json`` prints. Version 1 was a model of the run, and no run."""

MOST_SAMPLES = 8192
"""Of a batch, where neither ``max_batch_size`` nor the data bound it."""

MISTAKE = 2  # exit code
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # data of a hub come from its cache
SAID = re.compile(r"(?m)^(?:\[rank\d+\]:? ?)?error: (.*)$")
"""Matches the line in which a recipe reports a mistake, in the output of its process."""


class NotPlannedError(RuntimeError):
    """Raised for what no plan can be made of; the message says why."""


@dataclass(frozen=True)
class Asked:
    """The command line, read."""

    run: Planned
    launch: Launch
    length: int | None  # None for that of the config, or of its data
    samples: int | None
    tokens: float | None
    price: float | None

    @property
    def batch_size(self) -> int:
        """The samples of a forward pass that the config asks for; 1 if it takes what fits."""
        cfg = self.run.cfg
        if isinstance(size := cfg.get("micro_batch_size"), int):
            return size
        takes_what_fits = size is not None or cfg.get("use_maximum_batch_size", False)
        return 1 if takes_what_fits else int(cfg.get("batch_size", 1))

    @property
    def accumulation(self) -> int:
        return int(self.run.cfg.get("gradient_accumulation_steps") or 1)


def make_plan(asked: Asked, folder: Path) -> tuple[dict[str, Any], list[str], int]:
    """Run a recipe with its probe; return what ``--json`` prints, lines, and the exit code."""
    run, accumulation = asked.run, asked.accumulation
    samples = MOST_SAMPLES if asked.samples is None else asked.samples // run.devices // accumulation
    command = command_of_recipe(
        [run.recipe, "--config", run.config, *run.overrides], folder, run.devices, asked.length,
        samples=max(min(samples, MOST_SAMPLES), 1) * _forwards(asked) * run.devices, accumulation=accumulation,
    )  # fmt: skip
    done = asked.launch.run(command, folder, OFFLINE)
    said = SAID.findall((folder / "said").read_text(errors="replace"))
    reported: dict[str, Any] = json.loads(path.read_text()) if (path := folder / REPORTED).exists() else {}
    probe = _probe_in(folder)
    if done.ending.exit_code == MISTAKE:
        raise ConfigError(said[-1] if said else "the recipe ended with a mistake")
    length = reported.get("length")
    if probe is None and done.failure is None and not (said and said[-1].startswith("a batch of one sample does not")):
        if length is None and not done.ending.interrupted:
            raise NotPlannedError(said[-1] if said else f"{done.why_not}")
        return _unknown(asked, done, length, said)
    return _answered(asked, done, reported, probe, said)


def _probe_in(folder: Path) -> Mapping[str, Any] | None:
    with contextlib.suppress(RecordError, OSError, UnicodeDecodeError):
        return next(reversed(read_events(folder / "out" / "adaptive_batching" / "report.jsonl")["probe"]), None)
    return None


def _unknown(
    asked: Asked, done: DryRun, length: int | None, said: Sequence[str]
) -> tuple[dict[str, Any], list[str], int]:
    reason = done.why_not or "the recipe ended before its probe"
    if said:
        reason = said[-1]
    answer = Answer.CANNOT_TELL
    shown = {**_object(asked, length), "answer": str(answer), "fits": None, "reason": reason}
    return shown, [f"{answer}: {reason}"], answer.value


def _object(asked: Asked, length: int | None) -> dict[str, Any]:
    run, gpu = asked.run, asked.launch.gpu
    memory = asked.launch.memory_bytes if gpu is None else gpu.memory_bytes
    return {
        "version": VERSION, "config": run.config, "recipe": run.recipe, "devices": run.devices,
        "card": None if gpu is None else gpu.name, "memory_bytes": memory, "batch_size": asked.batch_size,
        "sequence_length": length, "gpus": [], "levers": [],
    }  # fmt: skip


def _answered(
    asked: Asked, done: DryRun, reported: Mapping[str, Any], probe: Mapping[str, Any] | None, said: Sequence[str]
) -> tuple[dict[str, Any], list[str], int]:
    length, devices = int(reported["length"]), asked.run.devices
    trained = probe is not None and done.steps > 0 and done.failure is None
    largest = 0 if probe is None else int(probe["batch_size"])
    card = done.card
    most = sum(each.most for each in outside_of_allocator(devices)) - card.context_bytes
    answer = Answer.DOES_NOT_FIT
    if largest >= asked.batch_size:
        is_close = largest == asked.batch_size and trained and most > done.left_bytes
        answer = Answer.TIGHT if is_close else Answer.FITS
    reason = None
    if probe is None:
        reason = re.split("; | \\(", said[-1])[0] if said else "out of memory before the probe"
    elif not trained:
        reason = done.why_not or "the largest batch ran out of memory in training"
        answer = Answer.CANNOT_TELL
    ran = [] if probe is None else probe["measurements"]
    peaks = (done.worst or {"peaks": {}})["peaks"]
    history = (done.worst or {}).get("history", {})
    time, of_time = _time(asked, done, reported)
    shown = {
        **_object(asked, length),
        "answer": str(answer),
        "fits": None if answer is Answer.CANNOT_TELL else answer is not Answer.DOES_NOT_FIT,
        "reason": reason,
        "largest_micro_batch": largest,
        "token_budget": largest * length,
        "bound": None if probe is None else probe["reason"],
        "probe": [{key: one.get(key) for key in ("batch_size", "fits", "peak_bytes", "steps")} for one in ran],
        "peak_bytes": peaks.get("allocated"),
        "reserved_bytes": peaks.get("reserved"),
        "left_bytes": done.left_bytes if trained else None,
        "peak": {key: value for key, value in history.items() if key not in ("points", "steps_end")},
        "failed_allocation": done.failure,
        "time": time,
        "hours_per_epoch": None if time is None else time["hours_per_epoch"],
    }  # fmt: skip
    on = f"{card}{f', on each of {devices}' if devices > 1 else ''}"
    wanted = f"a forward pass of {asked.batch_size} x {length:,} tokens on {on}"
    lines = [f"{answer}: {wanted}" + ("" if reason is None else f": {reason}")]
    if largest:
        assert probe is not None
        lines.append(f"largest micro-batch: {_samples(largest)} of {length:,} tokens, bound by {probe['reason']}")
        lines.append(f"token budget: {largest * length:,} padded tokens in a forward pass")
        sizes = ", ".join(f"{one['batch_size']:,}{'' if one['fits'] else ' (too large)'}" for one in ran)
        lines.append(f"  {'tried':<10}{sizes}, by the probe of the recipe on the emulated device")
    if done.worst is not None:
        lines += peak_in_words(done)
    lines += [f"  {name:<10}{text}" for name, text in of_time]
    if answer is Answer.TIGHT:
        what = "CUDA's context and NCCL" if devices > 1 else "CUDA's context"
        amount = memory_size(card.context_bytes + most)
        lines.append(f"  {'tight':<10}{what} may take up to {amount} on a real card")
    if answer is Answer.DOES_NOT_FIT:
        lines.append(f"  {'to do':<10}--levers tries what takes less")
    return shown, lines, answer.value


def _time(
    asked: Asked, done: DryRun, reported: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, list[tuple[str, str]]]:
    """Return how long a step of the largest batch takes, of at most two forward passes, as an object and in words."""
    forecast = done.forecast
    if forecast is None:
        return None, [("time", f"not known: {done.why_no_time}")] if done.lacks_time else []
    tokens = reported.get("tokens")
    if tokens is None and asked.samples is not None:
        tokens = asked.samples * int(reported["length"])
    length = RunLength(tokens=asked.tokens or tokens, price=asked.price)
    shown = time_as_object(forecast, length, UNCORRECTED)
    shown["hours_per_epoch"] = None if tokens is None else forecast.hours(RunLength(tokens=tokens))
    shown["seconds_per_forward"] = forecast.step.seconds / _forwards(asked)
    return shown, time_in_words(forecast, length)


def _forwards(asked: Asked) -> int:
    """Return the forward passes of a step of the plan, as ``dry_run.accumulate_for_plan`` has them."""
    cfg = asked.run.cfg
    splits = cfg.get("micro_batch_size") is not None
    return 2 if (asked.accumulation > 1 or splits) and not cfg.get("optimizer_in_bwd") else 1


def _samples(number: int) -> str:
    return "1 sample" if number == 1 else f"{number:,} samples"
