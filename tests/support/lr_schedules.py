"""Learning-rate schedulers of several kinds, as the YAML takes them."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer, lr_scheduler


def linear(optimizer: Optimizer, num_training_steps: int, last_epoch: int) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_training_steps, last_epoch)


def constant_with_warmup(optimizer: Optimizer, num_training_steps: int, last_epoch: int) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 20), last_epoch)


def constant(optimizer: Optimizer, num_training_steps: int, last_epoch: int) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0, last_epoch)


def stepwise(optimizer: Optimizer, num_training_steps: int, last_epoch: int, steps: int = 7) -> Any:
    """It computes a rate from the last one, as many do."""
    return lr_scheduler.StepLR(optimizer, steps, gamma=0.5, last_epoch=last_epoch)


def annealed(optimizer: Optimizer, num_training_steps: int, last_epoch: int) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, num_training_steps, last_epoch=last_epoch)


COSINE: dict[str, Any] = {
    "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "num_warmup_steps": 5,
}
SCHEDULES: dict[str, dict[str, Any] | None] = {
    "cosine": COSINE,
    **{
        name: {"_component_": f"tests.support.lr_schedules.{name}"}
        for name in ("linear", "constant_with_warmup", "stepwise", "annealed")
    },
    "none": None,
}
