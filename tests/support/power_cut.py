"""An increase function by which a test cuts a run off: its folder is copied, or the run ends."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from adaptive_batching._growth.increase import GrowthState, IncreaseFunction

FUNCTION = ["batch_increase_function._component_=tests.support.power_cut.factory"]
fail_at_epoch = int(os.environ["FAIL_AT_EPOCH"]) if "FAIL_AT_EPOCH" in os.environ else None


def factory(every: int = 1, shrinks: bool = False) -> IncreaseFunction:
    return shrinks_at_the_end if shrinks else doubles_until_told_to_fail


copied_at: tuple[float, Path] | None = None
"""When to copy a run's folder, and which one."""


@contextlib.contextmanager
def copying(folder: Path, epoch: float | None) -> Iterator[None]:
    """Copy the ``folder`` of a run before an ``epoch``: what a power cut would leave, while the run goes on."""
    global copied_at
    copied_at = None if epoch is None else (epoch, folder)
    try:
        yield
    finally:
        copied_at = None


def left_of(folder: Path) -> Path:
    """Return where the copy of a run's folder is."""
    return folder.with_name(f"{folder.name}_cut_off")


def doubles_until_told_to_fail(epoch: float, current_batch_size: int, state: GrowthState) -> int:
    if copied_at is not None and copied_at[0] == epoch:
        shutil.copytree(copied_at[1], left_of(copied_at[1]))
    if epoch == fail_at_epoch:
        raise RuntimeError("the power went out")
    return current_batch_size if epoch else 0


def shrinks_at_the_end(epoch: float, current_batch_size: int, state: GrowthState) -> int | None:
    added = doubles_until_told_to_fail(epoch, current_batch_size, state)
    return -12 if epoch == 1.5 else added or None
