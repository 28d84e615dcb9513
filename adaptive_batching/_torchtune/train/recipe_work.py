"""The models of a recipe, as what runs them in parts sees them: how one part runs, and words for messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._ranks.fsdp import MicroBatchCollectives
from adaptive_batching._state import State
from adaptive_batching._step.data_parallel import DataParallel
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.runner import Outcome, StepRunner
from adaptive_batching._step.split import padded_tokens
from adaptive_batching._step.work import R, Samples, Work
from adaptive_batching._torchtune.stock.compiling import compiles_each_size
from adaptive_batching._torchtune.stock.data import Sample, index_of
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.less_memory import remedy
from adaptive_batching._torchtune.stock.objective import Batch, Objective, Sums
from adaptive_batching._torchtune.train.gradients import forward_backward, held_back
from adaptive_batching._torchtune.train.splitting import MicroBatch


class RecipeWork(Work[Samples, MicroBatch, R]):
    """The models of a recipe, as far as any work of it has to do with them.

    ``find_batch_dependent_module`` names a module that computes over the batch, or returns None.
    """

    dataset = "the dataset"
    batch_key = "batch_size"

    def __init__(self, host: Host, find_batch_dependent_module: Callable[[], str | None] = lambda: None) -> None:
        self.device, self.state, self.limit = host.device, State(host.models), TokenLimit()
        self._host = host
        self._find_batch_dependent_module = find_batch_dependent_module

    def begin(self) -> None:
        if self._host.backward_optimizers is not None:
            self._host.backward_optimizers.updated = False

    def parameters(self) -> list[nn.Parameter]:
        return list(self._host.model.parameters())

    def forget(self) -> None:
        self._host.objective.forget()

    def put_back(self) -> None:
        self._host.objective.equalize_collectives()

    def num_retries(self) -> int:
        return 0  # to read it takes time

    def why_final(self, part: MicroBatch) -> str | None:
        if self._host.backward_optimizers is None or not self._host.backward_optimizers.updated:
            return None
        return (
            f"out of memory in a forward or backward of {self.describe(part)}, after its backward had updated "
            f"parameters (optimizer_in_bwd=True), so it cannot run again; resume from the last checkpoint, with a "
            f"batch_size below {self._host.loader.batch_size}, or {self.less_memory()}"
        )

    def batch_dependent_module(self, most_tokens: int | None = None) -> str | None:
        return self._find_batch_dependent_module()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Turn running out of memory inside, in the optimizer, into an error that says what it means."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFitError(
                "out of memory in the optimizer's step, which may have updated only some parameters; resume from the "
                "last checkpoint, with use_maximum_batch_size=True, or a batch_size below "
                f"{self._host.loader.batch_size}, or {self.less_memory()}"
            ) from error

    def tokens(self, samples: list[Sample]) -> int:
        return padded_tokens([self._host.objective.size(sample) for sample in samples])

    def length(self, sample: Sample) -> int:
        return self._host.objective.size(sample)  # tokens of a rollout are on the device

    def extent(self, sample: Sample) -> int:
        return len(self._host.objective.tokens(sample))

    def describe(self, part: MicroBatch) -> str:
        # By the text of samples with images as well, whose length is 1.
        plural = "s" if len(part.samples) > 1 else ""
        longest = max(len(self._host.objective.tokens(sample)) for sample in part.samples)
        return f"{len(part.samples)} sample{plural} of up to {longest} tokens"

    def name_of_longest(self, part: MicroBatch) -> str:
        number = index_of(max(part.samples, key=lambda sample: len(self._host.objective.tokens(sample))))
        return "" if number is None else f"number {number} of {self.dataset} (the first is 0)"

    def unit(self, part: MicroBatch) -> str:
        if not self._host.objective.is_text(part.samples[0]):
            return "samples"
        return "tokens" if part.is_row else "padded tokens"

    def shorter(self, part: MicroBatch) -> str:
        sample = part.samples[0]
        tokens = self._host.objective.tokens(sample)
        start = [int(token) for token in tokens[:12]]
        return (
            f": number {index_of(sample)} of {self.dataset} (the first is 0), which begins with the tokens "
            f"{start}. Set tokenizer.max_seq_len below {len(tokens)}, or {self.less_memory()}"
        )

    def smaller_batch(self) -> str:
        return f"set a smaller {self.batch_key}"

    def smaller_parts(self) -> str:
        return "set a smaller batch_size or micro_batch_size"

    def less_memory(self) -> str:
        return remedy(self._host)


def batch_of(objective: Objective, part: MicroBatch) -> Batch:
    """Return the batch of a part's forward, on the host."""
    return objective.lay(part.samples) if part.is_row else objective.collate(part.samples)


def runs_of(
    host: Host,
    parts: Sequence[MicroBatch],
    around: Callable[[MicroBatch], contextlib.AbstractContextManager[Any]] = lambda _: contextlib.nullcontext(),
) -> list[Callable[[], Sums]]:
    """Return what runs forward and backward of each part, in a context of ``around``, and gives its sums.

    Nothing in between waits for the device: it computes while the next part is collated. Only the masks of flex
    attention are made on the device itself, which has to be waited for; so packs are collated before any of them runs.
    """
    collated: list[Batch] = []

    def run(part: MicroBatch, *, is_last: bool) -> Sums:
        if not collated:
            ahead = parts if compiles_each_size(host.loader.dataset) else [part]
            collated.extend(batch_of(host.objective, waiting) for waiting in ahead)
        batch = collated.pop(0)
        with around(part), held_back(host, is_last=is_last):
            sums = forward_backward(host, batch, part.weight)
        if is_last and len(parts) > 1 and host.backward_optimizers is not None:
            host.backward_optimizers.flush()
        if part.num_tokens is None:
            return sums
        return replace(sums, tokens=torch.full_like(sums.tokens, part.num_tokens))

    return [partial(run, part, is_last=number == len(parts)) for number, part in enumerate(parts, 1)]


def parallel_of(host: Host, collectives: MicroBatchCollectives | None = None) -> DataParallel:
    """Return how the ranks of a recipe train together; ``collectives`` are those of other runs than training's."""
    roots = host.models if host.ranks.size > 1 else []
    return DataParallel(
        host.ranks, lambda: list(host.model.parameters()), roots,
        collectives=host.collectives if collectives is None else collectives, why_alone=host.why_no_recovery,
    )  # fmt: skip


def run_once(host: Host, runs: Sequence[Callable[[], Sums]]) -> Outcome[Sums]:
    """Run parts up to the first that runs out of memory on any rank, as :meth:`StepRunner.run_once` does."""
    work = RecipeWork[Any, Sums](host)
    return StepRunner(work, parallel_of(host), recovers=False).run_once(runs)
