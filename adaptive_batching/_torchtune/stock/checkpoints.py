"""Complete stock's checkpoints, and find the one to go on from.

Whatever ends a run, the last checkpoint stands: what stock's checkpointers write goes into another folder, and is moved
to its place when complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune import training
from torchtune.training.checkpointing import _utils
from torchtune.training.checkpointing._checkpoint_client import TrainingProgress
from torchtune.training.checkpointing._utils import RECIPE_STATE_DIRNAME

from adaptive_batching._torchtune.stock.data import STATE_KEY
from adaptive_batching._torchtune.stock.host import learning_rate_holder
from adaptive_batching._torchtune.stock.loading import replaced_in
from adaptive_batching._values import AdaptiveBatchingError, ConfigError, memory_size

_FULL_MESSAGES = (
    "No space left on device",
    "Disk quota exceeded",
    "StorageFull",  # safetensors
    "PytorchStreamWriter failed",
    "unexpected pos",  # torch.save, which finds less in the file than it has written
)
STATE_NAME = "recipe_state.pt"
_UNFINISHED = "unfinished_checkpoint"  # what a killed run leaves there is never read
WITHIN_TRAINING = -1
"""Epoch that makes stock's recipes save the state of the optimizer, whichever epoch it is: no run ends with it."""


class CheckpointError(AdaptiveBatchingError, RuntimeError):
    """A checkpoint could not be written. The message says which one stands."""


def _says_that_disk_is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(message in str(error) for message in _FULL_MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def _state_of_epoch(output_dir: Path) -> Path:
    """Return the file that stock keeps the state of the last epoch in."""
    return Path(output_dir, RECIPE_STATE_DIRNAME, STATE_NAME)


def _epoch_of(state: Path) -> int | None:
    """Return the epoch that a stored state was saved at the end of; None if it cannot be read."""
    try:
        return int(torch.load(state, mmap=True, weights_only=True, map_location="cpu")[training.EPOCHS_KEY]) - 1
    except (OSError, RuntimeError, KeyError, EOFError, ValueError):
        return None


def _what_stands_of_epochs(output_dir: Path) -> str:
    epoch = _epoch_of(_state_of_epoch(output_dir))
    if epoch is None:
        return "There is no checkpoint to resume from"
    folder = output_dir / f"epoch_{epoch}"
    files = _weights_in(folder)
    which = f" 'checkpointer.checkpoint_files=[{','.join(files)}]'" if files else ""
    return (
        f"The checkpoint of epoch {epoch} in {folder} is intact; to resume from it, free some space and add "
        f"resume_from_checkpoint=True{which}"
    )


def _weights_in(folder: Path) -> list[str]:
    """Return the files to name in ``checkpoint_files``: none with adapters, which go on from the model's own."""
    if any(folder.glob("adapter_model*")):
        return []
    return sorted(f"{folder.name}/{path.name}" for path in folder.glob("model-*"))


@contextlib.contextmanager
def saved_as(name: str, *checkpointers: tuple[Any, Path]) -> Iterator[None]:
    """Have what checkpointers of stock save inside become folders ``name``, ``epoch_N`` or ``step_N``, all or none.

    With each comes its folder. Of an epoch the optimizer's state goes where stock has it. Of a step it goes into the
    first folder, and the one before is deleted, as stock keeps only one. That folder is completed last: a checkpoint is
    one that has its state. If the disk is full, the checkpoint before stands.
    """
    output_dirs = [output_dir for _, output_dir in checkpointers]

    def clear() -> None:
        for output_dir in output_dirs:
            shutil.rmtree(output_dir / _UNFINISHED, ignore_errors=True)

    clear()
    try:
        with contextlib.ExitStack() as stack:
            for checkpointer, output_dir in checkpointers:
                stack.enter_context(mock.patch.object(checkpointer, "_output_dir", output_dir / _UNFINISHED))
            yield
        # A recipe may save elsewhere.
        if all(any((output_dir / _UNFINISHED).glob("epoch_*")) for output_dir in output_dirs):
            _complete(output_dirs, name)
    except Exception as error:
        if not _says_that_disk_is_full(error):
            raise
        clear()
        free, full = min((shutil.disk_usage(output_dir).free, output_dir) for output_dir in output_dirs)
        what_stands = _what_stands_of_steps if name.startswith("step_") else _what_stands_of_epochs
        raise CheckpointError(
            f"the checkpoint of {name.replace('_', ' ')} cannot be written: the disk of output_dir={str(full)!r} is "
            f"full, with {memory_size(free)} free after removing the incomplete checkpoint. "
            f"{what_stands(output_dirs[0])}"
        ) from None


def _complete(output_dirs: Sequence[Path], name: str) -> None:
    of_step = name.startswith("step_")
    written = [_prepared(output_dir / _UNFINISHED, moves_state=of_step) for output_dir in output_dirs]
    has_state = (written[0] / STATE_NAME).exists()
    for output_dir in output_dirs:  # first the state, which must not be found with files that are not its own
        if (output_dir / name).exists():  # of an earlier run, or of this one before it was resumed
            (output_dir / name).rename(output_dir / _UNFINISHED / "replaced")
    for folder, output_dir in reversed(list(zip(written, output_dirs, strict=True))):
        folder.rename(output_dir / name)
        state, of_epoch = _state_of_epoch(output_dir / _UNFINISHED), _state_of_epoch(output_dir)
        if state.exists():
            of_epoch.parent.mkdir(exist_ok=True)
            state.rename(of_epoch)
            flush(of_epoch.parent)
        flush(output_dir)
    for output_dir in output_dirs:
        shutil.rmtree(output_dir / _UNFINISHED)
    for earlier in _states_of_steps(output_dirs[0]) if has_state else ():
        if earlier.parent.name != name:
            earlier.unlink()


def _prepared(unfinished: Path, *, moves_state: bool) -> Path:
    """Return the folder of weights that have been written to the disk, with the state if that moves there."""
    [written] = unfinished.glob("epoch_*")
    state = _state_of_epoch(unfinished)
    if moves_state and state.exists():
        state.rename(written / STATE_NAME)
    for path in (*unfinished.rglob("*"), written):
        flush(path)  # else a power cut could leave files that are named and empty
    return written


def flush(path: Path) -> None:
    """Wait until ``path``, a file or a folder, is on the disk; some filesystems take no folder, which ends nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise


def _states_of_steps(output_dir: Path) -> list[Path]:
    """Return the stored states of optimizers in the folders of steps, the newest last."""
    states = [path for path in output_dir.glob(f"step_*/{STATE_NAME}") if re.fullmatch(r"step_\d+", path.parent.name)]
    return sorted(states, key=lambda path: path.stat().st_mtime_ns)


def _what_stands_of_steps(output_dir: Path) -> str:
    states = _states_of_steps(output_dir)
    if not states:
        return "There is no checkpoint of a step to resume from"
    return (
        f"The checkpoint {states[-1].parent.name} is intact; to resume from it, free some space and add "
        "resume_from_checkpoint=True"
    )


@contextlib.contextmanager
def unchanged_weights(model: nn.Module | None) -> Iterator[None]:
    """Restore the frozen weights of ``model``, into which stock merges adapters that the next epoch adds once more."""
    frozen = [] if model is None else [p for p in model.parameters() if not p.requires_grad]
    saved = [(p, p.detach().clone()) for p in frozen if type(p.data) is torch.Tensor]
    yield
    with torch.no_grad():
        for parameter, before in saved:
            parameter.copy_(before)


@contextlib.contextmanager
def with_batch_state(checkpointer: Any, state: dict[str, Any] | None) -> Iterator[None]:
    """Have ``checkpointer`` save ``state``, if there is one, inside, where stock saves no state of the loader."""
    if state is None:
        yield
        return
    stock_save = checkpointer.save_checkpoint

    def save(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if training.OPT_KEY in checkpoint:  # else it is the last one, of weights alone
            checkpoint[training.DATALOADER_KEY] = {STATE_KEY: state}
        stock_save(checkpoint, *args, **kwargs)

    with replaced_in(checkpointer, save_checkpoint=save):
        yield


class BatchStateInCheckpoint:
    """Mixed into a stock recipe whose checkpoints have no state of the loader, before the recipe: ours have it then."""

    def save_checkpoint(self, epoch: int) -> None:
        recipe: Any = self
        with with_batch_state(recipe._checkpointer, recipe._state_to_store()):
            super().save_checkpoint(epoch=epoch)  # type: ignore[misc]


class ThroughClient:
    """Mixed into a stock recipe that saves through a checkpoint client, before the recipe."""

    def save_checkpoint(self, epoch: int) -> None:
        recipe: Any = self
        progress = TrainingProgress(
            seed=recipe.seed,
            epochs_run=recipe.epochs_run,
            total_epochs=recipe.total_epochs,
            max_steps_per_epoch=recipe.max_steps_per_epoch,
            dataloader_state_dict=recipe._dataloader.state_dict(),
        )
        recipe._checkpoint_client.save_checkpoint(
            model=recipe._model, optimizer=learning_rate_holder(self), training_progress=progress, epoch=epoch
        )


@contextlib.contextmanager
def from_last_checkpoint(cfg: DictConfig) -> Iterator[None]:
    """Have stock load, inside, the last checkpoint, or the one that the config names; ``checkpointer`` is set so.

    Stock takes the adapters of the last epoch's folder, which need not be those of the stored state, and of a fully
    fine-tuned model it has to be told the files.
    """
    own, output_dir = cfg.checkpointer, Path(cfg.checkpointer.output_dir)
    files = own.get("checkpoint_files")
    names = [own.get("adapter_checkpoint"), *(files if OmegaConf.is_list(files) else [])]
    paths = [output_dir / str(name) for name in names if name]
    named = next((path.parent for path in paths if path.parent != output_dir and path.exists()), None)
    state = _state(own, output_dir, named)
    folder: Path | None = state.parent
    if not state.parent.name.startswith("step_"):
        epoch = _epoch_of(state)  # if it has none, stock says what is wrong with it
        folder = output_dir / f"epoch_{epoch}"
        folder = folder if epoch is not None and folder.is_dir() else None
    if folder is None or (named is not None and named != folder):  # the user knows better
        yield
        return
    if state.parent == folder:
        OmegaConf.update(cfg, "checkpointer.recipe_checkpoint", f"{folder.name}/{STATE_NAME}", force_add=True)
    if named is None and (weights := _weights_in(folder)):
        OmegaConf.update(cfg, "checkpointer.checkpoint_files", weights, force_add=True)
    # Where stock looks for adapters. It fails where no folder is that of an epoch.
    with replaced_in(_utils, get_largest_iter_folder=lambda *args, **kwargs: folder.name):
        yield


def _state(own: DictConfig, output_dir: Path, named: Path | None) -> Path:
    """Return the file of the state to go on from."""
    if own.get("recipe_checkpoint"):
        return output_dir / str(own.recipe_checkpoint)
    of_epoch, of_steps = _state_of_epoch(output_dir), _states_of_steps(output_dir)
    if named is not None and named.name.startswith("step_"):
        if not (named / STATE_NAME).exists():
            last = f"; the last that can be resumed from is {of_steps[-1].parent.name}" if of_steps else ""
            raise ConfigError(
                f"resume_from_checkpoint=True with a file of {named.name} in checkpointer: that folder has only "
                f"weights{last}. To take the last checkpoint, leave checkpointer.checkpoint_files and "
                "adapter_checkpoint as for a new run"
            )
        return named / STATE_NAME
    states = [path for path in (of_epoch, *of_steps) if path.is_file()]
    if not states:
        raise ConfigError(
            f"resume_from_checkpoint=True, but checkpointer.output_dir={str(output_dir)!r} has no checkpoint to "
            "resume from; set output_dir to that of the run to resume, or resume_from_checkpoint=False"
        )
    return of_epoch if named is not None else max(states, key=lambda path: path.stat().st_mtime_ns)


def refuse_step_checkpoints(cfg: DictConfig) -> None:
    """Refuse to resume from a checkpoint within an epoch with the loop of stock, which would begin the epoch again."""
    output_dir, named = Path(cfg.checkpointer.output_dir), Path(cfg.checkpointer.get("recipe_checkpoint") or "").parent
    only_steps = _states_of_steps(output_dir) and not _state_of_epoch(output_dir).exists()
    if named.name.startswith("step_") or only_steps:
        raise ConfigError(
            f"resume_from_checkpoint=True without save_every_n_steps, but the checkpoints in {str(output_dir)!r} were "
            "saved within an epoch; set save_every_n_steps as in the run to resume"
        )
