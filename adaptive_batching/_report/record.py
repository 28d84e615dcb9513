"""Record of a run: every decision as a line of JSON, a summary table, and a page.

Recording never affects training. Once training has begun, any problem, such as a full disk, is only a warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from adaptive_batching._growth.batch_size_schedule import PlannedEpoch
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._report.events import (
    RECORD,
    VERSION,
    DecisionTotals,
    Event,
    StepCost,
    Watcher,
    balance_of,
    by_dataset,
    lines_that_count,
    written,
)
from adaptive_batching._report.facts import cost_of_growth, grows
from adaptive_batching._report.page import finish_page, start_page, stop_page
from adaptive_batching._report.summary import (
    Named,
    lines_of_probe,
    named,
    table_of_decisions,
    table_of_plan,
)
from adaptive_batching._values import ConfigError

log = logging.getLogger(__name__)

_BYTES_NEEDED = 4 * 2**20  # of disk, to begin a run: a record of some ten thousand steps, and the page
_SECONDS_FOR_PAGE = 60
_LONGEST_MESSAGE = 4000
_INCOMPLETE = "the record of this run, {path}, is incomplete ({error}); training continues"
_NO_PAGE = "the page of this run could not be made ({error}); 'adaptive-batching report {path.parent}' makes it"


class Report(Watcher):
    """Collects the decisions of a run, and writes them to ``report.jsonl`` as they are made.

    With ``resume`` an existing record is appended to; otherwise the first event replaces it. The first rank writes the
    record; another adds no more than the error that ends it. ``about`` is what the record says of the run.
    """

    def __init__(
        self,
        directory: Path,
        *,
        resume: bool = False,
        rank: int = 0,
        ranks: int = 1,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory, self.path = directory, directory / RECORD
        self._rank, self._writes, self._is_alone = rank, rank == 0, ranks == 1
        self._about = {"time": _now(), "resumed": resume, **(about or {})}
        self._began = False
        self._appends = resume
        self._cut_off = False
        self._warned_of: set[str] = set()
        self._cost: dict[str, Any] = {}
        self._page: subprocess.Popen[str] | None = None
        self._totals: list[DecisionTotals] = []
        self._found: list[tuple[str, str]] = []
        self._validations: list[Event] = []
        self._recoveries = 0
        if not self._writes:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self.path.open("a").close()
            room = directory / ".room"
            try:
                room.write_bytes(bytes(_BYTES_NEEDED))
            finally:
                room.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"adaptive_batching.report_dir={str(directory)!r} cannot be written ({error.strerror}); set it to a "
                f"writable folder"
            ) from None
        if resume and self.path.exists():
            self._note_all()
            self._cut_off = not self.path.read_bytes().endswith(b"\n")  # the previous run was killed within a line

    def maximum(self, batch_size: int, reason: str) -> None:
        self._write("maximum", batch_size=batch_size, reason=reason)
        self._found.append(("maximum batch size", f"{batch_size} ({reason})"))

    def probe(
        self, result: ProbeResult, *, sequence_length: int, of: str = "maximum batch size", waited: float
    ) -> None:
        """Record the result of a probe, ``of`` what the table is to say, for which the run has ``waited`` seconds."""
        self._write("probe", sequence_length=sequence_length, waited=waited, **result.to_dict())
        self._found += lines_of_probe(result, sequence_length, of)
        if grows(self._about.get("config") or {}) and (cost := cost_of_growth(result.to_dict())):
            self._found.append(("growth", cost))

    def found(self, kind: str, line: Named, **values: Any) -> None:
        """Record a result that a host has of its own, an event of ``kind``, which the summary has a ``line`` for."""
        self._write(kind, **values)
        self._found.append(line)

    def exploration(self, *, recommended: Event, estimates: Sequence[Event], noise: float) -> None:
        self._write("exploration", recommended=recommended, estimates=estimates, noise=noise)
        fastest = (
            f"{recommended['candidate']}, {recommended['speedup']:.2f} times as fast as {estimates[0]['candidate']}"
        )
        self._found.append(("micro_batch_size", f"{fastest}, confidence {100 * recommended['confidence']:.0f} of 100"))

    def plan(self, epochs: Sequence[PlannedEpoch], *, decided: bool) -> None:
        """Record and log what each remaining epoch is expected to do; unless ``decided``, the batch may grow."""
        self._write("plan", decided=decided, epochs=[dataclasses.asdict(epoch) for epoch in epochs])
        if not self._writes:
            return
        title = "the plan" if decided else "the plan if the batch does not grow, which is decided while training"
        total = sum(epoch.steps for epoch in epochs)
        log.info("%s: %d optimizer steps\n  %s", title, total, "\n  ".join(table_of_plan(epochs)))

    def resume(self, step: int, *, epoch: float, batch_size: int, global_batch_size: int) -> None:
        """Record that a run goes on after ``step`` steps, with these sizes: later ones on record run again."""
        self._write("resume", step=step)
        if not self._writes:
            return
        with self.only_warned():
            self._note_all()
        sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        if not self._totals or (self._totals[-1].batch_size, self._totals[-1].global_batch_size) != (*sizes.values(),):
            self.change(epoch=epoch, step=step, reason="resumed with this size", **sizes)

    def epoch(self, **values: Any) -> None:
        """Record the decision at the start of an epoch, and show on the page the epochs before it."""
        has_trained = bool(self._totals and self._totals[-1].steps)
        self._write("epoch", **values)
        if has_trained and (self._page is None or self._page.poll() is not None):
            with self.only_warned(_NO_PAGE):
                self._page = start_page(self.directory)

    def change(self, **values: Any) -> None:
        self._write("change", **values)

    def cost(self, cost: StepCost) -> None:
        self._cost = dataclasses.asdict(cost)  # until the step is recorded

    def step(self, epoch: int, step: int, samples: int, loss: float, lr: float, recoveries: int = 0) -> None:
        self._recoveries = recoveries
        cost, self._cost = self._cost, {}
        self._write("step", epoch=epoch, step=step, samples=samples, loss=loss, lr=lr, recoveries=recoveries, **cost)

    def validation(self, epoch: int, step: int, loss: float, dataset: str | None = None) -> None:
        self._write("validation", epoch=epoch, step=step, loss=loss, dataset=dataset)

    def recovery(self, epoch: int, step: int, failed: str, max_tokens: int | None) -> None:
        self._write("recovery", epoch=epoch, step=step, failed=failed, max_tokens=max_tokens)

    def took(self, what: str, epoch: int, step: int, seconds: float) -> None:
        self._write("took", what=what, epoch=epoch, step=step, seconds=seconds)

    def end(self) -> None:
        self._write("end", time=_now())

    def finish(self) -> None:
        """Record the end of the run, log the table of decisions and make the page."""
        if not self._writes:
            return
        self.end()
        with self.only_warned():
            log.info("what was decided, and why\n%s", "\n".join(self.table()))
        if self._began:  # else nothing could be written, and an existing record is of another run
            self._make_page()

    @contextlib.contextmanager
    def showing_errors(self) -> Iterator[None]:
        """Record an error that ends the run inside, and make the page, not waited for where there are other ranks.

        The error goes on as it was.
        """
        try:
            yield
        except BaseException as error:
            values = {"type": type(error).__name__, "message": str(error)[:_LONGEST_MESSAGE], "rank": self._rank}
            with contextlib.suppress(KeyboardInterrupt):  # a second one: the page is not waited for any longer
                if self._began and self.path.exists():  # as in finish
                    with self.only_warned(), self.path.open("a") as file:
                        # At once, so that lines of several ranks do not mix.
                        file.write(("\n" if self._cut_off else "") + written("error", {"time": _now(), **values}))
                    self._make_page(waits=self._is_alone)
            raise

    def table(self) -> list[str]:
        """Return the lines of the summary: what was found, then every decision."""
        shown = [*self._found]
        if self._recoveries:
            times = "once" if self._recoveries == 1 else f"{self._recoveries} times"
            shown.append(("out of memory", f"{times}, recovered"))
        if balance := balance_of(self._totals):
            shown.append(("devices", balance))
        for on, events in by_dataset(self._validations).items():
            last, least = events[-1], min(events, key=lambda event: event["loss"])
            losses = [f"{event['loss']:.4f} after step {event['step']}" for event in (last, least)]
            of_set = f"{on.strip()}: " if on else ""
            shown.append(("validation loss", f"{of_set}last {losses[0]}, least {losses[1]}"))
        return [
            *named(shown), "", *table_of_decisions(self._totals), "", *named([("record", str(self.path))])
        ]  # fmt: skip

    def wait_for_page(self) -> None:
        """Wait until a page that is being made is complete, for those who copy the folder."""
        if self._page is not None:
            with self.only_warned(_NO_PAGE):
                finish_page(self._page, _SECONDS_FOR_PAGE)

    def _make_page(self, *, waits: bool = True) -> None:
        with self.only_warned(_NO_PAGE):
            if self._page is not None:
                stop_page(self._page, self.directory)  # what it shows is out of date
            self._page = start_page(self.directory)
            if waits:
                log.info("the page of this run: %s", finish_page(self._page, _SECONDS_FOR_PAGE))

    @contextlib.contextmanager
    def only_warned(self, message: str = _INCOMPLETE) -> Iterator[None]:
        """Turn any error inside the context into a warning; each message is logged once."""
        try:
            yield
        except Exception as error:  # any error at all: the run is worth more than its record
            if message not in self._warned_of:
                log.warning("%s", message.format(path=self.path, error=error))
            self._warned_of.add(message)

    def _write(self, event: str, **values: Any) -> None:
        if not self._writes:
            self._began = True  # on the first rank
            return
        with self.only_warned():
            self._note(event, values)
            text = "\n" if self._cut_off else ""
            if not self._began:
                text += written("run", {"version": VERSION, **self._about})
            self._cut_off = True  # until the line is complete; a full disk can cut it off
            with self.path.open("a" if self._began or self._appends else "w") as file:
                file.write(text + written(event, values))
            self._cut_off, self._began = False, True

    def _note_all(self) -> None:
        """Make the table from the record."""
        self._totals = []
        for kind, values in lines_that_count(self.path):
            self._note(kind, values)

    def _note(self, event: str, values: Mapping[str, Any]) -> None:
        """Update the table with an event."""
        if event == "epoch":  # an epoch that runs again, as after a resume, counts once
            self._totals = [each for each in self._totals if each.epoch < values["epoch"]]
            self._validations = [
                validation for validation in self._validations if validation["epoch"] < values["epoch"]
            ]
        if event in ("epoch", "change"):
            self._totals.append(DecisionTotals.of_decision(values))
        elif event == "step" and self._totals:
            self._totals[-1].add(values)
        elif event == "validation":
            self._validations.append({**values})


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
