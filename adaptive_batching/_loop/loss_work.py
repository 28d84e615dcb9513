"""The computation of :class:`~adaptive_batching._loop.step.AdaptiveStep`: a sum of losses, and their number."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batching import _state
from adaptive_batching._loop.samples import (
    Loss,
    Sample,
    SampleWork,
    collated,
    device_of,
    run_forward,
)
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._state import State, parameters_of
from adaptive_batching._step.data_parallel import DataParallel
from adaptive_batching._step.forward_timer import ForwardTimer
from adaptive_batching._step.judge import find_batch_norm
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.sharing import Sharing
from adaptive_batching._step.split import SplitRule, split_samples
from adaptive_batching._step.work import Part, in_halves
from adaptive_batching._values import ConfigError, first_line

log = logging.getLogger(__name__)

Backward = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class LossPart(Part):
    """Samples of one forward and backward, whose sum of losses is divided by ``divisor``."""

    divisor: float | None = None
    """Near the mean number of losses on a rank, so that half precision neither overflows nor vanishes; None for the
    number of losses of the part itself."""


class LossWork(SampleWork[Sample, list[Sample], LossPart, tuple[torch.Tensor, torch.Tensor]]):
    """Runs samples by a function that returns the sum of their losses and its number; see ``AdaptiveStep``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        collate: Callable[[list[Sample]], Any],
        length: Callable[[Sample], int] | None,
        parallel: DataParallel,
        state: State,
        *,
        balances_ranks: bool,
    ) -> None:
        super().__init__(device_of(model), collate, length, state)
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self.limit, self._parallel = TokenLimit(), parallel
        self._sharing = None
        if balances_ranks and parallel.ranks.size > 1 and length is not None:
            self._sharing = Sharing(parallel.ranks, model, waits=bool(parallel.roots))
        self._last_number: tuple[torch.Tensor, int] | None = None  # of losses of the last step, and its samples
        self._timer: ForwardTimer[LossPart] = ForwardTimer(device_of(model), self._observe)

    @property
    def balances_ranks(self) -> bool:
        """True if this rank takes part where the samples of a step are shared out."""
        return self._sharing is not None

    def start_step(self, samples: list[Sample], filler: Sample, num_samples: int, backward: Backward) -> None:
        """Take note of the samples of a step on this rank, one that may fill up, and the number on all ranks."""
        self.samples, self._filler, self._backward = samples, filler, backward
        self._num_samples = num_samples

    def split(self, samples: list[Sample]) -> Iterator[list[LossPart]]:
        parts = None if self._sharing is None else self._shared(samples, self._sharing)
        self.rearranges = parts is not None  # some may have come from another rank, which is a part of its step
        if parts is None:
            rule = SplitRule(by_length=self.limit.bound is not None)
            split = split_samples(self.lengths(samples), rule, self.limit.max_tokens)
            parts = [list(map(samples.__getitem__, part)) for part in split]
        module = None if self.limit.max_tokens is None else self.batch_dependent_module()
        if module is not None and self._parallel.ranks.any(len(parts) > 1):  # on all ranks, as others would wait
            raise ConfigError(
                f"max_tokens={self.limit.bound} would change the result: {module} computes over the batch, so its "
                "parts do not add up; set max_tokens=None and a smaller batch size"
            )
        divisor = None if len(parts) == self._parallel.ranks.size == 1 else self._divisor
        yield [self._part(part, divisor) if part else self.filler() for part in parts]

    def _shared(self, samples: list[Sample], sharing: Sharing) -> list[list[Sample]] | None:
        """Return what this rank computes of a step that is shared out; None if each rank keeps its samples."""
        self._timer.read()  # of the step before
        if not self._parallel.ranks.all(self.limit.bound is not None):  # without it, the user wants one forward
            return None
        parts = sharing.parts(samples, self.lengths(samples), 1.0, self.limit.max_tokens, pads=self.pads)
        if parts is not None and (module := self.batch_dependent_module()) is not None:
            self._sharing = None
            log.info("samples are not balanced over ranks: %s computes over the batch", module)
            return None
        return parts

    @property
    def _divisor(self) -> float:
        """The divisor of the losses of several parts, before their backward passes."""
        return self._num_samples / self._parallel.ranks.size * self._losses_per_sample

    @property
    def _losses_per_sample(self) -> float:
        """The losses of a sample in the last step, as a power of two: what is divided by it keeps its bits."""
        if self._last_number is None:
            return 1.0
        mean = float(self._last_number[0]) / self._last_number[1]
        return 2.0 ** round(math.log2(mean)) if 0 < mean < math.inf else 1.0

    def note_number(self, number: torch.Tensor) -> None:
        """Take note of the number of losses of this step, on all ranks; it is read when it is needed."""
        self._last_number = number, self._num_samples

    def _part(self, samples: list[Sample], divisor: float | None, weight: float | None = None) -> LossPart:
        tokens, longest = self.tokens_and_longest(samples)
        return LossPart(samples, tokens, weight, longest, divisor)

    def filler(self) -> LossPart:
        return self._part([self._filler], self._divisor, weight=0)

    def as_batch(self, lists: Sequence[list[Sample]]) -> list[LossPart]:
        divisor = sum(map(len, lists)) * self._losses_per_sample
        return [self._part(samples, divisor) for samples in lists]

    def runs(self, parts: Sequence[LossPart]) -> list[Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
        return [partial(self._run, part) for part in parts]

    def _run(self, part: LossPart) -> tuple[torch.Tensor, torch.Tensor]:
        is_timed = self._sharing is not None and not part.is_filler and not _state.rehearsing
        with self._timer.around(part) if is_timed else contextlib.nullcontext():
            try:
                batch = collated(part.samples, self.collate)
            except Exception as error:
                if not is_out_of_memory(error):
                    self._check_left_out(part.samples, error)
                raise
            total, number = run_forward(self._loss, self._model, batch)
            if part.is_filler:
                total, number = 0 * total.nan_to_num(), 0 * number
            # A mean over nothing has a gradient that is not a number, and a constant has none. To know that there is
            # nothing waits for a device that counts. Where other ranks wait for this backward pass, it has to run.
            if not self._parallel.roots and (part.is_filler or not number):
                return torch.zeros_like(total), number
            self._backward(total / (nonzero(number) if part.divisor is None else part.divisor))
        return total.detach(), number

    def _observe(self, part: LossPart, seconds: float) -> None:
        assert self._sharing is not None
        self._sharing.observe(self.lengths(part.samples), seconds, pads=self.pads)

    def put_back(self) -> None:
        self._timer.forget()

    def _check_left_out(self, samples: Sequence[Sample], error: Exception) -> None:
        """Raise ConfigError if all samples of the step can be collated, and these by themselves cannot."""
        try:
            collated(self.samples, self.collate)
        except Exception:
            return
        raise ConfigError(
            f"collate fails on {len(samples)} of the step's {len(self.samples)} samples by themselves "
            f"({type(error).__name__}: {first_line(error)}), and not on all of them, as where it leaves out samples; "
            "leave them out before they are passed to the step"
        ) from error

    def parameters(self) -> list[nn.Parameter]:
        return parameters_of(self._model, [self._optimizer])

    def number(self, results: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
        return math.fsum(float(number) for _, number in results)

    def compared(self, parts: Sequence[LossPart]) -> list[list[Sample]]:
        lists = super().compared(parts)
        if self.rearranges and len(lists) == 1:
            lists = in_halves(lists[0])
        return lists

    def batch_dependent_module(self) -> str | None:
        return find_batch_norm(self._model)


def nonzero(number: torch.Tensor) -> torch.Tensor:
    """Return ``number``, and 1 for 0."""
    return number + (number == 0)
