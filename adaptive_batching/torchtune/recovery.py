"""Out of memory while training: run the same samples again, in smaller micro-batches."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtune.training import OffloadActivations

from adaptive_batching.memory import is_out_of_memory, num_allocation_retries
from adaptive_batching.microbatch import TokenLimit
from adaptive_batching.probe import DoesNotFitError
from adaptive_batching.torchtune.data import index_of, is_multimodal, random_state, set_random_state
from adaptive_batching.torchtune.micro_batches import MicroBatch

log = logging.getLogger(__name__)

CONSECUTIVE_RECOVERIES_TO_WARN = 3
# The allocator may have to start over once when sizes change; doing so step after step makes training crawl.
CONSECUTIVE_RETRIES_TO_SHRINK = 2


def in_backward(recipe: Any) -> bool:
    """Whether each parameter is stepped in the backward pass; the LoRA recipes do not know the option."""
    return bool(getattr(recipe, "_optimizer_in_bwd", False))


def reset_offloading(recipe: Any) -> None:
    """Forget the activations of a forward that did not end; torchtune's context keeps track of them by itself."""
    if isinstance(recipe.activations_handling_ctx, OffloadActivations):
        recipe.activations_handling_ctx = OffloadActivations()


@dataclass
class Outcome:
    """Whether what ran in :meth:`Recovery.caught` ran out of memory."""

    failed: bool = False


class Recovery:
    """Lets the batches of an optimizer step run again after one ran out of memory.

    Nothing is lost and nothing repeated: the gradients of the whole window are discarded, the random state is put back
    to the window's beginning, and the same samples run again with at most half of the tokens in a forward.

    Args:
        recipe: A recipe that has been set up.
        limit: Lowered when a micro-batch runs out of memory.
    """

    def __init__(self, recipe: Any, limit: TokenLimit) -> None:
        self._recipe = recipe
        self._limit = limit
        self._random_state: dict[str, Any] = {}
        self._recovered_in_row = 0
        self._recovered_in_step = False
        self._warned = False
        self._largest: MicroBatch | None = None
        self._retries = num_allocation_retries(recipe._device)
        self._retried_in_row = 0

    def remember(self) -> None:
        """A window begins: keep the random state that it begins with."""
        if self._possible:
            self._random_state = random_state(self._recipe._device)

    @contextlib.contextmanager
    def caught(self, micro_batch: MicroBatch) -> Iterator[Outcome]:
        """Note that the micro-batch ran out of memory, where it can run again in smaller parts; else raise.

        Raises:
            DoesNotFitError: If it ran out of memory and cannot be run again.
        """
        outcome = Outcome()
        if self._largest is None or micro_batch.tokens > self._largest.tokens:
            self._largest = micro_batch
        try:
            yield outcome
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not self._possible or len(micro_batch.samples) == 1:
                raise DoesNotFitError(self._why_not(micro_batch)) from error
            outcome.failed = True

    def recover(self, micro_batch: MicroBatch) -> None:
        """Discard the window's gradients, really release their memory, and halve the limit.

        Not to be called in an ``except`` block: the traceback holds the step's tensors.

        Raises:
            DoesNotFitError: If the model computes over the batch dimension, so that parts of it are not the same.
        """
        for parameter in self._recipe._model.parameters():
            parameter.grad = None
        gc.collect()
        if self._recipe._device.type != "cpu":
            torch.get_device_module(self._recipe._device).empty_cache()
        reset_offloading(self._recipe)
        self._check_that_cutting_is_exact(micro_batch)
        self._limit.shrink(micro_batch.tokens)
        self._recovered_in_step = True
        log.warning(
            "out of memory with %s; running the step's samples again with at most %d %s in a forward (recovery number "
            "%d)", _describe(micro_batch), self._limit.max_tokens, _unit(micro_batch), self._limit.num_recoveries,
        )  # fmt: skip
        set_random_state(self._random_state, self._recipe._device)

    def step_done(self) -> None:
        """An optimizer step is done."""
        if not self._recovered_in_step and not self._shrink_if_thrashing():
            self._limit.step_done()
        self._largest = None
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
        """How often a step has had to run again."""
        return self._limit.num_recoveries

    def metrics(self) -> dict[str, int]:
        """Added to what stock logs; nothing as long as a run that is as stock has met no error."""
        counts = self.num_recoveries > 0 or self._recipe.settings.enabled
        return {"out_of_memory_recoveries": self.num_recoveries} if counts else {}

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

    def _check_that_cutting_is_exact(self, micro_batch: MicroBatch) -> None:
        module = self._recipe.batch_dependent_module()
        if module is not None:
            raise DoesNotFitError(
                f"out of memory with {_describe(micro_batch)}, and smaller parts would not give the same result: "
                f"{module} computes over the batch. Set a smaller batch_size, or "
                f"enable_activation_checkpointing=True"
            )

    def _shrink_if_thrashing(self) -> bool:
        """Lower the limit where the allocator frees its cache to start over, step after step; the step stands."""
        retries = num_allocation_retries(self._recipe._device)
        rose, self._retries = retries > self._retries, retries
        self._retried_in_row = self._retried_in_row + 1 if rose else 0
        if not self._recipe.settings.enabled or not self._possible:  # off is stock, however slow
            return False
        if self._retried_in_row < CONSECUTIVE_RETRIES_TO_SHRINK or self._largest is None:
            return False
        if len(self._largest.samples) == 1 or self._recipe.batch_dependent_module() is not None:
            return False  # it cannot be cut
        self._retried_in_row = 0
        self._limit.lower(self._largest.tokens)
        log.warning(
            "the allocator of %s frees its cache in every step to find room (num_alloc_retries: %d); from now on a "
            "forward takes at most half, %d", self._recipe._device, retries, self._limit.max_tokens,
        )  # fmt: skip
        return True

    def _why_not(self, micro_batch: MicroBatch) -> str:
        what = f"out of memory in a forward or backward of {_describe(micro_batch)}"
        if in_backward(self._recipe):
            return (
                f"{what}; with optimizer_in_bwd=True some parameters may be updated already, and no smaller "
                f"micro-batches can be accumulated. Set optimizer_in_bwd=False to recover, or a smaller batch_size"
            )
        if not self._recipe.settings.recover_from_oom:
            return f"{what}; set adaptive_batching.recover_from_oom=True to run it in smaller parts"
        sample = micro_batch.samples[0]
        tokens = sample["tokens"]
        start = [int(token) for token in tokens[:12]]
        return (
            f"out of memory with a single sample, or pack, of {len(tokens)} tokens: number {index_of(sample)} of the "
            f"dataset (the first is 0), which begins with the tokens {start}. Set tokenizer.max_seq_len below "
            f"{len(tokens)}, or enable_activation_checkpointing=True"
        )


def _describe(micro_batch: MicroBatch) -> str:
    samples = micro_batch.samples
    plural = "s" if len(samples) > 1 else ""
    return f"{len(samples)} sample{plural} of up to {max(len(sample['tokens']) for sample in samples)} tokens"


def _unit(micro_batch: MicroBatch) -> str:
    return "samples" if is_multimodal(micro_batch.samples[0]) else "padded tokens"
