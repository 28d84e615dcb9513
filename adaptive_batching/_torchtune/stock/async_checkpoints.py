"""Checkpoints that stock saves through a client, those of asynchronous runs among them.

Stock's asynchronous checkpoints hold weights and state in one folder, and cannot be resumed from with a schedule. Here
they can, and of those within an epoch only the last keeps its state.
"""

from __future__ import annotations

import logging
import pickle
import re
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torchtune import training
from torchtune.training.checkpointing._checkpoint_client import TrainingProgress

from adaptive_batching._torchtune.stock.checkpoints import flush
from adaptive_batching._torchtune.stock.host import groups_of, learning_rate_holder
from adaptive_batching._values import ConfigError

log = logging.getLogger(__name__)

_OF_STEPS = "dist_step"
_NOT_READ_BACK = "recipe.pt"
_METADATA = ".metadata"  # torch writes it when a checkpoint is complete
_ONE_AT_A_TIME = threading.Lock()  # a checkpoint is completed in a thread, which that of the next may overtake


class ThroughClient:
    """Mixed into a stock recipe that saves through a checkpoint client, before the recipe.

    The client's checkpoints get the state of our loader, and asynchronous ones what resuming needs. With
    ``save_every_n_steps`` these are named ``dist_step_N``, rather than by epochs.
    """

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg=cfg)  # type: ignore[call-arg]
        recipe: Any = self
        self._distributed: Any = None
        if recipe._enable_async_checkpointing:
            self._by_step = cfg.get("save_every_n_steps") is not None
            self._distributed = recipe._checkpoint_client._get_dcp_checkpointer()
            self._last = self._find_last(self._distributed)
            if cfg.resume_from_checkpoint and self._last is not None and self._last.name.startswith(_OF_STEPS):
                check_that_state_is_there(self._last)

    def _find_last(self, checkpointer: Any) -> Path | None:
        of_epochs = checkpointer._checkpoint_dir_prefix
        own = _OF_STEPS if self._by_step else of_epochs
        # A thread saves while training goes on: on the group of the training, their collectives would mix.
        checkpointer._process_group = dist.new_group(backend="gloo")
        # One rank looks, for all: another may see a folder sooner or later, on a shared disk or while it is completed.
        last: list[str | None] = [None]
        for prefix in (own, of_epochs):  # the run to resume may have saved at epochs
            checkpointer._checkpoint_dir_prefix = prefix
            last[0] = last[0] or checkpointer._get_latest_intermediate_checkpoint()
        dist.broadcast_object_list(last, src=0, group=checkpointer._process_group)
        checkpointer._checkpoint_dir_prefix = own
        checkpointer._get_latest_intermediate_checkpoint = lambda: last[0]
        return None if last[0] is None else Path(last[0])

    def _update_recipe_state(self, ckpt_dict: dict[str, Any]) -> None:
        if self._distributed is not None:
            ckpt_dict[training.DATALOADER_KEY] = {}
            if self._last is not None and (self._last / _NOT_READ_BACK).exists():
                stored = torch.load(self._last / _NOT_READ_BACK, weights_only=True)
                ckpt_dict[training.DATALOADER_KEY] = stored["loader"]
                for group, initial_lr in zip(groups_of(self), stored["initial_lr"], strict=True):
                    group["initial_lr"] = initial_lr  # which a schedule starts from
        super()._update_recipe_state(ckpt_dict)  # type: ignore[misc]

    def save_checkpoint(self, epoch: int) -> None:
        recipe: Any = self
        progress = TrainingProgress(
            seed=recipe.seed,
            epochs_run=recipe.epochs_run,
            total_epochs=recipe.total_epochs,
            max_steps_per_epoch=recipe.max_steps_per_epoch,
            dataloader_state_dict=recipe._dataloader.state_dict(),
        )
        client, optimizer = recipe._checkpoint_client, learning_rate_holder(self)
        what = {"model": recipe._model, "optimizer": optimizer, "training_progress": progress}
        if (
            self._distributed is None or progress.epochs_run >= progress.total_epochs
        ):  # the last one is not asynchronous
            client.save_checkpoint(**what, epoch=epoch)
            return
        number = recipe.global_step if self._by_step else epoch
        folder = Path(self._distributed._output_dir, f"{self._distributed._checkpoint_dir_prefix}_{number}")
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            initial_lr = [float(group.get("initial_lr", group["lr"])) for group in groups_of(self)]
            torch.save({"loader": progress.dataloader_state_dict, "initial_lr": initial_lr}, folder / _NOT_READ_BACK)
        client._save_checkpoint_async(**what, epoch=number)
        if self._by_step and dist.get_rank() == 0:
            # When its own part is done, the rank that writes the metadata has heard from all others.
            self._distributed._checkpoint_future.add_done_callback(partial(_supersede, folder))


def check_that_state_is_there(folder: Path) -> None:
    if not (folder / _NOT_READ_BACK).exists():
        raise ConfigError(
            f"resume_from_checkpoint=True, but the last checkpoint in output_dir={str(folder.parent)!r}, "
            f"{folder.name}, has only weights; set output_dir to that of the run to resume, or "
            "resume_from_checkpoint=False"
        )


def _supersede(folder: Path, saved: Future[Any]) -> None:
    """Leave the checkpoints of earlier steps with their weights alone, if that of ``folder`` has been saved."""
    if saved.exception() is not None:
        return  # stock says so
    with _ONE_AT_A_TIME:
        try:
            for path in (*folder.iterdir(), folder):
                flush(path)  # else a power cut could leave none that is complete
            for path in folder.parent.iterdir():
                name = re.fullmatch(rf"{_OF_STEPS}_(\d+)", path.name)
                if name is not None and int(name[1]) < int(folder.name.rpartition("_")[2]):
                    keep_weights_alone(path)
        except OSError as error:
            log.warning(
                "the state of a checkpoint before %s could not be removed (%s); training continues", folder.name, error
            )


def keep_weights_alone(folder: Path) -> None:
    """Remove all but the weights from a distributed checkpoint, from which these can still be loaded."""
    if not (folder / _METADATA).exists() or not (folder / _NOT_READ_BACK).exists():
        return  # one that was broken off, or has weights alone
    metadata, of_weights = FileSystemReader(folder).read_metadata(), f"{training.MODEL_KEY}."
    stored = {index: info for index, info in metadata.storage_data.items() if index.fqn.startswith(of_weights)}
    entries = {name: entry for name, entry in metadata.state_dict_metadata.items() if name.startswith(of_weights)}
    unfinished = folder / f"{_METADATA}.unfinished"
    unfinished.write_bytes(pickle.dumps(replace(metadata, state_dict_metadata=entries, storage_data=stored)))
    flush(unfinished)
    unfinished.replace(folder / _METADATA)
    kept = {info.relative_path for info in stored.values()}
    for path in folder.glob("*.distcp"):
        if path.name not in kept:
            path.unlink()
    (folder / _NOT_READ_BACK).unlink()  # last, so that what is broken off here is done again
