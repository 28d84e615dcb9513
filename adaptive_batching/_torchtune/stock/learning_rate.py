"""The learning rate: stock's schedule, read by samples seen, and a factor that follows the global batch; Adam's beta2.

Checkpoints hold both as if the batch had not grown: the rate without its factor, and beta2 as configured.
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

from adaptive_batching._values import ConfigError


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


class SecondMoment:
    """Sets beta2 of optimizers by the growth of the global batch: its half-life stays the same number of samples.

    Adam averages squared gradients with a decay of beta2 a step. On a batch that is g times the configured one, the
    average would reach back over g times the samples; with ``beta2 ** g`` it reaches back as far as in the configured
    run: Marek et al. 2025, "Small Batch Size Training for Language Models" (arXiv 2507.07101), who find it to matter
    more than the learning rate where batches are small.

    What divides the gradient is the average over ``1 - beta2 ** steps``, which undoes that the average began at zero.
    When beta2 changes, the average, which checkpoints hold as it is, is scaled so that this quotient stays what it was:
    a change from 0.999 to ``0.999 ** 4`` after 50 steps would make the next ones 1.9 times as large.

    ``follows`` is False for a run resumed without the setting, which goes back to the configured beta2.
    """

    def __init__(self, optimizers: Sequence[Optimizer], stored: Mapping[str, Any], *, follows: bool = True) -> None:
        groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
        self._groups = [(optimizer, group, *group["betas"]) for optimizer, group in groups if "betas" in group]
        self._growth = float(stored.get("growth", 1.0))
        self._follows = follows
        self._set_betas(self._growth)

    def follow(self, growth: float) -> None:
        """Give steps on ``growth`` times the configured samples, a positive number, their beta2."""
        growth = growth if self._follows else 1.0
        if growth == self._growth:
            return
        for optimizer, group, _, beta2 in self._groups:
            before, after = beta2**self._growth, beta2**growth
            for state in (optimizer.state.get(parameter, {}) for parameter in group["params"]):
                steps = float(state.get("step", 0))
                for name in {"exp_avg_sq", "max_exp_avg_sq"} & state.keys() if steps else ():
                    state[name].mul_((1 - after**steps) / (1 - before**steps))
        self._growth = growth
        self._set_betas(growth)

    @contextlib.contextmanager
    def unscaled(self) -> Iterator[None]:
        """Give the optimizers their configured beta2, inside."""
        self._set_betas(1.0)
        yield
        self._set_betas(self._growth)

    def state_dict(self) -> dict[str, Any]:
        return {"growth": self._growth}

    def _set_betas(self, growth: float) -> None:
        for _, group, beta1, beta2 in self._groups:
            group["betas"] = (beta1, beta2**growth)


def check_that_beta2_can_follow(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers whose second moment is not kept as torch's Adam keeps it."""
    for optimizer in optimizers:
        if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam)):
            raise ConfigError(
                "adaptive_batching.keep_beta2_half_life=True works with Adam, AdamW and NAdam of torch.optim, but the "
                f"optimizer is {type(optimizer).__module__}.{type(optimizer).__name__}; use one of these, or set "
                "keep_beta2_half_life=False"
            )
