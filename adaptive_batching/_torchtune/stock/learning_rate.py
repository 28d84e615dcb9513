"""The learning rate: stock's schedule, read by samples seen, and a factor that follows the global batch.

Checkpoints hold the rate without its factor, as if the batch had not grown.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from omegaconf import DictConfig
from torch.optim import Optimizer
from torchtune import config


class LearningRate:
    """Moves a schedule of torch, None for a constant rate, and multiplies its rate by a factor.

    The schedule never sees the factor: many schedulers compute a rate from the last one. So the rate that it has set is
    put back before each of its steps, and multiplied after it.
    """

    def __init__(self, scheduler: Any, optimizers: Sequence[Optimizer]) -> None:
        self._scheduler = scheduler
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        # Of optimizers that step in the backward pass, stock tells one alone the rate before the first step.
        self._have_one_rate = len(optimizers) == 1
        self._scale = 1.0
        self._scheduled: list[Any] = []

    def advance(self, steps: int) -> None:
        if self._scheduler is None or (steps == 0 and self._have_one_rate):
            return
        with self.unscaled():
            for _ in range(steps):
                self._scheduler.step()
            if not self._have_one_rate:
                for group in self._groups:
                    set_rate(group, self._scheduler.get_last_lr()[0])
        self._have_one_rate = True

    def set_scale(self, scale: float) -> None:
        with self.unscaled():
            self._scale = scale

    @contextlib.contextmanager
    def unscaled(self) -> Iterator[None]:
        """Give the optimizers the rate that the schedule has set, inside."""
        for group, scheduled in zip(self._groups, self._scheduled, strict=False):
            set_rate(group, scheduled)
        self._scheduled = []
        yield
        if self._scale != 1:
            self._scheduled = [copy.deepcopy(group["lr"]) for group in self._groups]
            for group, scheduled in zip(self._groups, self._scheduled, strict=True):
                set_rate(group, scheduled * self._scale)


def scheduled_rates(cfg_lr_scheduler: DictConfig | None, num_steps: int, initial_lr: float) -> list[float]:
    """Return the learning rate before each step of the stock run, and after the last."""
    if cfg_lr_scheduler is None:
        return [initial_lr]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=initial_lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no step of this optimizer is ever taken
        scheduler = config.instantiate(cfg_lr_scheduler, optimizer, num_training_steps=num_steps, last_epoch=-1)
        rates = [float(optimizer.param_groups[0]["lr"])]
        for _ in range(num_steps):
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


def set_rate(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], torch.Tensor):  # compiled optimizers keep it on the device
        group["lr"].copy_(rate)
    else:
        group["lr"] = rate


def scheduled_steps(epochs_run: int, stored: Mapping[str, Any], steps_per_epoch: int) -> int:
    """Return how many steps the schedule of a resumed run has taken; ``stored`` may tell of a part of an epoch."""
    within_epoch = stored.get("growth", {}).get("within_epoch")
    part = Fraction(0) if within_epoch is None else Fraction(*within_epoch["schedule"])
    return int((epochs_run + part) * steps_per_epoch)
