"""Complete stock's checkpoints: keep the last one when the disk is full, and make asynchronous ones resumable."""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer
from torchtune import training
from torchtune.training.checkpointing._checkpoint_client import TrainingProgress
from torchtune.training.checkpointing._utils import RECIPE_STATE_DIRNAME

from adaptive_batching.torchtune.data import STATE_KEY
from adaptive_batching.torchtune.host import optimizers_of

log = logging.getLogger(__name__)

_NOT_READ_BACK = "recipe.pt"
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
    belong together whatever happens; after a kill :func:`restore_state` puts it back.

    Raises:
        CheckpointError: If the disk is full; what was written of this checkpoint is gone then.
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

    checkpointer.save_checkpoint = save
    try:
        yield
    finally:
        del checkpointer.save_checkpoint


class BatchStateInCheckpoint:
    """Mixed into a stock recipe whose checkpoints have no state of the loader, before the recipe: ours have it then."""

    # Set by the stock recipe
    _checkpointer: Any

    def save_checkpoint(self, epoch: int) -> None:
        with with_batch_state(self._checkpointer, self._state_to_store()):  # type: ignore[attr-defined]
            super().save_checkpoint(epoch=epoch)  # type: ignore[misc]


class ThroughClient:
    """Mixed into a stock recipe that saves through a checkpoint client, before the recipe.

    The client's checkpoints get the state of our loader, and asynchronous ones what resuming needs.
    """

    # Set by the stock recipe
    _checkpoint_client: Any
    _dataloader: Any
    _model: nn.Module
    _optimizer: Any
    _optim_ckpt_wrapper: Any
    _optimizer_in_bwd: bool
    _enable_async_checkpointing: bool
    seed: int
    global_step: int
    epochs_run: int
    total_epochs: int
    max_steps_per_epoch: int | None

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg=cfg)  # type: ignore[call-arg]
        by_step = cfg.get("save_every_n_steps") is not None
        client = self._checkpoint_client
        self._async = AsyncCheckpoint(client, by_step=by_step) if self._enable_async_checkpointing else None

    def _update_recipe_state(self, ckpt_dict: dict[str, Any]) -> None:
        if self._async is not None:
            ckpt_dict[training.DATALOADER_KEY] = self._async.load(optimizers_of(self))
        super()._update_recipe_state(ckpt_dict)  # type: ignore[misc]

    def save_checkpoint(self, epoch: int) -> None:
        loader_state = self._dataloader.state_dict()
        save = self._checkpoint_client.save_checkpoint
        if self._async is not None and self.epochs_run < self.total_epochs:  # the last one is not asynchronous
            epoch = self.global_step if self._async.by_step else epoch  # names the folder
            self._async.save(epoch, loader_state, optimizers_of(self))
            save = self._checkpoint_client._save_checkpoint_async
        save(
            model=self._model,
            optimizer=self._optim_ckpt_wrapper if self._optimizer_in_bwd else self._optimizer,
            training_progress=TrainingProgress(
                seed=self.seed,
                epochs_run=self.epochs_run,
                total_epochs=self.total_epochs,
                max_steps_per_epoch=self.max_steps_per_epoch,
                dataloader_state_dict=loader_state,
            ),
            epoch=epoch,
        )


class AsyncCheckpoint:
    """Completes the distributed checkpoints of a stock recipe, which cannot be resumed from with a schedule.

    Args:
        client: The recipe's checkpoint client, which saves asynchronously.
        by_step: Name checkpoints by optimizer steps, ``dist_step_N``, rather than by epochs.
    """

    def __init__(self, client: Any, *, by_step: bool) -> None:
        self.by_step = by_step
        self._checkpointer = checkpointer = client._get_dcp_checkpointer()
        of_epochs = checkpointer._checkpoint_dir_prefix
        if by_step:
            checkpointer._checkpoint_dir_prefix = "dist_step"
        # A thread saves while training goes on: on the group of the training, their collectives would mix.
        checkpointer._process_group = dist.new_group(backend="gloo")
        self._prefix = checkpointer._checkpoint_dir_prefix
        if checkpointer._get_latest_intermediate_checkpoint() is None:  # the run to resume may have saved at epochs
            checkpointer._checkpoint_dir_prefix = of_epochs

    def save(self, number: int, loader_state: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Store, next to the checkpoint of an epoch or a step that is saved next, what stock does not read back."""
        self._checkpointer._checkpoint_dir_prefix = self._prefix
        if dist.get_rank() == 0:
            path = Path(self._checkpointer._output_dir, f"{self._prefix}_{number}", _NOT_READ_BACK)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"loader": loader_state, "initial_lr": _initial_lr(optimizers)}, path)

    def load(self, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Give the optimizers the rates that a schedule starts from.

        Returns:
            The loader's state that was saved with the last checkpoint; nothing if stock's recipe saved it.
        """
        last = self._checkpointer._get_latest_intermediate_checkpoint()
        if last is None or not Path(last, _NOT_READ_BACK).exists():
            return {}
        stored = torch.load(Path(last, _NOT_READ_BACK), weights_only=True)
        for group, initial_lr in zip(_groups(optimizers), stored["initial_lr"], strict=True):
            group["initial_lr"] = initial_lr
        loader_state: dict[str, Any] = stored["loader"]
        return loader_state


def _groups(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _initial_lr(optimizers: Sequence[Optimizer]) -> list[float]:
    return [float(group.get("initial_lr", group["lr"])) for group in _groups(optimizers)]
