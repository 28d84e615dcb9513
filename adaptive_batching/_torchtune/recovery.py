"""Out of memory while training: run the same samples again, in smaller micro-batches."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from adaptive_batching._memory import allocator_advice
from adaptive_batching._micro_batches.limits import Attempts, TokenLimit
from adaptive_batching._micro_batches.run import Outcome
from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._random_state import random_state, set_random_state
from adaptive_batching._torchtune.cutting import MicroBatch
from adaptive_batching._torchtune.data import index_of
from adaptive_batching._torchtune.host import Host

log = logging.getLogger(__name__)

CONSECUTIVE_RECOVERIES_TO_WARN = 3


class Recovery:
    """Lets the batches of an optimizer step run again after one ran out of memory.

    Nothing is lost and nothing repeated: the gradients of the whole window are discarded, the random state is put back
    to the window's beginning, and the same samples run again, as they were or in smaller parts: see
    :class:`~adaptive_batching._micro_batches.limits.Attempts`.

    ``batch_dependent_module`` names a module of the model that computes over the batch, or returns None.
    ``probed_tokens`` are padded, of the largest forward that the probe has seen to fit. If not ``enabled``, an error is
    raised instead.
    """

    def __init__(
        self,
        host: Host,
        limit: TokenLimit,
        batch_dependent_module: Callable[[], str | None],
        *,
        enabled: bool = True,
        probed_tokens: int = 0,
        validates: bool = False,
    ) -> None:
        self._host = host
        self._limit = limit
        self._batch_dependent_module = batch_dependent_module
        self._enabled = enabled
        self._batch_size = "batch_size_val" if validates else "batch_size"
        self._dataset = "dataset_val" if validates else "the dataset"
        self._samples = "samples of dataset_val" if validates else "the step's samples"
        self._random_state: dict[str, Any] = {}
        self._attempts = Attempts(limit, probed_tokens)
        self._recovered_in_row = 0
        self._warned = False
        self._unit = ""

    def remember(self) -> None:
        """Keep the random state that a window begins with."""
        if self._host.gate is not None:
            self._host.gate.updated = False
        self._attempts.start_step()
        if self._enabled:
            self._random_state = random_state(self._host.device)

    def note(self, micro_batches: Sequence[MicroBatch], outcome: Outcome[Any]) -> None:
        self._attempts.note(max((each.tokens for each in micro_batches), default=0))
        if outcome.retried:
            self._unit = self._unit_of(micro_batches[0])
            largest = max(micro_batches, key=lambda each: each.tokens)
            self._attempts.note_retry(largest.tokens, can_be_cut=len(largest.samples) > 1)

    def recover(self, micro_batches: Sequence[MicroBatch], outcome: Outcome[Any]) -> None:
        """Decide how the window runs again, alike on every rank, now that its gradients have been discarded.

        Memory ran out on this rank or another. If smaller parts are no way out, that is a :class:`DoesNotFitError`.
        """
        failed = None if outcome.failed_here is None else micro_batches[outcome.failed_here]
        ranks = self._host.ranks
        if failed is not None and not self._host.recovers_together:
            raise DoesNotFitError(self._why_not(failed)) from outcome.error  # the others wait elsewhere
        ran_before = bool(ranks.all(failed is None or self._attempts.has_fitted(failed.tokens)))
        again_as_it_was = ran_before and self._attempts.failures == 0
        is_smallest = failed is not None and len(failed.samples) == 1 and not again_as_it_was
        hopeless = failed is not None and (not self._enabled or self._is_updated or is_smallest)
        if ranks.any(hopeless):
            if failed is not None and hopeless:
                raise DoesNotFitError(self._why_not(failed)) from outcome.error
            raise DoesNotFitError("out of memory on another rank, which says what would help")
        self._check_that_running_again_is_exact()
        self._host.objective.equalize_collectives()
        # The same limit everywhere: from the largest that has failed. The first rank says what has, on each.
        found = ranks.gather(None if failed is None else (failed.tokens, f"with {self._describe(failed)}"))
        failures = {rank: each for rank, each in enumerate(found) if each is not None}
        tokens = max(tokens for tokens, _ in failures.values())
        self._unit = self._unit_of(micro_batches[0])
        can_be_cut = failed is not None and len(failed.samples) > 1
        if self._attempts.fail(tokens, fitted_before=ran_before, can_be_cut=can_be_cut):
            how = "as they were"
        else:
            how = f"with at most {self._limit.max_tokens} {self._unit} in a forward"
            if self._host.steps_in_backward:
                how += f", which holds {size_of_gradients(self._host)} of gradients until the last of them"
        is_alone = ranks.size == 1
        what = ", ".join(what if is_alone else f"on rank {rank} {what}" for rank, (_, what) in failures.items())
        log.warning(
            "out of memory %s; running %s again %s (recovery number %d)",
            what, self._samples, how, self._limit.num_recoveries,
        )  # fmt: skip
        set_random_state(self._random_state, self._host.device)

    def end_step(self) -> None:
        if not self._attempts.shrank and not self._shrink_if_thrashing():
            self._limit.note_clean_step()
        self._attempts.end_step()
        self._recovered_in_row = self._recovered_in_row + 1 if self._attempts.failures else 0
        if self._recovered_in_row == CONSECUTIVE_RECOVERIES_TO_WARN and not self._warned:
            self._warned = True
            log.warning(
                "every step runs out of memory first: training crawls. Set a smaller batch_size or micro_batch_size, "
                "or %s",
                remedy(self._host),
            )

    @property
    def num_recoveries(self) -> int:
        return self._limit.num_recoveries

    def metrics(self) -> dict[str, int]:
        return {"out_of_memory_recoveries": self.num_recoveries}

    @contextlib.contextmanager
    def fatal(self) -> Iterator[None]:
        """Turn running out of memory inside into an error: parameters may be updated in part."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFitError(
                f"out of memory in the optimizer's step, which may have updated some parameters and not others; resume "
                f"from the last checkpoint, with use_maximum_batch_size=True, or a batch_size below "
                f"{self._host.loader.batch_size}, or {remedy(self._host)}"
            ) from error

    @property
    def _is_updated(self) -> bool:
        return self._host.gate is not None and self._host.gate.updated

    def _check_that_running_again_is_exact(self) -> None:
        try:
            module = self._batch_dependent_module()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFitError(
                f"out of memory, and again in a forward of a few tokens; nothing larger will fit. Use more devices, or "
                f"{remedy(self._host)}"
            ) from error
        if module is not None:
            raise DoesNotFitError(
                f"out of memory, and smaller parts of the batch would not give the same result: {module} computes over "
                f"the batch. Set a smaller {self._batch_size}, or {remedy(self._host)}"
            )

    def _shrink_if_thrashing(self) -> bool:
        """Lower the limit where an allocator frees its cache to start over, step after step; the step stands."""
        device, ranks = self._host.device, self._host.ranks
        retried = self._attempts.count_retries()
        if retried is None or not self._enabled or not self._host.recovers_together:  # else other ranks do not know
            return False
        tokens = int(ranks.largest(retried))
        if tokens == 0 or self._batch_dependent_module() is not None:
            return False  # there is nothing to cut
        self._attempts.lower_for_retries(tokens, unit=self._unit, device=device, advice=allocator_advice(device))
        return True

    def _why_not(self, micro_batch: MicroBatch) -> str:
        what = f"out of memory in a forward or backward of {self._describe(micro_batch)}"
        if self._is_updated:
            return (
                f"{what}, after its backward had updated parameters, as optimizer_in_bwd=True has it, so that it "
                f"cannot run again; resume from the last checkpoint, with a batch_size below "
                f"{self._host.loader.batch_size}, or {remedy(self._host)}"
            )
        if not self._enabled:
            return f"{what}; set adaptive_batching.recover_from_oom=True to run it in smaller parts"
        if self._host.why_no_recovery:
            return (
                f"{what}; it cannot run in smaller parts: {self._host.why_no_recovery}. Set a smaller "
                f"{self._batch_size}, or {remedy(self._host)}"
            )
        held = ""
        if self._host.steps_in_backward and self._limit.max_tokens is not None:
            held = f" on top of {size_of_gradients(self._host)} of gradients, which a batch in parts has to hold"
        sample = micro_batch.samples[0]
        tokens = self._host.objective.tokens(sample)
        start = [int(token) for token in tokens[:12]]
        return (
            f"out of memory with a single sample, or pack, of {len(tokens)} tokens{held}: number {index_of(sample)} of "
            f"{self._dataset} (the first is 0), which begins with the tokens {start}. Set tokenizer.max_seq_len below "
            f"{len(tokens)}, or {remedy(self._host)}"
        )

    def _describe(self, micro_batch: MicroBatch) -> str:
        samples = micro_batch.samples
        plural = "s" if len(samples) > 1 else ""
        longest = max(len(self._host.objective.tokens(sample)) for sample in samples)
        return f"{len(samples)} sample{plural} of up to {longest} tokens"

    def _unit_of(self, micro_batch: MicroBatch) -> str:
        return "padded tokens" if self._host.objective.is_text(micro_batch.samples[0]) else "samples"


def size_of_gradients(host: Host) -> str:
    num_bytes = sum(parameter.nbytes for parameter in host.model.parameters() if parameter.requires_grad)
    return f"{num_bytes / 2**20:,.0f} MiB"


def remedy(host: Host) -> str:
    """Return the next setting that saves memory, and what says before the next run whether it saves enough."""
    return f"{_next_setting(host)}; 'adaptive-batching plan', with the config and overrides of this run, says what fits"


def _next_setting(host: Host) -> str:
    if not host.checkpoints_activations:
        return "enable_activation_checkpointing=True"
    ways = host.objective.saves_memory_by
    can_offload = "offloading" in ways and host.device.type == "cuda"  # elsewhere stock refuses to
    if can_offload and not host.offloads_activations:
        return "enable_activation_offloading=True"
    if "lora" not in ways:
        return "a smaller model"
    return "a model with quantized weights, as in QLoRA"
