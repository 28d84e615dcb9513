"""What an asynchronous checkpoint of stock lacks: a process group of its own, and what a resumed run starts from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer


class AsyncCheckpoint:
    """Completes the distributed checkpoints of a stock recipe, which cannot be resumed from with a schedule.

    Args:
        client: The recipe's checkpoint client, which saves asynchronously.
    """

    def __init__(self, client: Any) -> None:
        checkpointer = client._get_dcp_checkpointer()
        # A thread saves while training goes on: on the group of the training, their collectives would mix.
        checkpointer._process_group = dist.new_group(backend="gloo")
        self._prefix = Path(checkpointer._output_dir, checkpointer._checkpoint_dir_prefix)

    def save(self, epoch: int, loader_state: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Keep beside the checkpoint of ``epoch`` what stock does not read back from it."""
        if dist.get_rank() == 0:
            path = self._file(epoch)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"loader": loader_state, "initial_lr": _initial_lr(optimizers)}, path)

    def load(self, epoch: int, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Give the optimizers the rates that a schedule starts from.

        Returns:
            The loader's state that was saved with the checkpoint of ``epoch``; nothing if stock's recipe saved it.
        """
        if not self._file(epoch).exists():
            return {}
        stored = torch.load(self._file(epoch), weights_only=True)
        for group, initial_lr in zip(_groups(optimizers), stored["initial_lr"], strict=True):
            group["initial_lr"] = initial_lr
        loader_state: dict[str, Any] = stored["loader"]
        return loader_state

    def _file(self, epoch: int) -> Path:
        return Path(f"{self._prefix}_{epoch}") / "recipe.pt"


def _groups(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _initial_lr(optimizers: Sequence[Optimizer]) -> list[float]:
    return [float(group.get("initial_lr", group["lr"])) for group in _groups(optimizers)]
