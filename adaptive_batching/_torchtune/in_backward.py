"""Optimizers that step in the backward pass, each as soon as the gradient of its parameter is there.

Stock's hooks step them in every backward, so that a batch is one forward. Here they can be held back: gradients then
add up over micro-batches, and the optimizers step in the last one's backward. That takes the gradients' memory, which
stepping in the backward pass saves; only a batch that is cut has to pay it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Gate:
    """Lets the optimizers of a model step in its backward passes, or holds them back. Open unless told otherwise."""

    def __init__(self) -> None:
        self.updated = False
        """True once a parameter has been updated, until set to False. After that a step that runs out of memory cannot
        run again."""
        self._times_closed = 0
        self._optimizers: dict[Any, Optimizer] = {}

    def register(self, model: nn.Module, optim_dict: Mapping[torch.nn.Parameter, Optimizer]) -> None:
        """Take the place of torchtune's ``register_optim_in_bwd_hooks``: while open, do what that does."""
        self._optimizers = dict(optim_dict)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._step)  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Let go of the optimizers, which their parameters would hold for good: no hook of theirs is ever collected."""
        self._optimizers = {}

    @property
    def optimizers(self) -> list[Optimizer]:
        return list(self._optimizers.values())

    def optimizer_of(self, parameter: torch.Tensor) -> Optimizer:
        return self._optimizers[parameter]

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Let gradients add up inside, without a step."""
        self._times_closed += 1
        try:
            yield
        finally:
            self._times_closed -= 1

    def flush(self) -> None:
        """Step the parameters that have a gradient of earlier micro-batches, and none of the last."""
        for parameter in self._optimizers:
            if parameter.grad is not None:
                self._step(parameter)

    def _step(self, parameter: torch.Tensor) -> None:
        if self._times_closed == 0:
            self.updated = True
            self._optimizers[parameter].step()
            self._optimizers[parameter].zero_grad()
