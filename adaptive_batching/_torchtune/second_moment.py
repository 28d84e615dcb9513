"""Adam's second moment under a growing batch: its half-life stays the same number of samples.

Adam averages squared gradients with a decay of beta2 a step. A step on a batch that is g times the configured one sees
g times the samples, and the average would reach back over g times as many. With ``beta2 ** g`` it reaches back as far
as in the configured run. The rule is that of Marek et al. 2025, "Small Batch Size Training for Language Models"
(arXiv 2507.07101), who find it to matter more than the learning rate where batches are small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from adaptive_batching._values import ConfigError

_AVERAGES = ("exp_avg_sq", "max_exp_avg_sq")


class SecondMoment:
    """Sets beta2 of optimizers by the growth of the global batch.

    What divides the gradient is the average over ``1 - beta2 ** steps``, which undoes that the average began at zero.
    When beta2 changes, the average is scaled so that this quotient stays what it was. A change of beta2 alone, from
    0.999 to ``0.999 ** 4`` after 50 steps, would make the next ones 1.9 times as large.

    Checkpoints hold the configured beta2, as they hold the scheduled learning rate, and the average as it is. A run
    that is resumed without the setting goes back to the configured beta2, if ``follows`` is False.
    """

    def __init__(self, optimizers: Sequence[Optimizer], stored: Mapping[str, Any], *, follows: bool = True) -> None:
        self._groups = [
            (optimizer, group) for optimizer in optimizers for group in optimizer.param_groups if "betas" in group
        ]
        self._configured = [tuple(group["betas"]) for _, group in self._groups]
        self._growth = float(stored.get("growth", 1.0))
        self._follows = follows
        self._set_betas(self._growth)

    def follow(self, growth: float) -> None:
        """Give steps on ``growth`` times the configured samples, a positive number, their beta2."""
        growth = growth if self._follows else 1.0
        if growth == self._growth:
            return
        for (optimizer, group), (_, beta2) in zip(self._groups, self._configured, strict=True):
            _keep_quotient(optimizer, group["params"], beta2**self._growth, beta2**growth)
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
        for (_, group), (beta1, beta2) in zip(self._groups, self._configured, strict=True):
            group["betas"] = (beta1, beta2**growth)


def check_that_beta2_can_follow(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers whose second moment is not kept as torch's Adam keeps it."""
    for optimizer in optimizers:
        if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam)):
            raise ConfigError(
                f"adaptive_batching.keep_beta2_half_life=True is for Adam, AdamW and NAdam of torch.optim, and the "
                f"optimizer is {type(optimizer).__module__}.{type(optimizer).__name__}; take one of these, or set "
                f"keep_beta2_half_life=False"
            )


def _keep_quotient(optimizer: Optimizer, parameters: Sequence[Any], before: float, after: float) -> None:
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        steps = float(state.get("step", 0))
        if steps == 0:
            continue
        for name in _AVERAGES:
            if name in state:
                state[name].mul_((1 - after**steps) / (1 - before**steps))
