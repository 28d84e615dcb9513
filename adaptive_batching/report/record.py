"""Record of a run: every decision as a line of JSON, a summary table, and plots if matplotlib is installed.

Recording never affects training. Once training has begun, any problem, such as a full disk or a missing library, is
only a warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adaptive_batching.growth.course import PlannedEpoch
from adaptive_batching.growth.noise_scale import NoiseEstimate
from adaptive_batching.micro_batches.fastest import Exploration
from adaptive_batching.probe.result import ProbeResult
from adaptive_batching.report.watcher import Watcher
from adaptive_batching.values import ConfigError

log = logging.getLogger(__name__)

_MIB = 2**20
_KINDS = ("maximum", "probe", "exploration", "plan", "epoch", "change", "step", "noise", "resume")
_WITH_STEP = ("epoch", "change", "step", "noise")
# Free disk space required to begin a run: a record of some tens of thousands of steps, and plots.
_BYTES_NEEDED = 4 * _MIB
_SECONDS_TO_DRAW = 120


@dataclass
class _Row:
    """Row of the table: the steps from one decision to the next."""

    epoch: float
    batch_size: int
    reason: str
    steps: int = 0
    samples: int = 0
    loss: float = 0.0
    """Loss summed over samples."""

    last_lr: float = 0.0

    def add(self, step: Mapping[str, Any]) -> None:
        """Add an optimizer step."""
        self.steps += 1
        self.samples += step["samples"]
        self.loss += step["loss"] * step["samples"]
        self.last_lr = step["lr"]

    def __str__(self) -> str:
        mean_loss = self.loss / max(self.samples, 1)
        return (
            f"  {self.epoch:>5g} {self.batch_size:>10} {self.steps:>6} {self.samples:>8} {mean_loss:>7.3f} "
            f"{self.last_lr:>9.2e}  {self.reason}"
        )


class Report(Watcher):
    """Collects the decisions of a run, and writes them to ``report.jsonl`` as they are made.

    Args:
        directory: Folder for the record and the plots; created if needed.
        resume: True to append to an existing record. Otherwise the first event replaces it.
        writes: True only on the rank that writes the record.

    Raises:
        ConfigError: If ``directory`` cannot be written.
    """

    def __init__(self, directory: Path, *, resume: bool = False, writes: bool = True) -> None:
        self.directory = directory
        self.path = directory / "report.jsonl"
        self._writes = writes
        self._warned = False
        self._mode = "a" if resume else "w"
        self._cut_off = False
        self._rows: list[_Row] = []
        self._maximum: list[tuple[str, str]] = []
        self._explored: list[tuple[str, str]] = []
        self._recoveries = 0
        if writes:
            self._check_room()
        if writes and resume and self.path.exists():
            self._note_all()
            self._cut_off = not self.path.read_bytes().endswith(b"\n")  # the previous run was killed within a line

    def _check_room(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self.path.open("a").close()
            room = self.directory / ".room"
            try:
                room.write_bytes(bytes(_BYTES_NEEDED))
            finally:
                room.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"adaptive_batching.report_dir={str(self.directory)!r} cannot be written ({error.strerror}); set it to "
                f"a writable folder"
            ) from None

    def maximum(self, batch_size: int, reason: str) -> None:
        """Record a maximum that needed no probe."""
        self._write("maximum", batch_size=batch_size, reason=reason)
        self._maximum = [("maximum batch size", f"{batch_size} ({reason})")]

    def probe(self, result: ProbeResult, *, sequence_length: int) -> None:
        """Record the result of a probe."""
        self._write("probe", sequence_length=sequence_length, **result.to_dict())
        budget = f"{result.budget_bytes / _MIB:,.0f} MiB"
        too_large = [(b, peak) for b, peak in result.predicted if b > result.batch_size and peak > result.budget_bytes]
        beyond = f"; {too_large[0][0]} would take about {too_large[0][1] / _MIB:,.0f} MiB" if too_large else ""
        runs = f"{result.num_steps} training steps, {result.num_out_of_memory} out of memory"
        if result.enough is not None:
            at = next((peak for size, peak in result.predicted if size >= result.enough), result.peak_bytes)
            self._maximum = [
                ("forwards", f"of up to {result.enough} x {sequence_length} tokens; larger ones would gain little"),
                ("memory", f"predicted {at / _MIB:,.0f} of {budget}; it was not run at its fullest"),
                ("found by", f"{result.search}: {runs}, {result.seconds:.1f} s"),
            ]
            return
        self._maximum = [
            ("maximum batch size", f"{result.batch_size}, bound by {result.reason}"),
            (
                "memory",
                f"peak {result.peak_bytes / _MIB:,.0f} of {budget} at {sequence_length} tokens per sample{beyond}",
            ),
            ("found by", f"{result.search}: {runs}, {result.seconds:.1f} s"),
        ]
        if result.shorter:
            points = ", ".join(f"{batch_size} of {tokens} tokens" for tokens, batch_size, _ in result.shorter)
            self._maximum.insert(2, ("shorter samples", points))

    def epoch(self, **values: Any) -> None:
        """Record the decision at the start of an epoch."""
        self._write("epoch", **values)

    def change(self, **values: Any) -> None:
        """Record a decision for the rest of an epoch."""
        self._write("change", **values)

    def plan(self, epochs: Sequence[PlannedEpoch], *, decided: bool) -> None:
        """Record and log what each epoch is expected to do.

        Args:
            epochs: The remaining epochs of the run.
            decided: True if the plan is final; otherwise the batch may grow during training.
        """
        self._write("plan", decided=decided, epochs=[dataclasses.asdict(epoch) for epoch in epochs])
        header = ("epoch", "batch size", "global batch", "steps", "samples", "dropped", "last lr")
        rows = [
            (
                str(epoch.epoch), _span(epoch.batch_sizes), _span(epoch.global_batch_sizes), str(epoch.steps),
                str(epoch.samples), str(epoch.dropped_samples), f"{epoch.last_lr:.3g}",
            )
            for epoch in epochs
        ]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ["  ".join(cell.rjust(n) for cell, n in zip(row, widths, strict=True)) for row in (header, *rows)]
        total = sum(epoch.steps for epoch in epochs)
        title = "the plan" if decided else "the plan if the batch does not grow, which is decided while training"
        if self._writes:
            log.info("%s: %d optimizer steps\n  %s", title, total, "\n  ".join(lines))

    def resume(self, step: int) -> None:
        """Record that a run goes on after its ``step``-th optimizer step: later ones that are on record run again."""
        self._write("resume", step=step)
        if self._writes:
            with self._only_warned():
                self._note_all()

    def exploration(self, result: Exploration) -> None:
        """Record the timings of an exploration."""
        best, base = result.recommended, result.estimates[0]
        self._write("exploration", **dataclasses.asdict(result))
        found = f"{best.candidate}, {best.speedup:.2f} times as fast as {base.candidate}"
        self._explored = [("micro_batch_size", f"{found}, confidence {100 * best.confidence:.0f} of 100")]

    def step(self, epoch: int, step: int, samples: int, loss: float, lr: float, recoveries: int = 0) -> None:
        """Record an optimizer step on ``samples`` samples, and how many steps had to run again so far."""
        self._recoveries = recoveries
        self._write("step", epoch=epoch, step=step, samples=samples, loss=loss, lr=lr, recoveries=recoveries)

    def noise(self, step: int, shown: NoiseEstimate, noise_scale: float | None) -> None:
        """Record the noise estimates of an optimizer step, and the noise scale so far, in samples."""
        self._write(
            "noise", step=step, tokens=shown.tokens, variance=shown.variance, norm_squared=shown.norm_squared,
            noise_scale=noise_scale,
        )  # fmt: skip

    def finish(self) -> None:
        """Log the table of decisions and their reasons, then draw the plots."""
        if not self._writes:
            return
        with self._only_warned():
            log.info("what was decided, and why\n%s", "\n".join(self.table()))
            if self._mode == "a":  # else nothing was written, and an existing record is of another run
                self._draw()

    def table(self) -> list[str]:
        """Return the lines of the summary: the maximum, then every epoch."""
        times = "once" if self._recoveries == 1 else f"{self._recoveries} times"
        recovered = [("out of memory", f"{times}, recovered")] if self._recoveries else []
        lines = [f"  {name:<20} {value}" for name, value in [*self._maximum, *self._explored, *recovered]]
        lines += ["", f"  {'epoch':>5} {'batch size':>10} {'steps':>6} {'samples':>8} {'loss':>7} {'last lr':>9}  why"]
        return [*lines, *map(str, self._rows), "", f"  {'record':<20} {self.path}"]

    def _draw(self) -> None:
        """Draw in a separate process: if memory is short, a library used by matplotlib ends the process."""
        if find_spec("matplotlib") is None:
            log.info("no plots: matplotlib is missing (pip install 'adaptive-batching[plots]')")
            return
        script = Path(__file__).with_name("plots.py")
        code = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
        done = subprocess.run(
            [sys.executable, "-c", code, str(script), str(self.directory)],
            input=json.dumps(read_events(self.path)), capture_output=True, text=True, timeout=_SECONDS_TO_DRAW,
        )  # fmt: skip
        if done.returncode == 0:
            log.info("plots: %s", ", ".join(done.stdout.splitlines()))
        else:
            last_line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            log.warning("no plots: matplotlib failed (%s)", last_line)

    @contextlib.contextmanager
    def _only_warned(self) -> Iterator[None]:
        """Turn any error inside the context into a warning, logged once."""
        try:
            yield
        except Exception as error:  # any error at all: the run is worth more than its record
            if not self._warned:
                log.warning("the record of this run, %s, is incomplete (%s); training continues", self.path, error)
            self._warned = True

    def _write(self, event: str, **values: Any) -> None:
        if not self._writes:
            return
        with self._only_warned():
            self._note(event, values)
            start = "\n" if self._cut_off else ""
            self._cut_off = True  # until the line is complete; a full disk can cut it off
            with self.path.open(self._mode) as file:
                file.write(start + json.dumps({"event": event, **values}) + "\n")
            self._cut_off, self._mode = False, "a"

    def _note_all(self) -> None:
        """Make the table from the record."""
        self._rows = []
        for kind, values in _lines_that_count(self.path):
            self._note(kind, values)

    def _note(self, event: str, values: Mapping[str, Any]) -> None:
        """Update the table with an event."""
        if event == "epoch":  # an epoch that runs again, as after a resume, counts once
            self._rows = [row for row in self._rows if row.epoch < values["epoch"]]
        if event in ("epoch", "change"):
            self._rows.append(_Row(values["epoch"], values["batch_size"], values["reason"]))
        elif event == "step" and self._rows:
            self._rows[-1].add(values)


def read_events(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the events of a record by kind. Of what ran twice, as after a resume, the last run counts.

    Lines that cannot be read, because a full disk or a killed process cut them off, are skipped.
    """
    events: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _KINDS}
    for kind, values in _lines_that_count(path):
        events[kind].append(values)
    return events


def _lines_that_count(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return (kind, values) of each event, in order, without those of epochs and steps that ran again."""
    events: list[tuple[str, dict[str, Any]]] = []
    for kind, values in _lines(path):
        if kind in ("epoch", "resume"):
            events = [(k, v) for k, v in events if k not in _WITH_STEP or _came_before(values, v)]
        events.append((kind, values))
    return events


def _came_before(start: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """Return True if ``event`` came before an epoch, or what is resumed, with the event ``start``."""
    if "epoch" in start and "epoch" in event:
        return bool(event["epoch"] < start["epoch"])
    return bool(event["step"] <= start["step"])


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (kind, values) of each event that can be read."""
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("event") in _KINDS:
                yield event.pop("event"), event


def _span(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"
