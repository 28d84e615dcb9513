"""Samples that have not been collated yet: run in parts, and run again in smaller ones when memory runs out."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from adaptive_batching._device import without_waiting
from adaptive_batching._state import State
from adaptive_batching._step.failed_part import FailedPart, Words
from adaptive_batching._step.work import P, R, Samples, Work
from adaptive_batching._values import ConfigError

Sample = TypeVar("Sample")

Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor | float]]
"""(model, batch) -> the sum of the batch's losses, and their number."""

Mean = Callable[[nn.Module, Any], torch.Tensor]
"""(model, batch) -> the mean of the batch's losses."""

_PLAIN = {int, float, str, bytes, bool, type(None)}


class SampleWork(Work[Samples, P, R], Generic[Sample, Samples, P, R]):
    """Samples that are collated by the work itself, part by part: of a plain loop, or of ``Trainer``.

    Args:
        device: That the model is on.
        collate: Turns a list of samples into a batch.
        length: Tokens of a sample; None if all take the same memory.
        state: What a forward and backward may change.
    """

    device: torch.device
    state: State

    def __init__(
        self,
        device: torch.device,
        collate: Callable[[list[Sample]], Any],
        length: Callable[[Sample], int] | None,
        state: State,
    ) -> None:
        self.device, self.state = device, state
        self.pads = True
        """False if samples are laid end to end."""

        self.collate = collate
        self.samples: list[Sample] = []
        """Those of the step on this rank."""

        self._length = length

    def tokens(self, samples: Sequence[Sample]) -> int:
        """Return the tokens of samples that run together, with padding; without a length, their number."""
        return self.tokens_and_longest(samples)[0]

    def tokens_and_longest(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Return the tokens of samples that run together, as :meth:`tokens` does, and those of the longest, or 0."""
        lengths = self.lengths(samples)
        longest = max(lengths)
        tokens = len(lengths) * longest if self.pads else sum(lengths)
        return tokens, 0 if self._length is None else longest

    def lengths(self, samples: Sequence[Sample]) -> list[int]:
        """Return the tokens of each of ``samples``, at least 1; without a length, 1."""
        return [max(self.length(sample) or 0, 1) for sample in samples]

    def length(self, sample: Sample) -> int | None:
        if self._length is None:
            return None
        returned = self._length(sample)
        try:
            return operator.index(returned)  # int and the integer types of numpy and torch, but no float
        except TypeError:
            raise ConfigError(
                f"length returned {returned!r}; it must return the tokens of a sample before padding, a whole number"
            ) from None

    def extent(self, sample: Sample) -> int:
        return _size_of(sample) if self._length is None else super().extent(sample)

    def words(self) -> Words:
        return Words("checkpoint activations")

    def failed(self, part: P) -> FailedPart:
        longest = max(part.samples, key=lambda sample: self.length(sample) or 0)
        at = next((number for number, sample in enumerate(self.samples) if sample is longest), None)
        name = "" if at is None else f"number {at} of the step's {len(self.samples)} (the first is 0)"
        return replace(super().failed(part), name=name)


def _size_of(value: Any) -> int:
    """Return how many numbers and texts a sample has, by which samples that a collate function pads differ."""
    if hasattr(value, "shape"):
        return math.prod(value.shape)
    if isinstance(value, Mapping):
        return sum(_size_of(value[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return len(value) if _PLAIN.issuperset(map(type, value)) else sum(map(_size_of, value))
    return 1


def collated(samples: Sequence[Sample], collate: Callable[[list[Sample]], Any]) -> Any:
    """Return ``samples`` as a batch, from copies of them, which collating may change."""
    return collate(list(map(copied, samples)))


def copied(value: Any) -> Any:
    """Return a copy of a sample that shares nothing with it that a collate function could change in place."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, MutableMapping):  # a BatchEncoding, too
        result = copy.copy(value)
        for key in value:
            result[key] = copied(value[key])
        return result
    if isinstance(value, (list, collections.deque)):
        if _PLAIN.issuperset(map(type, value)):  # tokens, as a rule
            return copy.copy(value)
        return type(value)(map(copied, value))
    if isinstance(value, tuple):
        entries = map(copied, value)
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        of_class: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(of_class, field.name, copied(getattr(value, field.name)))
        return of_class
    return value.copy() if type(value).__module__ == "numpy" and hasattr(value, "copy") else value


def as_sum(loss: Loss | Mean, count: Callable[[Any], torch.Tensor | float] | None) -> Loss:
    """Return ``loss`` as a sum of losses and their number, which it is already without a ``count``."""
    if count is None:
        return cast(Loss, loss)

    # A partial, unlike a closure, survives deepcopy and pickle with what the two belong to.
    return partial(_summed, cast(Mean, loss), count)


def _summed(
    loss: Mean, count: Callable[[Any], torch.Tensor | float], model: nn.Module, batch: Any
) -> tuple[torch.Tensor, torch.Tensor | float]:
    number, mean = count(batch), loss(model, batch)
    if not isinstance(mean, torch.Tensor) or mean.dim() > 0:
        raise ConfigError(
            f"loss returned {_described(mean)}; with count, it must return the mean of the batch's losses, a "
            "scalar tensor"
        )
    # A mean of nothing is not a number. Of torch's losses it still has a gradient, of zero.
    has_any = torch.as_tensor(number, device=mean.device) > 0
    return torch.where(has_any, mean * number, 0 * mean.nan_to_num()), number


def run_forward(loss: Loss, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of ``batch`` and their number, both scalars.

    The sum is on the model's device. A number that is known on the host stays there, so that no copy of it waits.
    """
    from torch.utils._pytree import tree_map

    device = device_of(model)

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return without_waiting(value, device)
        return value.to(device) if hasattr(value, "to") else value

    # What moves itself, such as a PackedSequence, a tuple of which one tensor stays on the host, is one value.
    returned = loss(model, tree_map(moved, batch, is_leaf=lambda value: hasattr(value, "to")))
    total, number = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)
    is_number = number.numel() == 1 if isinstance(number, torch.Tensor) else isinstance(number, Real)
    if not isinstance(total, torch.Tensor) or total.dim() > 0 or not is_number:
        raise ConfigError(
            f"loss returned {_described(returned)}; it must return the sum of the batch's losses, a scalar tensor, and "
            "their number, as in: return cross_entropy(logits, labels, reduction='sum'), len(labels); or give count, "
            "by which it is a mean"
        )
    number = torch.as_tensor(number).detach().reshape(())
    return total, number if number.device.type == "cpu" else number.to(total.device)


def _described(returned: Any) -> str:
    if isinstance(returned, tuple):
        return f"({', '.join(map(_described, returned))})"
    return f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, torch.Tensor) else repr(returned)


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
