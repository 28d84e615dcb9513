"""The computation of :class:`~adaptive_batching._loop.step.AdaptiveStep`: a sum of losses, and their number."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batching import _state
from adaptive_batching._evidence import in_groups, losses_of_groups
from adaptive_batching._loop.samples import (
    Loss,
    Sample,
    SampleWork,
    collated,
    device_of,
    run_forward,
)
from adaptive_batching._memory.out_of_memory import forget_frames, is_out_of_memory
from adaptive_batching._memory.unused_memory import release_cached_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._probe.trial import parameters_of
from adaptive_batching._ranks.fsdp import end_forward, sharded_roots
from adaptive_batching._state import State, draws_put_back, rehearsal
from adaptive_batching._step.batch_dependence import find_batch_dependent_module, find_batch_norm
from adaptive_batching._step.data_parallel import DataParallel
from adaptive_batching._step.forward_timer import ForwardTimer
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.sharing import Sharing, gathered
from adaptive_batching._step.split import SplitRule, split_samples
from adaptive_batching._step.work import Part
from adaptive_batching._values import DRY_RUN, ConfigError, first_line, percent

log = logging.getLogger(__name__)

_FEW = 32  # samples of which some show what computes over the batch
_MOST_TOGETHER = 7  # of these

Backward = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class LossPart(Part):
    """Samples of one forward and backward, whose sum of losses is divided by ``divisor``."""

    divisor: float | None = None
    """Near the number of losses, so that half precision neither overflows nor vanishes; None for that number itself."""


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
        self._timer: ForwardTimer[LossPart] = ForwardTimer(device_of(model), self._observe)
        self._parts_add_up = False  # True if this is known, on all ranks

    @property
    def shares(self) -> bool:
        """True if this rank takes part where the samples of a step are shared out."""
        return self._sharing is not None

    def see(self, samples: list[Sample], filler: Sample, num_samples: int, backward: Backward) -> None:
        """Take note of the samples of a step on this rank, one that may fill up, and the number on all ranks."""
        self.samples, self._filler, self._backward = samples, filler, backward
        self._num_samples = num_samples

    def split(self, groups: Sequence[list[Sample]]) -> Iterator[list[LossPart]]:
        [samples] = groups
        parts = None if self._sharing is None else self._shared(samples, self._sharing)
        if parts is None:
            rule = SplitRule(by_length=self.limit.bound is not None)
            split = split_samples(self.lengths(samples), rule, self.limit.max_tokens)
            parts = [[samples[index] for index in part] for part in split]
        is_split = not self._parts_add_up and self._parallel.ranks.any(len(parts) > 1)
        if is_split and (module := self.batch_dependent_module()) is not None:
            raise ConfigError(
                f"max_tokens={self.limit.bound} would change the result: {module} computes over the batch, so its "
                "parts do not add up; set max_tokens=None and a smaller batch size"
            )
        yield [self._part(part, self._divisor(len(parts))) if part else self.filler() for part in parts]

    def _shared(self, samples: list[Sample], sharing: Sharing) -> list[list[Sample]] | None:
        """Return what this rank computes of a step that is shared out; None if each rank keeps its samples."""
        self._timer.read()  # of the step before
        if not self._parallel.ranks.all(self.limit.bound is not None):  # without it, the user wants one forward
            return None
        parts = sharing.parts(samples, self.lengths(samples), 1.0, self.limit.max_tokens, pads=self.pads)
        if parts is not None and (module := self.batch_dependent_module()) is not None:
            self._sharing = None
            log.info("samples stay on the ranks that have drawn them: %s computes over the batch", module)
            return None
        return parts

    def _divisor(self, num_parts: int) -> float | None:
        """Return what the losses of so many parts are divided by, on their way to the gradient."""
        ranks = self._parallel.ranks.size
        return None if num_parts == ranks == 1 else self._num_samples / ranks

    def _part(self, samples: list[Sample], divisor: float | None, weight: float | None = None) -> LossPart:
        return LossPart(samples, self.tokens(samples), weight, divisor)

    def filler(self) -> LossPart:
        return self._part([self._filler], self._num_samples / self._parallel.ranks.size, weight=0)

    def as_batch(self, lists: Sequence[list[Sample]]) -> list[LossPart]:
        return [self._part(samples, float(sum(map(len, lists)))) for samples in lists]

    def runs(self, parts: Sequence[LossPart]) -> list[Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
        return [partial(self._run, part) for part in parts]

    def _run(self, part: LossPart) -> tuple[torch.Tensor, torch.Tensor]:
        is_timed = self._sharing is not None and not part.is_filler and not _state.rehearsing
        with self._timer.around(part) if is_timed else contextlib.nullcontext():
            total, number = self.forward(part.samples)
            if part.is_filler:
                total, number = 0 * total.nan_to_num(), 0 * number
            # A mean over nothing has a gradient that is not a number, and a constant has none. Where other ranks wait
            # for this one in its backward pass, it has to run.
            if not self._parallel.roots and (part.is_filler or not number):
                return torch.zeros_like(total), number
            self._backward(total / (nonzero(number) if part.divisor is None else part.divisor))
        return total.detach(), number

    def _observe(self, part: LossPart, seconds: float) -> None:
        assert self._sharing is not None
        self._sharing.observe(self.lengths(part.samples), seconds, pads=self.pads)

    def put_back(self) -> None:
        self._timer.forget()

    def forward(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of ``samples``, with its graph, and their number."""
        try:
            batch = collated(samples, self.collate)
        except Exception as error:
            if not is_out_of_memory(error):
                self._check_left_out(samples, error)
            raise
        return run_forward(self._loss, self._model, batch)

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

    def batch_dependent_module(self, most_tokens: int | None = None) -> str | None:
        """Name what computes over the batch, a module of the model or the loss function; None if nothing does.

        It is None as well where memory does not suffice for two samples at once. Then the first step in which they fit
        compares gradients, as every audit does.
        """
        if self._parts_add_up or DRY_RUN in os.environ:  # where all values are zero
            return None
        # Short samples show a dependence best. There are as many on every rank, as shards need the same forwards.
        few = sorted(self.samples, key=lambda sample: self.tokens([sample]))[:_FEW]
        ranks = self._parallel.ranks
        of_ranks, failure = gathered(ranks, few)
        few = few[: int(ranks.smallest(len(few)))] if failure else max(of_ranks, key=len)
        if len(few) < 2:
            return None
        most = int(ranks.smallest(self._most_within(few, self.limit.within(most_tokens))))
        with draws_put_back(self.collate):
            is_known, module = self._first_named(partial(self._what_does_not_add_up, few, most))
            while not is_known and most > 2:
                most = min(most - 1, 4)
                is_known, module = self._first_named(partial(self._what_does_not_add_up, few, most))
        if not is_known:
            log.warning(
                "two samples do not fit in memory at once, so nothing shows whether the parts of a batch add up to it; "
                "gradients are compared as soon as two do"
            )
        self._parts_add_up = module is None
        return module

    def _most_within(self, few: list[Sample], max_tokens: int | None) -> int:
        """Return how many samples run together at the most, to see if they add up; at least two."""
        most = min(len(few), _MOST_TOGETHER)
        while most > 2 and max_tokens is not None:
            if self.tokens([sample for group in self._groups_of(few, most) for sample in group]) <= max_tokens:
                break
            most -= 1
        return most

    def _groups_of(self, few: list[Sample], most: int) -> list[list[Sample]]:
        return in_groups(few, lambda sample: self.tokens([sample]), most=most)

    def _what_does_not_add_up(self, few: list[Sample], most: int) -> str | None:
        """Run groups of a few samples, and their union, of up to ``most``, and name what makes the difference."""
        if (module := find_batch_norm(self._model)) is not None:  # which may refuse a batch of one
            return module
        groups = self._groups_of(few, most)
        parameters = list(self._model.parameters())
        with rehearsal(self.state, device_of(self._model)) as start_over:
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
        batches = [collated([first, second, second], self.collate) for second in (one, other)]
        forward = partial(run_forward, self._loss, self._model)
        try:
            module = find_batch_dependent_module(self._model, forward, *batches, num_samples=3, state=self.state)
        except Exception as error:
            if sharded_roots(self._model) or not is_out_of_memory(error):
                raise
            forget_frames(error)  # parts do not add up, which is known, if not where
            module = None
        if module is not None:
            return module
        if losses.add_up:
            return f"loss, which is another in a second forward of the same samples (by {percent(losses.change)}),"
        groups_alone, together = losses.runs[0]
        in_words = "({:g}, {:g}) for samples in groups, and ({:g}, {:g}) for all of them together"
        drawn = " and draws random numbers of its own" if losses.are_drawn else ""
        return f"loss, which is {in_words.format(*map(math.fsum, zip(*groups_alone, strict=True)), *together)}{drawn},"

    def _values_of(self, part: list[Sample]) -> tuple[float, float]:
        """Return the sum of the losses of ``part`` and their number, the same on ranks that share its forward."""
        total, number = self.forward(part)
        values = float(total) if number else 0.0, float(number)  # a mean over nothing is not a number
        shares = self._parallel.ranks.size > 1 and sharded_roots(self._model)
        return self._parallel.ranks.gather(values)[0] if shares else values

    def _first_named(self, find: Callable[[], str | None]) -> tuple[bool, str | None]:
        """Return what ``find`` names on the first rank where it names something, and False if memory ran out on any."""

        def found() -> tuple[bool, str | None]:
            try:
                return True, find()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                forget_frames(error)
            release_cached_memory(device_of(self._model))
            return False, None

        roots = sharded_roots(self._model)
        if roots:  # a rank that fails leaves the others within a forward: to tell them, it has to end
            try:
                found_on_ranks = self._parallel.ranks.gather((True, find()))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise DoesNotFitError(
                    f"out of memory in a forward of up to {_MOST_TOGETHER} samples, which shows whether the parts of a "
                    f"batch add up to it; set a smaller max_tokens, or {self.less_memory()}"
                ) from error
            end_forward(roots)
        else:
            found_on_ranks = self._parallel.ranks.all_results(found)
        is_known = all(known for known, _ in found_on_ranks)
        return is_known, next((name for _, name in found_on_ranks if name is not None), None)


def nonzero(number: torch.Tensor) -> torch.Tensor:
    """Return ``number``, and 1 for 0."""
    return number + (number == 0)
