"""The answer of a dry run, read from the files of its processes, and as one JSON object."""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adaptive_batching._dry_run.cards import Gpu
from adaptive_batching._dry_run.ends import condition_on_a_value
from adaptive_batching._dry_run.process_work import ProcessWork, read_works
from adaptive_batching._dry_run.time.forecast import NO_LENGTH, Forecast, RunLength, kind_of, uncounted_in
from adaptive_batching._dry_run.time.seconds import SLOW_HOST, UNCORRECTED, Correction, StepSeconds, seconds_of_step
from adaptive_batching._dry_run.times import time_as_object
from adaptive_batching._dry_run.verdict import Answer, outside_of_allocator
from adaptive_batching._values import memory_size

VERSION = 1
"""Of the object that ``--json`` prints."""

# Of what starts a script, when the script has failed: torchrun, accelerate and trl, multiprocessing
_OF_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessExitedException", "SignalException")


@dataclass(frozen=True)
class Card:
    """The card that is stood in for."""

    name: str
    memory_bytes: int
    context_bytes: int  # that CUDA takes of it
    gpu: Gpu | None = None  # what is known of it, if it was named

    def __str__(self) -> str:
        return f"{self.name} ({memory_size(self.memory_bytes)})"


@dataclass(frozen=True)
class Ending:
    """How the command has ended."""

    exit_code: int  # negative: the signal
    interrupted: bool
    seconds: float
    waited: float | None = None  # seconds without a step after which it was ended


@dataclass(frozen=True)
class DryRun:
    """A dry run that is over."""

    card: Card
    ending: Ending
    processes: Sequence[dict[str, Any]]  # as `watch` writes them, those alone that asked for a device
    errors: Sequence[dict[str, Any]] = ()  # that ended processes
    condition: str | None = None  # line of the script, or callback, that ended training because of a value
    notes_work: bool = False  # if it was to be noted what a step asks of its device
    works: Sequence[ProcessWork] = ()  # which of each process
    correction: Correction = UNCORRECTED
    kept: Sequence[str] = ()
    """Files that were there before, and that the script would have overwritten, moved or removed."""

    @functools.cached_property
    def forecast(self) -> Forecast | None:
        """How long a step takes, which is as long as that of the slowest process; None if it is not known."""
        fits = self.answer in (Answer.FITS, Answer.TIGHT)
        if self.slowest is None or not fits or self.work_trouble is not None:
            return None
        step, slowest = self.slowest
        if not step.seconds:
            return None
        devices = max(slowest.ranks, len(self.works))
        each = devices / len(self.works)  # of a group that is not real, one process runs for all
        batches = slowest.counts.batches
        return Forecast(
            step, self.card.name, kind_of(slowest.work, step, devices), devices,
            samples=round(each * sum(one.counts.samples for one in self.works)),
            tokens=round(each * sum(one.counts.tokens for one in self.works)),
            steps_in_epoch=slowest.counts.batches_in_epoch / batches if batches else None,
            on_slow_host=self._on_slow_host, uncounted=uncounted_in(slowest.work),
        )  # fmt: skip

    @functools.cached_property
    def slowest(self) -> tuple[StepSeconds, ProcessWork] | None:
        """The step that takes longest, with the work of its process; None if no work was noted, or no card named."""
        steps = zip(self._steps_by(self.correction), self.works, strict=True) if self.card.gpu else ()
        return max(steps, key=lambda pair: pair[0].seconds, default=None)

    @property
    def _on_slow_host(self) -> float:
        if self.correction.host != 1:
            return 0.0
        return max(step.seconds for step in self._steps_by(replace(self.correction, host=SLOW_HOST)))

    def _steps_by(self, correction: Correction) -> list[StepSeconds]:
        assert self.card.gpu is not None
        return [seconds_of_step(one.work, self.card.gpu, correction) for one in self.works]

    @property
    def work_trouble(self) -> str | None:
        return next((one.trouble for one in self.works if one.trouble is not None), None)

    @property
    def lacks_time(self) -> bool:
        """True if the steps fit and how long they take was asked for, but is not known."""
        return self.forecast is None and self.answer in (Answer.FITS, Answer.TIGHT) and self.notes_work

    @property
    def why_no_time(self) -> str:
        """Return why `forecast` is None where the steps fit."""
        if not self.steps:
            return "no optimizer of torch.optim took a step"
        if not self.works:
            fewer = max(self.steps - 1, 1)
            return f"it is recorded in one further step, and the script ended before that; set --steps {fewer}"
        if self.work_trouble is None:
            return "the step ran nothing on the device"
        return f"some of the step's work was not recorded ({self.work_trouble})"

    @property
    def worst(self) -> dict[str, Any] | None:
        """The process that says most: one that ran out of memory for good, or else the one that reserved most."""
        last: list[dict[str, Any]] = [process for process in self.processes if self._ended(process)]
        return max(last or self.processes, key=lambda process: int(process["peaks"].get("reserved", 0)), default=None)

    @property
    def steps(self) -> int:
        return min((len(process["steps"]) for process in self.training), default=0)

    @property
    def passes(self) -> int:
        """Backward passes, where no optimizer of torch's takes steps."""
        return min(
            (process["script"]["passes"] for process in self.training if not process["script"]["optimizers"]), default=0
        )

    @property
    def training(self) -> list[dict[str, Any]]:
        """The processes that train; all if none does."""
        return [
            process for process in self.processes
            if process["steps"] or process["script"]["passes"] or process["script"]["optimizers"]
        ] or [*self.processes]  # fmt: skip

    @property
    def was_stopped(self) -> bool:
        """True if it had taken as many steps as were asked for; what would have followed is not known."""
        return any(process["stopped"] for process in self.processes)

    def _ended(self, process: dict[str, Any]) -> dict[str, Any] | None:
        """Return the allocation that ended the training of a process, also where the script has caught the error."""
        last = _last_failure(process)
        if last is None or self.ending.exit_code != 0:
            return last
        # It has ended without an error. What was stopped had taken its steps; an evaluation may have gone on in parts.
        went_on = process["stopped"] or not (last["in_training"] or process["started"] == last["started"])
        return None if went_on else last

    @property
    def failure(self) -> dict[str, Any] | None:
        """The allocation that ended the script; None if none did."""
        return None if self.worst is None else self._ended(self.worst)

    @property
    def sharing(self) -> list[dict[str, Any]]:
        """The processes that were on the card of `worst`."""
        if self.worst is None:
            return []
        return [each for each in self.processes if each is self.worst or each.get("card") == self.worst.get("card", -1)]

    @property
    def left_bytes(self) -> int:
        """Memory of the card that nothing has taken, when most was reserved."""
        reserved = 0 if self.worst is None else int(self.worst["peaks"].get("reserved", 0))
        taken = self.card.context_bytes + reserved
        if len(self.sharing) > 1:
            taken = max(taken, *(int(process["taken"]) for process in self.sharing))
        return self.card.memory_bytes - taken

    @property
    def needed_besides(self) -> int:
        """The most that may be in use outside the allocator, beyond the contexts that the emulated card has."""
        cards = len({process.get("card", number) for number, process in enumerate(self.processes)})
        each = sum(overhead.most for overhead in outside_of_allocator(cards)) - self.card.context_bytes
        return each * max(len(self.sharing), 1)

    @property
    def retries(self) -> int:
        return max((int(process["peaks"].get("retries", 0)) for process in self.processes), default=0)

    @property
    def survived(self) -> int:
        """Times that the script ran out of memory in training and went on: a probe of ours may."""
        failed = [each for process in self.processes for each in process["out_of_memory"] if not each["in_probe"]]
        return len(failed) - (self.failure is not None and not self.failure["in_probe"])

    @property
    def answer(self) -> Answer:
        if self.failure is not None and not self.ending.interrupted:
            return Answer.DOES_NOT_FIT
        if self.why_not is not None:
            return Answer.CANNOT_TELL
        return Answer.TIGHT if self.retries or self.needed_besides > self.left_bytes else Answer.FITS

    @property
    def why_not(self) -> str | None:
        """Return why it cannot be told whether the script fits; None if it can, or if it does not."""
        code = self.ending.exit_code
        if self.ending.interrupted:
            return "interrupted"
        if self.ending.waited is not None:
            return f"no step in {self.ending.waited:.0f} s; --max-seconds allows more"
        if code == -signal.SIGKILL or any(error["is_of_host_memory"] for error in self.errors):
            killed = code == -signal.SIGKILL
            how = "killed, most likely because the host ran" if killed else "ended because the host ran"
            return f"the script was {how} out of memory; create the model on the device"
        if code < 0:
            return f"the script crashed with signal {-code} ({signal.Signals(-code).name}); its output is above"
        if self.kept and code:
            ended = f" ({self.errors[0]['text']})" if self.errors else ""
            return f"the script would overwrite {self.kept[0]}, which is kept: name another folder or file{ended}"
        if self.errors and code:
            error = self.errors[0]
            if error["text"].startswith(_OF_LAUNCHERS):  # of a script that has left no error of its own
                return "the launcher's command failed, and not because memory ran out; its output is above"
            line = "" if error["line"] is None else f" ({error['line']})"
            return f"the script failed, and not because memory ran out: {error['text']}{line}"
        if code:
            left = next(
                (f", at {process['script']['exit']}" for process in self.processes if process["script"]["exit"]), ""
            )
            ended = f"the script ended with exit code {code}{left}"
            return f"{ended}, and not because memory ran out; its output is above"
        if self.worst is None:
            return "no process of the command used a CUDA device"
        return self._nothing_trained()

    def _nothing_trained(self) -> str | None:
        """Return why a script that ran to its end, or was stopped, has trained too little to tell."""
        scripts = [process["script"] for process in self.training]
        if self.steps or (self.passes and not any(script["optimizers"] for script in scripts)):
            return (
                None if self.condition is None else "the script ended by itself because of a value, which is zero here"
            )
        if idle := {name: why for script in scripts for name, why in script["idle"].items()}:
            return "; ".join(f"the steps of {name} did nothing: {why}" for name, why in idle.items())
        if optimizers := [optimizer for script in scripts for optimizer in script["optimizers"]]:
            return f"the optimizer has taken no step ({optimizers[0]})"
        if self.condition is not None or any(script.get("trains") for script in scripts):
            return "no backward pass was made, and the model is in training mode"
        return None


def _last_failure(process: dict[str, Any]) -> dict[str, Any] | None:
    """Return the allocation that failed after the last whole step, or pass where no optimizer of torch takes steps."""
    last: dict[str, Any] | None = process["out_of_memory"][-1] if process["out_of_memory"] else None
    script = process["script"]
    if last is None or (not script["optimizers"] and script["passes"] > last["passes"]):
        return None
    return last if last["step"] > len(process["steps"]) else None


def processes_in(folder: Path) -> list[dict[str, Any]]:
    """Return what the processes of a script have written so far."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def read_dry_run(
    folder: Path, card: Card, ending: Ending, *, notes_work: bool = False, kept: Sequence[str] = ()
) -> DryRun:
    """Read what the processes of a script have left in a folder."""
    processes = processes_in(folder)
    errors = [process["error"] for process in processes if process["error"] is not None]
    errors.sort(key=lambda error: str(error["text"]).startswith(_OF_LAUNCHERS))
    on_device = [process for process in processes if process["peaks"]]
    run = DryRun(card, ending, on_device, errors, notes_work=notes_work, works=read_works(folder), kept=kept)
    if notes_work and run.training and all(process["stopped"] for process in run.training):
        # It has taken the steps that count. The one more in which its work is noted changes no answer, however it ends.
        run = replace(run, ending=Ending(0, interrupted=False, seconds=ending.seconds))
    return replace(run, condition=_condition(run))


def _condition(run: DryRun) -> str | None:
    """Return the line of a script that ended by itself because of a value that it had read; None if there is none."""
    if (run.was_stopped and (run.steps or run.passes)) or (run.ending.exit_code and run.ending.waited is None):
        return None
    for script in (process["script"] for process in run.training):
        if script["stopped_early"]:
            return str(script["stopped_early"])
        reads, of_steps = ([tuple(line) for line in script[name]] for name in ("reads", "of_steps"))
        for file in dict.fromkeys(file for file, _ in reads):
            try:
                source = Path(file).read_text(encoding="utf-8")
            except (OSError, ValueError):
                continue
            lines, steps = ({line for of, line in lines_read if of == file} for lines_read in (reads, of_steps))
            if of_steps and not steps:
                continue
            if line_number := condition_on_a_value(source, lines, steps):
                return f"{Path(file).name}:{line_number}"
    return None


def as_object(run: DryRun, length: RunLength = NO_LENGTH) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    worst = run.worst or {"peaks": {}, "steps": [], "out_of_memory": []}
    return {
        "version": VERSION,
        "answer": str(run.answer),
        "fits": {Answer.DOES_NOT_FIT: False, Answer.CANNOT_TELL: None}.get(run.answer, True),
        "card": run.card.name,
        "memory_bytes": run.card.memory_bytes,
        "peak_allocated_bytes": worst["peaks"].get("allocated"),
        "peak_reserved_bytes": worst["peaks"].get("reserved"),
        "left_bytes": run.left_bytes,
        "retries": run.retries,
        "steps": run.steps,
        "backward_passes": run.passes,
        "why": run.why_not if run.answer is Answer.CANNOT_TELL else None,
        "ended_by": run.condition,
        "out_of_memory_survived": run.survived,
        "largest_input": worst.get("largest_input"),
        "lacks_workspaces_for": worst.get("lacks", []),
        "failed_allocation": run.failure,
        "peak": {key: value for key, value in worst.get("history", {}).items() if key not in ("points", "steps_end")},
        "asked_of_device": worst["steps"][-1] if worst["steps"] else None,
        "time": None if run.forecast is None else time_as_object(run.forecast, length, run.correction),
        "why_no_time": run.why_no_time if run.lacks_time else None,
        "kept_files": [*run.kept],
        "processes": len(run.processes),
        "error": run.errors[0]["text"] if run.errors else None,
        "exit_code": run.ending.exit_code,
        "seconds": round(run.ending.seconds, 2),
    }
