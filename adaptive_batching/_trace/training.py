"""A training step at any batch size, to trace and to try."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Run = Callable[[Any], None]


@dataclass(frozen=True)
class TrainingStep:
    """One optimizer step of a training program, as the probe and the trace run it."""

    model: nn.Module
    """The model that is trained, or a list of it and those that the loss also needs."""

    optimizers: Sequence[Optimizer]
    """One optimizer, or several if each parameter has its own, as with optimizers stepped in the backward pass."""

    make_batch: Callable[[int], Any]
    """Batch size -> a batch of that many worst-case samples, as the loader would collate it."""

    bind: Callable[..., Run]
    """(model, optimizers, *code) -> a function that runs forward, backward, gradient clipping and the optimizer step on
    a batch, and leaves no gradients behind. The trace binds copies, the trial the originals."""

    discard: Callable[[], None] = lambda: None
    """Drops what an aborted step leaves behind, other than gradients."""

    vocabulary: frozenset[int] = frozenset()
    """Sizes of the last dimension by which a trace knows logits."""

    compiles: bool = False
    """True if a first run compiles, and leaves behind what others do not make again."""

    keeps: bool = False
    """True if the model keeps tensors of a run until the next one replaces them."""

    on_cuda: bool = False
    """True if a trace is to count what kernels of CUDA take for the time of a call."""

    holds_gradients: bool = False
    """True if a trace is to begin with gradients held, in place of a forward and backward before the one that runs.

    The last of several is the costliest, and what ``bind`` returns for a trace runs it alone: half as long, at the same
    peak."""

    updates: bool = True
    """False if the function of ``bind`` takes no optimizer step."""

    can_be_traced: bool = True
    """False if a trace is not worth its time, or not possible; then real steps alone tell."""

    owners: Sequence[Any] = ()
    """Whatever else a step may change: a loss that is an object or encloses something, a trainer."""

    code: Sequence[Any] = ()
    """Of the owners, what ``bind`` takes besides: functions and objects of the user's, which a trace copies."""


def models_of(model: nn.Module) -> list[nn.Module]:
    """Return the models of a training step: those that are listed, or the one that there is."""
    return list(model) if isinstance(model, nn.ModuleList) else [model]


def kept_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that modules keep besides parameters and buffers, such as scales of a last forward."""
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def has_states(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer`` has created the states of all its parameters, as its first step does."""
    return all(parameter in optimizer.state for parameter in trainable(optimizer))


def trainable(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
