"""The file in which a process leaves what a step asks of its device. Nothing here imports torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adaptive_batching._dry_run.time.step_work import StepWork

SUFFIX = ".work"  # of the file of a process, whose name is its number


@dataclass(frozen=True)
class Counts:
    """Counts of what a script has drawn and run so far."""

    samples: int = 0
    """Rows of the inputs of the model."""
    tokens: int = 0
    """Of these, padding included; 0 where inputs are not tokens."""
    batches: int = 0
    """Batches that loaders have handed out."""
    batches_in_epoch: int = 0
    """Of the loader that handed out the last one; 0 if it does not say."""

    def __sub__(self, earlier: Counts) -> Counts:
        """Return what has been counted since."""
        return Counts(
            self.samples - earlier.samples, self.tokens - earlier.tokens, self.batches - earlier.batches,
            self.batches_in_epoch,
        )  # fmt: skip


@dataclass(frozen=True)
class ProcessWork:
    """The work of a step in one process, with its samples and tokens."""

    rank: int
    ranks: int
    work: StepWork
    counts: Counts
    trouble: str | None
    """Why it is not all that the step asks; None if it is."""


def write_work(folder: Path, work: ProcessWork) -> None:
    """Write what this process has noted to its file, all at once."""
    about = {"rank": work.rank, "ranks": work.ranks, "counts": asdict(work.counts), "trouble": work.trouble}
    partial = folder / f".{os.getpid()}{SUFFIX}"
    partial.write_text(json.dumps({**about, **work.work.as_object()}))
    partial.replace(folder / f"{os.getpid()}{SUFFIX}")


def read_works(folder: Path) -> list[ProcessWork]:
    """Read what the processes of a script have noted, by rank."""
    written: list[dict[str, Any]] = [json.loads(path.read_text()) for path in folder.glob(f"*{SUFFIX}")]
    works = [
        ProcessWork(one["rank"], one["ranks"], StepWork.from_object(one), Counts(**one["counts"]), one["trouble"])
        for one in written
    ]
    return sorted(works, key=lambda one: one.rank)
