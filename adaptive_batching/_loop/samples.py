"""Samples that have not been collated yet: run in parts, and run again in smaller ones when memory runs out."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import operator
import os
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import nn

from adaptive_batching._device import RandomState, without_waiting
from adaptive_batching._evidence import in_groups, losses_of_groups
from adaptive_batching._ranks.agree import ALONE, Ranks
from adaptive_batching._ranks.fsdp import end_forward, sharded_roots
from adaptive_batching._snapshot import StepState, rehearsal
from adaptive_batching._step.batch_dependence import find_batch_dependent_module, find_batch_norm
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.retry import Retry
from adaptive_batching._step.split import padded_tokens
from adaptive_batching._values import DRY_RUN, ConfigError

Sample = TypeVar("Sample")

Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor | float]]
"""(model, batch) -> the sum of the batch's losses, and their number."""

# Fixed cost of a forward and backward, in tokens: launching the kernels of a model takes some tens of milliseconds, in
# which the device could compute some hundreds of tokens more.
FORWARD_COST = 512

_FEW = 32  # samples of which some show what computes over the batch
_PLAIN = (int, float, str, bytes, type(None))


class SampleRetry(Retry[list[Sample]]):
    """Runs the samples of a step again, which are given to :meth:`start_with`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        collate: Callable[[list[Sample]], Any],
        length: Callable[[Sample], int] | None,
        ranks: Ranks = ALONE,
        *,
        owner: Any = None,
        enabled: bool = True,
    ) -> None:
        super().__init__(TokenLimit(), device_of(model), ranks, enabled=enabled)
        self._model = model
        self._loss = loss
        self._collate = collate
        self._length = length
        self.state = StepState([model, loss] if owner is None else [owner])
        self.pads = True  # False if samples are laid end to end
        self.parts_add_up = False  # True if this is known, on all ranks
        self.dependent_module: str | None = None  # the one that is known to compute over the batch

    def start_with(self, samples: list[Sample]) -> None:
        self.start()
        self._samples = samples
        self._random_state = RandomState(device_of(self._model))
        self.state.save()

    def forward(self, part: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._loss is not None
        return run_forward(self._loss, self._model, collated(part, self._collate))

    def size(self, part: list[Sample]) -> tuple[int, int]:
        return len(part), self.tokens(part)

    def describe(self, part: list[Sample]) -> str:
        what = f"{len(part)} sample{'s' if len(part) > 1 else ''}"
        return what if self._length is None else f"{what} of up to {max(map(self._tokens_of, part))} tokens"

    def unit(self, part: list[Sample]) -> str:
        return "samples" if self._length is None else super().unit(part)

    def longest(self, part: list[Sample]) -> int | None:
        return None if self._length is None else max(map(self._tokens_of, part))

    def name_of_longest(self, part: list[Sample]) -> str:
        sample = max(part, key=self._tokens_of)
        at = next((number for number, each in enumerate(self._samples) if each is sample), None)
        return "" if at is None else f"number {at} of the step's {len(self._samples)} (the first is 0)"

    def shorter(self, part: list[Sample]) -> str:
        return f"; shorten it, or {self.less_memory()}"

    def less_memory(self) -> str:
        return "checkpoint activations"

    def why_never(self, part: list[Sample]) -> str | None:
        if self._enabled:
            return None
        return f"out of memory with {self.describe(part)}; set adaptive_batching.recover_from_oom=True"

    def put_back(self) -> None:
        self._random_state.put_back()
        self.state.put_back()

    def end_step(self) -> None:
        super().end_step()
        self.state.end()

    def tokens(self, part: Sequence[Sample]) -> int:
        """Return the tokens of a part, with padding; without a length, its number of samples."""
        if self._length is None:
            return len(part)
        lengths = [max(self._tokens_of(sample), 1) for sample in part]
        return padded_tokens(lengths) if self.pads else sum(lengths)

    def _tokens_of(self, sample: Sample) -> int:
        assert self._length is not None
        found = self._length(sample)
        try:
            return operator.index(found)  # int and the integer types of numpy and torch, but no float
        except TypeError:
            raise ConfigError(
                f"length returned {found!r}; it must return the tokens of a sample before padding, a whole number"
            ) from None

    def batch_dependent_module(self) -> str | None:
        """Name what computes over the batch, a module of the model or the loss function; None if nothing does."""
        if self.parts_add_up or self.dependent_module is not None or DRY_RUN in os.environ:  # all values are zero
            return self.dependent_module
        # Short samples show a dependence best. They are the same on every rank, as shards need the same forwards.
        few = sorted(self._samples, key=lambda sample: self.tokens([sample]))[:_FEW]
        few = max(self._ranks.gather(few), key=len)
        if len(few) < 2:
            return None
        found = self._first_found(partial(self._what_does_not_add_up, few))
        self.parts_add_up = found is None
        return found

    def _what_does_not_add_up(self, few: list[Sample]) -> str | None:
        """Run groups of a few samples, and their union, and name what makes the difference."""
        if (module := find_batch_norm(self._model)) is not None:  # which may refuse a batch of one
            return module
        most = 7
        while most > 2 and self.limit.max_tokens is not None and self.tokens(few[:most]) > self.limit.max_tokens:
            most -= 1
        groups = in_groups(few, lambda sample: self.tokens([sample]), most=most)
        parameters = list(self._model.parameters())
        with rehearsal([self._model, self._loss], device_of(self._model)) as start_over:
            losses = losses_of_groups(groups, self._values_of, parameters, start_over, device_of(self._model))
            if losses.add_up and losses.change <= losses.rounding:
                return None
            if losses.are_drawn:  # what still draws, such as a recurrent layer, has to be without it
                self._model.eval()
                if losses_of_groups(groups, self._values_of, parameters, start_over, device_of(self._model)).add_up:
                    return None
        first, one, *others = sorted(few[:3], key=lambda sample: self.tokens([sample]), reverse=True)
        other = others[0] if others else first
        # The longest comes first in both batches, which have one shape.
        batches = [collated([first, each, each], self._collate) for each in (one, other)]
        assert self._loss is not None
        forward = partial(run_forward, self._loss, self._model)
        module = find_batch_dependent_module(self._model, forward, *batches, num_samples=3, owners=[self._loss])
        if module is not None:
            return module
        if losses.add_up:
            return f"loss, which is another in a second forward of the same samples (by {100 * losses.change:.2g} %),"
        parts, whole = losses.runs[0]
        in_words = "({:g}, {:g}) for samples in groups, and ({:g}, {:g}) for all of them together"
        drawn = " and draws random numbers of its own" if losses.are_drawn else ""
        return f"loss, which is {in_words.format(*map(math.fsum, zip(*parts, strict=True)), *whole)}{drawn},"

    def _values_of(self, part: list[Sample]) -> tuple[float, float]:
        """Return the sum of the losses of ``part`` and their number, the same on ranks that share its forward."""
        total, number = self.forward(part)
        values = float(total), float(number)
        shares = self._ranks.size > 1 and sharded_roots(self._model)
        return self._ranks.gather(values)[0] if shares else values

    def _first_found(self, find: Callable[[], str | None]) -> str | None:
        """Return what ``find`` has found on the first rank where it found something."""
        roots = sharded_roots(self._model)
        if roots:  # a rank that fails leaves the others within a forward: to tell them, it has to end
            found = self._ranks.gather(find())
            end_forward(roots)
        else:
            found = self._ranks.all_results(find)
        return next((each for each in found if each is not None), None)


def collated(samples: Sequence[Sample], collate: Callable[[list[Sample]], Any]) -> Any:
    """Return ``samples`` as a batch, from copies of them, which collating may change."""
    return collate([copied(sample) for sample in samples])


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
        if all(isinstance(entry, _PLAIN) for entry in value):  # tokens, as a rule
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

    returned = loss(model, tree_map(moved, batch))
    total, number = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)
    is_number = number.numel() == 1 if isinstance(number, torch.Tensor) else isinstance(number, Real)
    if not isinstance(total, torch.Tensor) or total.dim() > 0 or not is_number:
        raise ConfigError(
            f"loss returned {_described(returned)}; it must return the sum of the batch's losses, a scalar tensor, and "
            f"their number, as in: return cross_entropy(logits, labels, reduction='sum'), len(labels)"
        )
    number = torch.as_tensor(number).detach().reshape(())
    return total, number if number.device.type == "cpu" else number.to(total.device)


def _described(returned: Any) -> str:
    if isinstance(returned, tuple):
        return f"({', '.join(map(_described, returned))})"
    return f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, torch.Tensor) else repr(returned)


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
