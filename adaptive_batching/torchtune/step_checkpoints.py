"""Checkpoints at optimizer steps: each a folder with all that resuming needs, which is there whole or not at all.

Stock's checkpointers name folders by epoch and write the state of the optimizer over the last one. Here they write into
a folder of its own, unchanged, and what they have written is renamed when it is complete. So the checkpoint before
stands until then, whatever ends the run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtune.training.checkpointing._utils import RECIPE_STATE_DIRNAME

from adaptive_batching.torchtune.checkpoints import CheckpointError, says_that_disk_is_full

STATE_NAME = "recipe_state.pt"
UNFINISHED = "unfinished_checkpoint"
"""Folder that a checkpoint is written into. What a killed run leaves there is never read."""

WITHIN_TRAINING = -1
"""Epoch that makes stock's recipes save the state of the optimizer, whichever epoch it is: no run ends with it."""


@contextlib.contextmanager
def saved_as_step(checkpointer: Any, output_dir: Path, step: int) -> Iterator[None]:
    """Have what a checkpointer of stock saves inside become the folder ``step_<step>``.

    The optimizer's state is moved into it; the one in the folder before is deleted then, as stock keeps only one.

    Args:
        checkpointer: Saves one checkpoint inside.
        output_dir: Folder of the checkpoints.
        step: Optimizer steps of the run so far.

    Raises:
        CheckpointError: If the disk is full. What was written is gone then, and the checkpoint before stands.
    """
    unfinished = output_dir / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    own_dir, checkpointer._output_dir = checkpointer._output_dir, unfinished
    try:
        yield
        _complete(unfinished, output_dir / f"step_{step}")
    except Exception as error:
        if not says_that_disk_is_full(error):
            raise
        shutil.rmtree(unfinished, ignore_errors=True)
        free = shutil.disk_usage(output_dir).free / 2**20
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be written: the disk of output_dir={str(output_dir)!r} is full, "
            f"with {free:,.0f} MiB free without what had been written. {_what_stands(output_dir)}"
        ) from None
    finally:
        checkpointer._output_dir = own_dir


def states_of_steps(output_dir: Path) -> list[Path]:
    """Return the stored states of optimizers in the folders of steps, the newest last."""
    found = [path for path in output_dir.glob(f"step_*/{STATE_NAME}") if re.fullmatch(r"step_\d+", path.parent.name)]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def _complete(unfinished: Path, folder: Path) -> None:
    [written] = unfinished.glob("epoch_*")
    state = unfinished / RECIPE_STATE_DIRNAME / STATE_NAME
    is_last = not state.exists()
    if not is_last:
        state.rename(written / STATE_NAME)
    for path in (*written.rglob("*"), written):
        flush(path)  # else a power cut could leave files that are named and empty
    if folder.exists():  # of an earlier run, or of this one before it was resumed
        folder.rename(unfinished / "replaced")
    written.rename(folder)
    flush(folder.parent)
    shutil.rmtree(unfinished)
    for earlier in states_of_steps(folder.parent) if not is_last else ():
        if earlier.parent != folder:
            earlier.unlink()


def flush(path: Path) -> None:
    """Wait until ``path``, a file or a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _what_stands(output_dir: Path) -> str:
    states = states_of_steps(output_dir)
    if not states:
        return "No checkpoint of a step stands that training could go on from"
    return (
        f"The checkpoint {states[-1].parent.name} stands; to go on from it, free some space and add "
        f"resume_from_checkpoint=True"
    )
