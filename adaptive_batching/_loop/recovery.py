"""Out of memory in a plain loop: the samples of a step run again, in smaller parts."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic

import torch
from torch import nn

from adaptive_batching._loop.batch import Loss, Sample, collated, device_of, run_forward
from adaptive_batching._memory import allocator_advice
from adaptive_batching._micro_batches.batch_dependence import find_batch_dependence_of_loss, find_batch_dependent_module
from adaptive_batching._micro_batches.cut import padded_tokens
from adaptive_batching._micro_batches.limits import Attempts, TokenLimit
from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._values import ConfigError

log = logging.getLogger(__name__)


class Recovery(Generic[Sample]):
    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        collate: Callable[[list[Sample]], Any],
        length: Callable[[Sample], int] | None,
    ) -> None:
        self.limit = TokenLimit()
        self._model = model
        self._loss = loss
        self._collate = collate
        self._length = length
        self._attempts = Attempts(self.limit)
        self._parts_add_up = False

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

    def start_step(self) -> None:
        self._attempts.start_step()

    def note_fit(self, tokens: int) -> None:
        self._attempts.note(tokens)

    def recover(self, samples: list[Sample], failed: list[Sample], error: Exception) -> None:
        """Lower the limit on parts after ``failed`` ran out of memory; raise DoesNotFitError if that cannot help."""
        tokens = self.tokens(failed)
        what = f"out of memory with {len(failed)} sample{'s' if len(failed) > 1 else ''}"
        if self._length is not None:
            what += f" of up to {max(map(self._tokens_of, failed))} tokens"
        fitted_before = self._attempts.has_fitted(tokens)
        if len(failed) == 1 and not (fitted_before and self._attempts.failures == 0):
            raise DoesNotFitError(f"{what}, which cannot be cut; shorten it, or checkpoint activations") from error
        try:
            module = self.batch_dependent_module(samples)
        except Exception as again:
            if not is_out_of_memory(again):
                raise
            raise DoesNotFitError(f"{what}, and again in a forward of three short ones") from again
        if module is not None:
            raise DoesNotFitError(
                f"{what}, and smaller parts of the batch would not give the same result: {module} computes over the "
                f"batch. Use a smaller batch size, or checkpoint activations"
            ) from error
        as_they_were = self._attempts.fail(tokens, fitted_before=fitted_before, can_be_cut=len(failed) > 1)
        how = "as they were" if as_they_were else f"with at most {self.limit.max_tokens} {self._unit} in a forward"
        log.warning(
            "%s; running the step's samples again %s (recovery number %d)", what, how, self.limit.num_recoveries
        )

    def end_step(self, samples: list[Sample], parts: list[list[Sample]], *, retried: bool) -> None:
        """End a step whose samples have run, in ``parts``; ``retried`` if the allocator emptied its cache meanwhile."""
        largest = max(parts, key=self.tokens)
        self._attempts.note(self.tokens(largest))
        if retried:
            self._attempts.note_retry(self.tokens(largest), can_be_cut=len(largest) > 1)
        if not self._attempts.shrank and not self._shrink_if_thrashing(samples):
            self.limit.note_clean_step()
        self._attempts.end_step()

    def _shrink_if_thrashing(self, samples: list[Sample]) -> bool:
        """Lower the limit where the allocator frees its cache to start over, step after step; the step stands."""
        tokens, device = self._attempts.count_retries(), device_of(self._model)
        if not tokens or self.batch_dependent_module(samples) is not None:
            return False  # there is no need, or nothing to cut
        self._attempts.lower_for_retries(tokens, unit=self._unit, device=device, advice=allocator_advice(device))
        return True

    def batch_dependent_module(self, samples: list[Sample]) -> str | None:
        """Name what computes over the batch, a module of the model or the loss function; None if nothing does."""
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

    @property
    def _unit(self) -> str:
        return "samples" if self._length is None else "padded tokens"
