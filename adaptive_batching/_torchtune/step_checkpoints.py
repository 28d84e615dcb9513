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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtune.training.checkpointing._utils import RECIPE_STATE_DIRNAME

from adaptive_batching._torchtune.checkpoints import CheckpointError, says_that_disk_is_full

STATE_NAME = "recipe_state.pt"
UNFINISHED = "unfinished_checkpoint"
"""Folder that a checkpoint is written into. What a killed run leaves there is never read."""

WITHIN_TRAINING = -1
"""Epoch that makes stock's recipes save the state of the optimizer, whichever epoch it is: no run ends with it."""


@contextlib.contextmanager
def saved_as_step(step: int, *checkpointers: tuple[Any, Path]) -> Iterator[None]:
    """Have what checkpointers of stock save inside become folders ``step_<step>``, all of them or none.

    With each checkpointer comes the folder that it saves into. The optimizer's state is moved into the first one's; the
    one in the folder before is deleted then, as stock keeps only one. As that state makes a checkpoint, the folder that
    holds it is completed last. If the disk is full, what was written is gone, and the checkpoint before stands.
    """
    output_dirs = [output_dir for _, output_dir in checkpointers]
    own_dirs = [checkpointer._output_dir for checkpointer, _ in checkpointers]
    for checkpointer, output_dir in checkpointers:
        shutil.rmtree(output_dir / UNFINISHED, ignore_errors=True)
        checkpointer._output_dir = output_dir / UNFINISHED
    try:
        yield
        _complete(output_dirs, f"step_{step}")
    except Exception as error:
        if not says_that_disk_is_full(error):
            raise
        for output_dir in output_dirs:
            shutil.rmtree(output_dir / UNFINISHED, ignore_errors=True)
        free, full = min((shutil.disk_usage(output_dir).free, output_dir) for output_dir in output_dirs)
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be written: the disk of output_dir={str(full)!r} is full, "
            f"with {free / 2**20:,.0f} MiB free without what had been written. {_what_stands(output_dirs[0])}"
        ) from None
    finally:
        for (checkpointer, _), own_dir in zip(checkpointers, own_dirs, strict=True):
            checkpointer._output_dir = own_dir


def states_of_steps(output_dir: Path) -> list[Path]:
    """Return the stored states of optimizers in the folders of steps, the newest last."""
    found = [path for path in output_dir.glob(f"step_*/{STATE_NAME}") if re.fullmatch(r"step_\d+", path.parent.name)]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def _complete(output_dirs: Sequence[Path], name: str) -> None:
    written = [_prepared(output_dir / UNFINISHED) for output_dir in output_dirs]
    is_last = not (written[0] / STATE_NAME).exists()
    for output_dir in output_dirs:  # first the state, which must not be found with files that are not its own
        if (output_dir / name).exists():  # of an earlier run, or of this one before it was resumed
            (output_dir / name).rename(output_dir / UNFINISHED / "replaced")
    for folder, output_dir in reversed(list(zip(written, output_dirs, strict=True))):
        folder.rename(output_dir / name)
        flush(output_dir)
    for output_dir in output_dirs:
        shutil.rmtree(output_dir / UNFINISHED)
    for earlier in states_of_steps(output_dirs[0]) if not is_last else ():
        if earlier.parent.name != name:
            earlier.unlink()


def _prepared(unfinished: Path) -> Path:
    """Return the folder of the weights that have been written, with the state, if there is one, and on the disk."""
    [written] = unfinished.glob("epoch_*")
    state = unfinished / RECIPE_STATE_DIRNAME / STATE_NAME
    if state.exists():
        state.rename(written / STATE_NAME)
    for path in (*written.rglob("*"), written):
        flush(path)  # else a power cut could leave files that are named and empty
    return written


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
