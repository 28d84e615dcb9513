"""A training step at any batch size, as a probe runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from adaptive_batching._state import State


@dataclass(frozen=True)
class TrainingStep:
    """One optimizer step of a training program."""

    model: nn.Module
    """The model that is trained, or a list of it and those that the loss also needs."""

    optimizers: Sequence[Optimizer]
    """One optimizer, or several if each parameter has its own, as with optimizers stepped in the backward pass."""

    make_batch: Callable[[int], Any]
    """Batch size -> a batch of that many worst-case samples, as the loader would collate it."""

    run: Callable[[Any], None]
    """Runs forward, backward, gradient clipping and the optimizer step on a batch, and leaves no gradients behind."""

    discard: Callable[[], None] = lambda: None
    """Drops what an aborted step leaves behind, other than gradients."""

    updates: bool = True
    """False if :attr:`run` takes no optimizer step."""

    state: State | None = None
    """What a step may change besides its optimizers; None if that is the model alone."""
