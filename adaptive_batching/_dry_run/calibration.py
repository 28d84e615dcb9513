"""Correct predicted seconds by those of a real run, whose record says how long its steps took."""

from __future__ import annotations

import statistics
from pathlib import Path

from adaptive_batching._dry_run.answer import DryRun
from adaptive_batching._dry_run.cards import GPUS, Gpu
from adaptive_batching._dry_run.time.seconds import UNCORRECTED, Correction, correction_for
from adaptive_batching._report.events import RecordError, read_events
from adaptive_batching._values import ConfigError

WARM_UP = 3  # steps of a run that are slower than the rest: libraries load, kernels are compiled
LEAST_STEPS = 3


def corrected_by(record: Path, run: DryRun) -> Correction:
    """Return the correction by which a dry run takes as long as a real run of the same command did on the same card.

    Raises:
        ConfigError: If the record tells too little or is of another card, or the dry run has no time.
    """
    if run.forecast is None or run.slowest is None or run.card.gpu is None:
        raise ConfigError(f"--calibrate {record}: this dry run has no time to compare with ({run.why_no_time})")
    seconds = seconds_of_record(record, run.forecast.tokens)
    check_card(record, run.card.gpu)
    return correction_for(seconds, run.slowest[1].work, run.card.gpu)


def check_card(record: Path, card: Gpu) -> None:
    """Raise ConfigError if a record, which can be read, is of a run on another device than ``card``."""
    device = next((str(begun["device"]) for begun in reversed(read_events(record)["run"]) if begun.get("device")), "")
    if device == "cpu":
        raise ConfigError(f"--calibrate {record} is of a run on the CPU; give the record of a run on a GPU")
    other = next((gpu.name for gpu in GPUS if gpu.device_name == device), card.name)
    if other != card.name and device != card.device_name:
        raise ConfigError(
            f"--calibrate {record} is of a run on {device}, and not on {card.name}; put --gpu '{other}' first"
        )


def seconds_of_record(record: Path, tokens: int) -> float:
    """Return the seconds of a step of a record, for as many tokens, where it tells tokens.

    Args:
        record: Of a run: `report.jsonl`.
        tokens: Of a step whose seconds are compared, padding included and over all devices; 0 if not known.
    """
    try:
        events = read_events(record)
    except (RecordError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibrate {record} cannot be read: {error}") from None
    timed = [step for step in events["step"] if step.get("seconds")]
    least = WARM_UP + LEAST_STEPS
    if len(timed) < least:
        raise ConfigError(
            f"--calibrate {record} has {len(timed)} timed steps; give the record of a run of {least} or more"
        )
    steps = timed[WARM_UP:]
    ranks = max((int(begun.get("ranks") or 1) for begun in events["run"]), default=1)
    if tokens and all(step.get("padded_tokens") for step in steps):
        each = tokens / ranks
        return float(statistics.median(each * step["seconds"] / step["padded_tokens"] for step in steps))
    return float(statistics.median(step["seconds"] for step in steps))


def as_option(correction: Correction) -> str:
    """Write a correction as `--correction` takes it."""
    what, factor = ("host", correction.host) if correction.host != 1 else ("card", correction.card)
    return f"{what}={factor:.3g}"


def read_correction(text: str | None) -> Correction:
    """Read what `as_option` has written."""
    if text is None:
        return UNCORRECTED
    what, _, number = text.partition("=")
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if what not in ("card", "host") or not 0 < factor < 100:
        raise ConfigError(f"--correction {text} must be card= or host= and a factor, such as card=1.07")
    return Correction(card=factor) if what == "card" else Correction(host=factor)
