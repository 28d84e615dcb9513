"""Complete stock's checkpoints: whatever ends a run, the last one stands, and it holds the state of the batch.

At the end of an epoch stock writes its weights into a folder of their own, and the state of the optimizer over the last
one. At an optimizer step its checkpointers write into another folder, and what they have written is renamed when it is
complete: a checkpoint with all that resuming needs is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune import training
from torchtune.training.checkpointing._utils import RECIPE_STATE_DIRNAME

from adaptive_batching._torchtune.data import STATE_KEY
from adaptive_batching._torchtune.stock import replaced_in
from adaptive_batching._values import AdaptiveBatchingError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_MESSAGES = (
    "No space left on device",
    "Disk quota exceeded",
    "StorageFull",  # safetensors
    "PytorchStreamWriter failed",
    "unexpected pos",  # torch.save, which finds less in the file than it has written
)

STATE_NAME = "recipe_state.pt"
_ASIDE = ".before"
UNFINISHED = "unfinished_checkpoint"
"""Folder that a checkpoint of a step is written into. What a killed run leaves there is never read."""

WITHIN_TRAINING = -1
"""Epoch that makes stock's recipes save the state of the optimizer, whichever epoch it is: no run ends with it."""


class CheckpointError(AdaptiveBatchingError, RuntimeError):
    """A checkpoint could not be written. The message says which one stands."""


def _says_that_disk_is_full(error: BaseException) -> bool:
    link: BaseException | None = error
    while link is not None:
        is_full = isinstance(link, OSError) and link.errno in _FULL
        if is_full or any(message in str(link) for message in _FULL_MESSAGES):
            return True
        link = link.__cause__ or link.__context__
    return False


@contextlib.contextmanager
def _undone_if_disk_is_full(
    name: str, output_dirs: Sequence[Path], undo: Callable[[], None], what_stands: Callable[[Path], str]
) -> Iterator[None]:
    """Have a full disk end the saving of a checkpoint with a CheckpointError, after ``undo``."""
    try:
        yield
    except Exception as error:
        if not _says_that_disk_is_full(error):
            raise
        undo()
        free, full = min((shutil.disk_usage(output_dir).free, output_dir) for output_dir in output_dirs)
        raise CheckpointError(
            f"the checkpoint of {name} cannot be written: the disk of output_dir={str(full)!r} is full, "
            f"with {free / 2**20:,.0f} MiB free without what had been written. {what_stands(output_dirs[0])}"
        ) from None


@contextlib.contextmanager
def kept_if_disk_is_full(output_dir: Path, epoch: int) -> Iterator[None]:
    """Keep the last checkpoint usable while stock saves that of ``epoch``: weights first, then state over the old one.

    The old state is put aside meanwhile, if there is room for both, so that weights and state of the last checkpoint
    belong together whatever happens; after a kill :func:`restore_state` puts it back. If the disk is full, what was
    written of this checkpoint is gone.
    """
    folder, last = output_dir / f"epoch_{epoch}", output_dir / f"epoch_{epoch - 1}"
    state = state_of_epoch(output_dir)
    is_new = not folder.exists()
    if state.is_file():
        needed = 2 * state.stat().st_size + sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
        if shutil.disk_usage(output_dir).free > needed:
            state.replace(state.with_suffix(_ASIDE))

    def undo() -> None:
        if is_new:  # half a checkpoint would be taken for the last one on resume
            shutil.rmtree(folder, ignore_errors=True)
        restore_state(output_dir)

    try:
        with _undone_if_disk_is_full(f"epoch {epoch}", [output_dir], undo, _what_stands_of_epochs):
            yield
    finally:
        restore_state(output_dir)


def restore_state(output_dir: Path) -> None:
    """Put back the state that was put aside, unless a new one is complete; the last epoch writes none."""
    state = state_of_epoch(output_dir)
    aside = state.with_suffix(_ASIDE)
    if aside.exists() and not (state.is_file() and zipfile.is_zipfile(state)):
        aside.replace(state)
    aside.unlink(missing_ok=True)


def state_of_epoch(output_dir: Path) -> Path:
    """Return the file that stock keeps the state of the last epoch in."""
    return Path(output_dir, RECIPE_STATE_DIRNAME, STATE_NAME)


def epoch_of(state: Path) -> int | None:
    """Return the epoch that a stored state was saved at the end of; None if it cannot be read."""
    try:
        return int(torch.load(state, mmap=True, weights_only=True, map_location="cpu")[training.EPOCHS_KEY]) - 1
    except (OSError, RuntimeError, KeyError, EOFError, ValueError):
        return None


def _what_stands_of_epochs(output_dir: Path) -> str:
    if any(output_dir.glob("dist_epoch_*")):
        return "What the asynchronous checkpoints in it hold stands"
    epoch = epoch_of(state_of_epoch(output_dir))
    if epoch is None:
        return "No checkpoint stands that training could go on from"
    folder = output_dir / f"epoch_{epoch}"
    files = sorted(path.name for path in folder.glob("model-*"))
    named = ",".join(f"{folder.name}/{name}" for name in files)
    is_adapter = any(folder.glob("adapter_model*"))
    which = "" if is_adapter or not files else f" 'checkpointer.checkpoint_files=[{named}]'"
    return (
        f"The checkpoint of epoch {epoch} stands, in {folder}; to go on from it, free some space and add "
        f"resume_from_checkpoint=True{which}"
    )


@contextlib.contextmanager
def saved_as_step(step: int, *checkpointers: tuple[Any, Path]) -> Iterator[None]:
    """Have what checkpointers of stock save inside become folders ``step_<step>``, all of them or none.

    With each comes its folder. The optimizer's state is moved into the first one's, which is completed last, as that
    state makes a checkpoint; the one before is deleted, as stock keeps only one. If the disk is full, it stands.
    """
    output_dirs = [output_dir for _, output_dir in checkpointers]
    own_dirs = [checkpointer._output_dir for checkpointer, _ in checkpointers]

    def clear() -> None:
        for output_dir in output_dirs:
            shutil.rmtree(output_dir / UNFINISHED, ignore_errors=True)

    clear()
    for checkpointer, output_dir in checkpointers:
        checkpointer._output_dir = output_dir / UNFINISHED
    try:
        with _undone_if_disk_is_full(f"step {step}", output_dirs, clear, _what_stands_of_steps):
            yield
            _complete(output_dirs, f"step_{step}")
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
    state = state_of_epoch(unfinished)
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


def _what_stands_of_steps(output_dir: Path) -> str:
    states = states_of_steps(output_dir)
    if not states:
        return "No checkpoint of a step stands that training could go on from"
    return (
        f"The checkpoint {states[-1].parent.name} stands; to go on from it, free some space and add "
        f"resume_from_checkpoint=True"
    )


@contextlib.contextmanager
def unchanged_weights(model: nn.Module | None) -> Iterator[None]:
    """Restore the frozen weights of ``model``, into which stock merges adapters that the next epoch adds once more."""
    frozen = [] if model is None else [p for p in model.parameters() if not p.requires_grad]
    base = [p for p in frozen if type(p.data) is torch.Tensor]
    saved = [p.detach().clone() for p in base]
    yield
    with torch.no_grad():
        for parameter, before in zip(base, saved, strict=True):
            parameter.copy_(before)


@contextlib.contextmanager
def with_batch_state(checkpointer: Any, state: dict[str, Any] | None) -> Iterator[None]:
    """Have ``checkpointer`` save ``state`` with what it saves inside, where stock saves no state of the loader."""
    stock_save = checkpointer.save_checkpoint

    def save(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if state is not None and training.OPT_KEY in checkpoint:  # else it is the last one, of weights alone
            checkpoint[training.DATALOADER_KEY] = {STATE_KEY: state}
        stock_save(checkpoint, *args, **kwargs)

    with replaced_in(checkpointer, save_checkpoint=save):
        yield


@contextlib.contextmanager
def saved_last(checkpointer: Any) -> Iterator[None]:
    """Have ``checkpointer``, which has the state that makes a checkpoint complete, save after the others inside."""
    waiting: list[Callable[[], None]] = []
    stock_save = checkpointer.save_checkpoint

    def note(*args: Any, **kwargs: Any) -> None:
        waiting.append(partial(stock_save, *args, **kwargs))

    with replaced_in(checkpointer, save_checkpoint=note):
        yield
    for save in waiting:
        save()


class BatchStateInCheckpoint:
    """Mixed into a stock recipe whose checkpoints have no state of the loader, before the recipe: ours have it then."""

    # Set by the stock recipe
    _checkpointer: Any

    def save_checkpoint(self, epoch: int) -> None:
        with with_batch_state(self._checkpointer, self._state_to_store()):  # type: ignore[attr-defined]
            super().save_checkpoint(epoch=epoch)  # type: ignore[misc]
