"""From samples to a batch on the device, and from what a loss function returns to two scalars."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import nn

from adaptive_batching._device import without_waiting
from adaptive_batching._values import ConfigError

Sample = TypeVar("Sample")

Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor | float]]
"""(model, batch) -> the sum of the batch's losses, and their number."""


def collated(samples: Sequence[Sample], collate: Callable[[list[Sample]], Any]) -> Any:
    """Return ``samples`` as a batch; they are copied if they are mappings or lists, which collating may change."""
    return collate([copy.copy(sample) if isinstance(sample, (dict, list)) else sample for sample in samples])


def run_forward(loss: Loss, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of ``batch`` and their number, both scalars.

    The sum is on the model's device. A number that is known on the host stays there, so that no copy of it waits.
    """
    from torch.utils._pytree import tree_map

    device = device_of(model)
    returned = loss(model, tree_map(partial(_moved, device), batch))
    total, number = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)
    is_scalar = isinstance(total, torch.Tensor) and total.dim() == 0
    is_number = number.numel() == 1 if isinstance(number, torch.Tensor) else isinstance(number, Real)
    if not is_scalar or not is_number:
        raise ConfigError(
            f"loss returned {_described(returned)}; it must return the sum of the batch's losses, a scalar tensor, and "
            f"their number, as in: return cross_entropy(logits, labels, reduction='sum'), len(labels)"
        )
    assert isinstance(total, torch.Tensor)
    number = torch.as_tensor(number).detach().reshape(())
    return total, number if number.device.type == "cpu" else number.to(total.device)


def _moved(device: torch.device, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return without_waiting(value, device)
    return value.to(device) if hasattr(value, "to") else value


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _described(returned: Any) -> str:
    if isinstance(returned, tuple):
        return f"({', '.join(map(_described, returned))})"
    return f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, torch.Tensor) else repr(returned)
