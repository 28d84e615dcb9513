"""Complete stock's checkpoints: keep the last one when the disk is full, and have them hold the state of the batch."""

from __future__ import annotations

import contextlib
import errno
import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune import training
from torchtune.training.checkpointing._utils import RECIPE_STATE_DIRNAME

from adaptive_batching._torchtune.data import STATE_KEY
from adaptive_batching._torchtune.stock import replaced_in

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_MESSAGES = (
    "No space left on device",
    "Disk quota exceeded",
    "StorageFull",  # safetensors
    "PytorchStreamWriter failed",
    "unexpected pos",  # torch.save, which finds less in the file than it has written
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The message says which one stands."""


@contextlib.contextmanager
def kept_if_disk_is_full(output_dir: Path, epoch: int) -> Iterator[None]:
    """Keep the last checkpoint usable while stock saves that of ``epoch``: weights first, then state over the old one.

    The old state is put aside meanwhile, if there is room for both, so that weights and state of the last checkpoint
    belong together whatever happens; after a kill :func:`restore_state` puts it back. If the disk is full, what was
    written of this checkpoint is gone.
    """
    folder, last = output_dir / f"epoch_{epoch}", output_dir / f"epoch_{epoch - 1}"
    state = _state_in(output_dir)
    is_new = not folder.exists()
    if state.is_file():
        needed = 2 * state.stat().st_size + sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
        if shutil.disk_usage(output_dir).free > needed:
            state.replace(_aside(state))
    try:
        yield
    except Exception as error:
        if not says_that_disk_is_full(error):
            raise
        if is_new:  # half a checkpoint would be taken for the last one on resume
            shutil.rmtree(folder, ignore_errors=True)
        restore_state(output_dir)
        free = shutil.disk_usage(output_dir).free / 2**20
        raise CheckpointError(
            f"the checkpoint of epoch {epoch} cannot be written: the disk of output_dir={str(output_dir)!r} is full, "
            f"with {free:,.0f} MiB free without what had been written. {_what_stands(output_dir, state)}"
        ) from None
    finally:
        restore_state(output_dir)


def restore_state(output_dir: Path) -> None:
    """Put back the state that was put aside, unless a new one is complete; the last epoch writes none."""
    state = _state_in(output_dir)
    if _aside(state).exists() and not (state.is_file() and zipfile.is_zipfile(state)):
        _aside(state).replace(state)
    _aside(state).unlink(missing_ok=True)


def _state_in(output_dir: Path) -> Path:
    state: Path = output_dir / RECIPE_STATE_DIRNAME / "recipe_state.pt"
    return state


def _aside(state: Path) -> Path:
    return state.with_suffix(".before")


def says_that_disk_is_full(error: BaseException) -> bool:
    """Return True if ``error``, or what it came of, says that there is no room on a disk."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno in _FULL:
            return True
        if any(message in str(link) for message in _FULL_MESSAGES):
            return True
        link = link.__cause__ or link.__context__
    return False


def _what_stands(output_dir: Path, state: Path) -> str:
    if any(output_dir.glob("dist_epoch_*")):
        return "What the asynchronous checkpoints in it hold stands"
    try:
        epoch = torch.load(state, mmap=True, weights_only=True, map_location="cpu")[training.EPOCHS_KEY] - 1
    except (OSError, RuntimeError, KeyError, EOFError, ValueError):
        return "No checkpoint stands that training could go on from"
    files = sorted(path.name for path in (output_dir / f"epoch_{epoch}").glob("model-*"))
    named = ",".join(f"epoch_{epoch}/{name}" for name in files)
    is_adapter = any((output_dir / f"epoch_{epoch}").glob("adapter_model*"))
    which = "" if is_adapter or not files else f" 'checkpointer.checkpoint_files=[{named}]'"
    return (
        f"The checkpoint of epoch {epoch} stands, in {output_dir / f'epoch_{epoch}'}; to go on from it, free some "
        f"space and add resume_from_checkpoint=True{which}"
    )


@contextlib.contextmanager
def unchanged_weights(model: nn.Module | None) -> Iterator[None]:
    """Restore the frozen weights of ``model``, into which stock merges adapters to save them; None for nothing to do.

    Otherwise the next epoch would start from merged weights with the adapters on top, and a resumed run would not.
    """
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
    """Have ``checkpointer`` save what it is given inside when others have saved theirs.

    It has the state, which is not to be found before all that belongs to it is complete.
    """
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
