"""Out of memory in a plain loop: the samples of a step run again, in smaller parts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from adaptive_batching._device import random_state, set_random_state
from adaptive_batching._loop.batch import Loss, Sample, collated, device_of, run_forward
from adaptive_batching._micro_batches.batch_dependence import find_batch_dependence_of_loss, find_batch_dependent_module
from adaptive_batching._micro_batches.cut import padded_tokens
from adaptive_batching._micro_batches.limits import TokenLimit
from adaptive_batching._micro_batches.retry import Retry
from adaptive_batching._values import ConfigError


class StepRetry(Retry[list[Sample]]):
    """Runs the samples of a step again, which are given to :meth:`start_with`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        collate: Callable[[list[Sample]], Any],
        length: Callable[[Sample], int] | None,
    ) -> None:
        super().__init__(TokenLimit(), device_of(model))
        self._model = model
        self._loss = loss
        self._collate = collate
        self._length = length
        self._parts_add_up = False
        self._samples: list[Sample] = []
        self._random_state: dict[str, Any] = {}

    def start_with(self, samples: list[Sample]) -> None:
        super().start()
        self._samples = samples
        self._random_state = random_state(device_of(self._model))

    def size(self, part: list[Sample]) -> tuple[int, int]:
        return len(part), self.tokens(part)

    def describe(self, part: list[Sample]) -> str:
        what = f"{len(part)} sample{'s' if len(part) > 1 else ''}"
        return what if self._length is None else f"{what} of up to {max(map(self._tokens_of, part))} tokens"

    def unit(self, part: list[Sample]) -> str:
        return "samples" if self._length is None else super().unit(part)

    def shorter(self, part: list[Sample]) -> str:
        return f"; shorten it, or {self.less_memory()}"

    def less_memory(self) -> str:
        return "checkpoint activations"

    def put_back(self) -> None:
        set_random_state(self._random_state, device_of(self._model))

    def tokens(self, part: Sequence[Sample]) -> int:
        """Return the padded tokens of a part; without a length, its number of samples."""
        return len(part) if self._length is None else padded_tokens([max(self._tokens_of(s), 1) for s in part])

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
        samples = self._samples
        if self._parts_add_up or len(samples) == 1:
            return None
        # Short samples show a dependence best. The longest of them comes first in both batches, which have one shape.
        *others, first = sorted(samples, key=lambda sample: self.tokens([sample]))[:3]
        one, other = others[0], [*others, first][1]
        batches = [collated([first, each, each], self._collate) for each in (one, other)]
        found = find_batch_dependent_module(
            self._model, lambda batch: run_forward(self._loss, self._model, batch), *batches, num_samples=3
        )
        if found is None:
            found = find_batch_dependence_of_loss(self._model, self._loss_of, first, one, other)
        self._parts_add_up = found is None
        return found

    def _loss_of(self, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        return run_forward(self._loss, self._model, collated(samples, self._collate))
