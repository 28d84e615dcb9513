"""Out of memory while training: run the same samples again, in smaller micro-batches."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from adaptive_batching._device import random_state, set_random_state
from adaptive_batching._micro_batches.limits import TokenLimit
from adaptive_batching._micro_batches.retry import Retry
from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._ranks.agree import ALONE
from adaptive_batching._torchtune.cutting import MicroBatch
from adaptive_batching._torchtune.data import index_of
from adaptive_batching._torchtune.host import Host

log = logging.getLogger(__name__)

CONSECUTIVE_RECOVERIES_TO_WARN = 3


class Recovery(Retry[MicroBatch]):
    """Lets the batches of an optimizer step run again after one ran out of memory, or if not ``recovers``, says how to.

    Nothing is lost or repeated: the gradients of the whole window are discarded, and random numbers start over.
    ``find_batch_dependent_module`` names a module that computes over the batch, or returns None. ``probed_tokens`` are
    padded, of the largest forward that the probe has seen to fit.
    """

    dataset = "the dataset"
    batch_key = "batch_size"

    def __init__(
        self,
        host: Host,
        limit: TokenLimit,
        find_batch_dependent_module: Callable[[], str | None],
        *,
        recovers: bool = True,
        probed_tokens: int = 0,
    ) -> None:
        together = host.recovers_together  # else a rank that fails does not know of the others, which wait elsewhere
        ranks = host.ranks if together else ALONE
        super().__init__(limit, host.device, ranks, enabled=recovers and together, largest_that_ran=probed_tokens)
        self._host = host
        self._find_batch_dependent_module = find_batch_dependent_module
        self._recovers = recovers
        self._random_state: dict[str, Any] = {}
        self._recovered_in_row = 0
        self._warned = False

    def start(self) -> None:
        super().start()
        if self._host.gate is not None:
            self._host.gate.updated = False
        if self._recovers:
            self._random_state = random_state(self._host.device)

    def end_step(self) -> None:
        super().end_step()
        self._recovered_in_row = self._recovered_in_row + 1 if self.failures else 0
        if self._recovered_in_row == CONSECUTIVE_RECOVERIES_TO_WARN and not self._warned:
            self._warned = True
            log.warning(
                "every step runs out of memory first: training crawls. Set a smaller batch_size or micro_batch_size, "
                "or %s", self.less_memory(),
            )  # fmt: skip

    @property
    def num_recoveries(self) -> int:
        return self.limit.num_recoveries

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
                f"{self._host.loader.batch_size}, or {self.less_memory()}"
            ) from error

    def size(self, part: MicroBatch) -> tuple[int, int]:
        return len(part.samples), part.tokens

    def describe(self, part: MicroBatch) -> str:
        plural = "s" if len(part.samples) > 1 else ""
        longest = max(len(self._host.objective.tokens(sample)) for sample in part.samples)
        return f"{len(part.samples)} sample{plural} of up to {longest} tokens"

    def unit(self, part: MicroBatch) -> str:
        return "padded tokens" if self._host.objective.is_text(part.samples[0]) else "samples"

    def shorter(self, part: MicroBatch) -> str:
        held = ""
        if self._host.steps_in_backward and self.limit.max_tokens is not None:
            held = f", on top of {size_of_gradients(self._host)} of gradients, which a batch in parts has to hold"
        sample = part.samples[0]
        tokens = self._host.objective.tokens(sample)
        start = [int(token) for token in tokens[:12]]
        return (
            f"{held}: number {index_of(sample)} of {self.dataset} (the first is 0), which begins with the tokens "
            f"{start}. Set tokenizer.max_seq_len below {len(tokens)}, or {self.less_memory()}"
        )

    def smaller_batch(self) -> str:
        return f"set a smaller {self.batch_key}"

    def less_memory(self) -> str:
        return remedy(self._host)

    def why_never(self, part: MicroBatch) -> str | None:
        what = f"out of memory in a forward or backward of {self.describe(part)}"
        if self._host.gate is not None and self._host.gate.updated:
            return (
                f"{what}, after its backward had updated parameters, as optimizer_in_bwd=True has it, so that it "
                f"cannot run again; resume from the last checkpoint, with a batch_size below "
                f"{self._host.loader.batch_size}, or {self.less_memory()}"
            )
        if not self._recovers:
            return f"{what}; set adaptive_batching.recover_from_oom=True to run it in smaller parts"
        if not self._host.recovers_together:
            return (
                f"{what}; it cannot run in smaller parts: {self._host.why_no_recovery}. {self.smaller_batch()}, or "
                f"{self.less_memory()}"
            )
        return None

    def batch_dependent_module(self) -> str | None:
        return self._find_batch_dependent_module()

    def price_of_parts(self) -> str:
        if not self._host.steps_in_backward:
            return ""
        return f", which holds {size_of_gradients(self._host)} of gradients until the last of them"

    def put_back(self) -> None:
        self._host.objective.equalize_collectives()
        set_random_state(self._random_state, self._host.device)


class ValidationRecovery(Recovery):
    what = "samples of dataset_val"
    dataset = "dataset_val"
    batch_key = "batch_size_val"


def size_of_gradients(host: Host) -> str:
    num_bytes = sum(parameter.nbytes for parameter in host.model.parameters() if parameter.requires_grad)
    return f"{num_bytes / 2**20:,.0f} MiB"


def remedy(host: Host) -> str:
    """Return the next setting that saves memory, and what says before the next run whether it saves enough."""
    ways = host.objective.saves_memory_by
    can_offload = "offloading" in ways and host.device.type == "cuda"  # elsewhere stock refuses to
    if not host.checkpoints_activations:
        setting = "enable_activation_checkpointing=True"
    elif can_offload and not host.offloads_activations:
        setting = "enable_activation_offloading=True"
    else:
        setting = "a model with quantized weights, as in QLoRA" if "lora" in ways else "a smaller model"
    return f"{setting}; 'adaptive-batching plan', with the config and overrides of this run, says what fits"
