"""The learning rate: stock's schedule, read by samples seen, and a factor that follows the global batch."""

from __future__ import annotations

import contextlib
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
    put back before each of its steps, and multiplied after it; and checkpoints hold the rate without the factor.
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
        self._remove()
        self._scale = scale
        self._apply()

    @contextlib.contextmanager
    def unscaled(self) -> Iterator[None]:
        """Give the optimizers the rate that the schedule has set, inside."""
        self._remove()
        yield
        self._apply()

    def _apply(self) -> None:
        if self._scale == 1:
            return
        self._scheduled = [_copy(group["lr"]) for group in self._groups]
        for group, scheduled in zip(self._groups, self._scheduled, strict=True):
            set_rate(group, scheduled * self._scale)

    def _remove(self) -> None:
        for group, scheduled in zip(self._groups, self._scheduled, strict=False):
            set_rate(group, scheduled)
        self._scheduled = []


def scheduled_rates(cfg_lr_scheduler: DictConfig | None, num_steps: int, initial_lr: float) -> list[float]:
    """Return the learning rate before each step of the stock run, and after the last."""
    if cfg_lr_scheduler is None:
        return [initial_lr]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=initial_lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no step of this optimizer is ever taken
        scheduler = config.instantiate(cfg_lr_scheduler, optimizer, num_training_steps=num_steps, last_epoch=-1)
        rates = []
        for _ in range(num_steps):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            scheduler.step()
    return [*rates, float(optimizer.param_groups[0]["lr"])]


def rule_for(lr_scaling: str, optimizer: Optimizer) -> str:
    """Return ``lr_scaling`` with ``auto`` decided: linear for SGD, and sqrt for optimizers that normalize gradients."""
    if lr_scaling != "auto":
        return lr_scaling
    return "linear" if "sgd" in type(optimizer).__name__.lower() else "sqrt"


def _copy(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


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
