"""Out of memory while training: run the same samples again, in smaller micro-batches."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from adaptive_batching.memory import is_out_of_memory
from adaptive_batching.microbatch import TokenLimit, cut_by_length, cut_in_order, padded_tokens
from adaptive_batching.probe import DoesNotFitError
from adaptive_batching.torchtune.data import Sample, random_state, set_random_state

log = logging.getLogger(__name__)

CONSECUTIVE_RECOVERIES_TO_WARN = 3


def in_backward(recipe: Any) -> bool:
    """Whether each parameter is stepped in the backward pass; the LoRA recipes do not know the option."""
    return bool(getattr(recipe, "_optimizer_in_bwd", False))


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
        self._random_state: dict[str, Any] = {}
        self._recovered_in_row = 0
        self._recovered_in_step = False
        self._warned = False

    def cut(self, batch: list[Sample]) -> list[list[Sample]]:
        """The micro-batches of ``batch``: of ``micro_batch_size`` samples, or fewer where that ran out of memory."""
        size = self._recipe.settings.micro_batch_size or len(batch)
        parts = [[batch[i] for i in indices] for indices in cut_in_order(len(batch), size)]
        if self._limit.max_tokens is not None:
            parts = [micro_batch for part in parts for micro_batch in _cut_to(part, self._limit.max_tokens)]
        # A truncated sample can be all prompt. Alone in a micro-batch its mean loss over no target would be 0/0; its
        # share of the whole batch's gradient is nothing.
        return [part for part in parts if self._has_target(part)] or parts

    def _has_target(self, samples: list[Sample]) -> bool:
        ignored = self._recipe._loss_fn.ignore_index
        return any(label != ignored for sample in samples for label in sample["labels"][1:])

    def remember(self) -> None:
        """A window begins: keep the random state that it begins with."""
        if self._possible:
            self._random_state = random_state()

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
        for parameter in self._recipe._model.parameters():
            parameter.grad = None
        gc.collect()
        if self._recipe._device.type != "cpu":
            torch.get_device_module(self._recipe._device).empty_cache()
        set_random_state(self._random_state)

    def step_done(self) -> None:
        """An optimizer step is done."""
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

    @property
    def num_recoveries(self) -> int:
        return self._limit.num_recoveries

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
        start = list(micro_batch[0]["tokens"][:12])
        return (
            f"out of memory with a single sample of {lengths[0]} tokens (it begins with the tokens {start}); set "
            f"tokenizer.max_seq_len below {lengths[0]}, or enable_activation_checkpointing=True"
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
