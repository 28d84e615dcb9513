"""Out of memory while training: run the same samples again, in smaller micro-batches."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchtune.training import OffloadActivations

from adaptive_batching.memory import is_out_of_memory
from adaptive_batching.microbatch import ForwardCost, TokenLimit, cut_by_length, cut_in_order, padded_tokens
from adaptive_batching.probe import DoesNotFitError
from adaptive_batching.torchtune.data import Sample, random_state, set_random_state

log = logging.getLogger(__name__)

CONSECUTIVE_RECOVERIES_TO_WARN = 3


def in_backward(recipe: Any) -> bool:
    """Whether each parameter is stepped in the backward pass; the LoRA recipes do not know the option."""
    return bool(getattr(recipe, "_optimizer_in_bwd", False))


def reset_offloading(recipe: Any) -> None:
    """Forget the activations of a forward that did not end; torchtune's context keeps track of them by itself."""
    if isinstance(recipe.activations_handling_ctx, OffloadActivations):
        recipe.activations_handling_ctx = OffloadActivations()


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward."""

    samples: list[Sample]
    weight: float | None = None
    """What its mean loss is multiplied by; None: the number of its labels, as in stock."""


@dataclass
class Outcome:
    """Whether what ran in :meth:`Recovery.caught` ran out of memory."""

    failed: bool = False


class Recovery:
    """Cuts the batches of a recipe, and lets a window of them run again after one ran out of memory.

    Nothing is lost and nothing repeated: the gradients of the whole window are discarded, the random state is put back
    to the window's beginning, and the same samples run again with at most half of the tokens in a forward.

    Args:
        recipe: A recipe that has been set up.
    """

    def __init__(self, recipe: Any) -> None:
        self._recipe = recipe
        self._limit = TokenLimit()
        self.cost = ForwardCost()
        self._random_state: dict[str, Any] = {}
        self._events: list[tuple[int, torch.Event, torch.Event]] = []
        self._recovered_in_row = 0
        self._recovered_in_step = False
        self._warned = False

    def cut(self, batch: list[Sample]) -> list[MicroBatch]:
        """The micro-batches of ``batch``: of ``micro_batch_size`` samples, or by length within the token budget."""
        if self._recipe.settings.cuts_by_length:
            budget = self._recipe.token_budget
            # Until the costs are known, a forward is taken to cost as much as an eighth of the budget.
            cut = cut_by_length(_lengths(batch), budget, min(self.cost.in_tokens(default=budget / 8), budget))
        else:
            cut = cut_in_order(len(batch), self._recipe.settings.micro_batch_size or len(batch))
        parts = [[batch[i] for i in indices] for indices in cut]
        if self._limit.max_tokens is not None:
            parts = [micro_batch for part in parts for micro_batch in _cut_to(part, self._limit.max_tokens)]
        if len(parts) == 1:
            return [MicroBatch(parts[0])]
        # A recipe's loss is a mean over targets, all but a sample's first label, and stock multiplies it by the number
        # of labels. Each part gets its share by targets of what the whole batch would have had. A part of truncated
        # samples can be all prompt: its share is nothing, and its mean loss would be 0/0.
        targets = [sum(self._count(sample["labels"][1:]) for sample in part) for part in parts]
        labels = sum(self._count(sample["labels"]) for sample in batch)
        shares = [count * labels / max(sum(targets), 1) for count in targets]
        weighted = [MicroBatch(part, share) for part, share in zip(parts, shares, strict=True) if share > 0]
        return weighted or [MicroBatch(batch)]

    def _count(self, labels: Any) -> int:
        return int((np.asarray(labels) != self._recipe._loss_fn.ignore_index).sum())

    def remember(self) -> None:
        """A window begins: keep the random state that it begins with."""
        if self._possible:
            self._random_state = random_state(self._recipe._device)

    def timed(self, micro_batch: list[Sample]) -> contextlib.AbstractContextManager[None]:
        """Measure what a forward and backward of ``micro_batch`` takes, where the cut depends on it."""
        if not self._recipe.settings.cuts_by_length:
            return contextlib.nullcontext()
        return self._timed(padded_tokens(_lengths(micro_batch)))

    @contextlib.contextmanager
    def _timed(self, tokens: int) -> Iterator[None]:
        if self._recipe._device.type == "cpu":
            start = time.perf_counter()
            yield
            self.cost.observe(tokens, time.perf_counter() - start)
            return
        # Events are read when the step is over, so that the device is not waited for in between.
        begin, end = (
            torch.Event(device=self._recipe._device, enable_timing=True),
            torch.Event(device=self._recipe._device, enable_timing=True),
        )
        begin.record()
        yield
        end.record()
        self._events.append((tokens, begin, end))

    @contextlib.contextmanager
    def caught(self, micro_batch: list[Sample]) -> Iterator[Outcome]:
        """Note that the micro-batch ran out of memory, where it can run again in smaller parts; else raise.

        Raises:
            DoesNotFitError: If it ran out of memory and cannot be run again.
        """
        outcome = Outcome()
        try:
            yield outcome
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not self._possible or len(micro_batch) == 1:
                raise DoesNotFitError(self._why_not(micro_batch)) from error
            outcome.failed = True

    def recover(self, micro_batch: list[Sample]) -> None:
        """Discard the window's gradients, really release their memory, and halve the limit.

        Not to be called in an ``except`` block: the traceback holds the step's tensors.
        """
        tokens = padded_tokens(_lengths(micro_batch))
        self._limit.shrink(tokens)
        self._recovered_in_step = True
        log.warning(
            "out of memory with %d samples of up to %d tokens; running the step's samples again with at most %d padded "
            "tokens in a forward (recovery number %d)",
            len(micro_batch), max(_lengths(micro_batch)), self._limit.max_tokens, self._limit.num_recoveries,
        )  # fmt: skip
        self._events.clear()
        for parameter in self._recipe._model.parameters():
            parameter.grad = None
        gc.collect()
        if self._recipe._device.type != "cpu":
            torch.get_device_module(self._recipe._device).empty_cache()
        reset_offloading(self._recipe)
        set_random_state(self._random_state, self._recipe._device)

    def step_done(self) -> None:
        """An optimizer step is done."""
        for tokens, begin, end in self._events:
            end.synchronize()
            self.cost.observe(tokens, begin.elapsed_time(end) / 1000)
        self._events.clear()
        if not self._recovered_in_step:
            self._limit.step_done()
        self._recovered_in_row = self._recovered_in_row + 1 if self._recovered_in_step else 0
        self._recovered_in_step = False
        if self._recovered_in_row == CONSECUTIVE_RECOVERIES_TO_WARN and not self._warned:
            self._warned = True
            log.warning(
                "every step runs out of memory first: training crawls. Set a smaller batch_size or micro_batch_size, "
                "or enable_activation_checkpointing=True"
            )

    @contextlib.contextmanager
    def fatal(self) -> Iterator[None]:
        """Inside, running out of memory cannot be recovered from: parameters may be updated in part.

        Raises:
            DoesNotFitError: If it happens.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFitError(
                "out of memory in the optimizer's step, which may have updated some parameters and not others; resume "
                "from the last checkpoint, with use_maximum_batch_size=True or a smaller batch_size"
            ) from error

    @property
    def _possible(self) -> bool:
        return self._recipe.settings.recover_from_oom and not in_backward(self._recipe)

    def _why_not(self, micro_batch: list[Sample]) -> str:
        lengths = _lengths(micro_batch)
        what = f"out of memory in a forward or backward of {len(lengths)} samples of up to {max(lengths)} tokens"
        if in_backward(self._recipe):
            return (
                f"{what}; with optimizer_in_bwd=True some parameters may be updated already, and no smaller "
                f"micro-batches can be accumulated. Set optimizer_in_bwd=False to recover, or a smaller batch_size"
            )
        if not self._recipe.settings.recover_from_oom:
            return f"{what}; set adaptive_batching.recover_from_oom=True to run it in smaller parts"
        start = [int(token) for token in micro_batch[0]["tokens"][:12]]
        return (
            f"out of memory with a single sample, or pack, of {lengths[0]} tokens (it begins with the tokens {start}); "
            f"set tokenizer.max_seq_len below {lengths[0]}, or enable_activation_checkpointing=True"
        )


def _cut_to(part: list[Sample], max_tokens: int) -> list[list[Sample]]:
    lengths = _lengths(part)
    if padded_tokens(lengths) <= max_tokens:
        return [part]
    # What a forward costs is not known here; a high price keeps their number low.
    cut = cut_by_length(lengths, max_tokens, forward_cost=max_tokens)
    return [[part[i] for i in indices] for indices in cut]


def _lengths(samples: list[Sample]) -> list[int]:
    return [len(sample["tokens"]) for sample in samples]
