"""The result of a probe: plain values, stored with the run's output and reused until a relevant setting changes."""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaptive_batching._probe.sizes import Measurement

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeResult:
    """The largest batch size, and the evidence for it. Plain values only, so that it can be stored."""

    batch_size: int
    reason: str
    """The binding constraint: memory, or the upper bound given to :func:`find_maximum_batch_size`."""
    budget_bytes: int
    total_bytes: int
    search: str
    seconds: float
    measurements: list[Measurement]
    """Every size that ran, in order."""
    predicted: list[tuple[int, int]] = field(default_factory=list)
    """(batch size, predicted peak bytes), calibrated; empty if no trace was possible."""
    shorter: list[tuple[int, int, int]] = field(default_factory=list)
    """(tokens, batch size, measured peak bytes) for shorter samples, where more tokens fit."""

    enough: int | None = None
    """Batch size beyond which larger ones would be of little use, if that was asked and it is predicted to fit by far;
    it has not run. :attr:`batch_size` is then the largest that has run."""

    peak_moment: str = ""
    """Part of the step that the peak falls into, as traced; empty if no trace says."""

    peak_kinds: dict[str, int] = field(default_factory=dict)
    """Bytes of each kind (:data:`adaptive_batching._trace.traced_step.KINDS`) that are alive then."""

    @property
    def peak_bytes(self) -> int:
        """Measured peak at :attr:`batch_size`."""
        peak = next(m.peak_bytes for m in self.measurements if m.batch_size == self.batch_size)
        assert peak is not None
        return peak

    @property
    def num_steps(self) -> int:
        """Number of training steps that ran or started."""
        return sum(m.steps for m in self.measurements)

    @property
    def num_out_of_memory(self) -> int:
        return sum(m.peak_bytes is None for m in self.measurements)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ProbeResult:
        """Rebuild a result from :meth:`to_dict`.

        Raises:
            TypeError, KeyError: If ``values`` is not a stored result.
        """
        measurements = [Measurement(**m) for m in values["measurements"]]
        predicted = [(int(b), int(peak)) for b, peak in values["predicted"]]
        shorter = [(int(tokens), int(b), int(peak)) for tokens, b, peak in values["shorter"]]
        return cls(**{**values, "measurements": measurements, "predicted": predicted, "shorter": shorter})


def load_result(path: Path, key: dict[str, Any]) -> ProbeResult | None:
    """Return the result stored at ``path`` under the same ``key``; else None, and log why a stored one is ignored."""
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_text())
        result, stored_key = ProbeResult.from_dict(stored["result"]), stored["key"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("probe result %s cannot be read (%s); probing again", path, error)
        return None
    key = json.loads(json.dumps(key))  # convert tuples and the like as JSON does
    changed = sorted(k for k in {*key, *stored_key} if key.get(k, ...) != stored_key.get(k, ...))
    if changed:
        shown = ", ".join(f"{k}: {stored_key.get(k)!r} -> {key.get(k)!r}" for k in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        log.info("stored probe result ignored, because these changed: %s%s", shown, more)
        return None
    return result


def store_result(path: Path, key: dict[str, Any], result: ProbeResult) -> None:
    """Write ``result`` to ``path`` atomically; log a warning if that fails."""
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"key": key, "result": result.to_dict()}, indent=2) + "\n")
        partial.replace(path)
    except OSError as error:
        log.warning("the probe's result cannot be kept in %s (%s); the next run will probe again", path, error)
