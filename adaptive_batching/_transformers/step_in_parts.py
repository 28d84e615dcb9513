"""The optimizer step of a ``Trainer``, in parts that fit: each runs its own forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from adaptive_batching._loop.data_parallel import DataParallel
from adaptive_batching._loop.samples import FORWARD_COST, SampleRetry, collated
from adaptive_batching._memory import num_allocation_retries, release_cached_memory
from adaptive_batching._micro_batches.forward_cost import ForwardTimes
from adaptive_batching._micro_batches.run import Outcome
from adaptive_batching._micro_batches.split import Capacity, split_by_length, split_end_to_end
from adaptive_batching._probe.trial import parameters_of
from adaptive_batching._ranks.agree import ALONE, Ranks
from adaptive_batching._ranks.fsdp import end_forward
from adaptive_batching._transformers.handed_out import (
    Sample,
    StepInputs,
    alone,
    counters_of,
    put_back_counters,
    replaced,
)
from adaptive_batching._transformers.loss_kind import LossKind, losses_of
from adaptive_batching._transformers.sharded import head_of, run_without_weight, sharded_models, short_with_targets
from adaptive_batching._values import ByLength, ConfigError, Fixed, SplitSize

Parts = list[list[Sample]]
ForwardBackward = Callable[[Any, Any], torch.Tensor]
"""(batch, num_items_in_batch) -> the loss; what ``training_step`` of a trainer does."""


class StepInParts:
    """Runs forward and backward of all samples of an optimizer step, in parts, and again in smaller ones if need be.

    The gradient is that of the loss over all samples, as ``Trainer`` defines it, however they are split. With DDP, no
    part communicates with other ranks: when all have run everywhere, gradients are summed once.

    Args:
        trainer: Has the model, the collate function and the loss.
        kind: What the loss is.
        size: How a step is split.
        length: Tokens of a sample; None if unknown.
        ranks: That train together.
    """

    def __init__(
        self,
        trainer: Any,
        kind: LossKind,
        size: SplitSize,
        length: Callable[[Sample], int] | None,
        ranks: Ranks = ALONE,
        *,
        recovers: bool = True,
    ) -> None:
        self.max_tokens: int | None = None
        self.kind = kind
        """How the losses of parts make up that of a step."""

        self.times = ForwardTimes()
        """Of forwards and backwards of a probe."""

        self.forward_cost: float = FORWARD_COST
        """Tokens that take as long to compute as a forward takes on top."""

        self.models = sharded_models(trainer)
        """Models that are sharded."""

        self.size = size
        self._trainer, self._ranks = trainer, ranks
        self._gathered_first: list[FSDPModule] = []
        self._fillers: list[Sample] = []  # one, to run without weight where other ranks have more parts
        self._parallel = DataParallel(ranks, self._parameters, self.models)
        self.retry = SampleRetry[Sample](
            trainer.model, losses_of(trainer, kind), self._with_number, length, ranks, enabled=recovers
        )

    def check_that_parts_add_up(self, samples: Sequence[Sample]) -> None:
        """Raise ConfigError if the model computes over a batch, such as one of these samples."""
        self.retry.start_with(list(samples))
        saved = counters_of(self._trainer)
        with alone(self._trainer):
            module = self.retry.batch_dependent_module()
        put_back_counters(self._trainer, saved)
        if module is not None:
            raise ConfigError(
                f"micro_batch_size={self.size} would change the result: {module} computes over the batch, so that its "
                f"parts do not add up to it; leave micro_batch_size out and set a smaller per_device_train_batch_size"
            )

    def __call__(self, inputs: StepInputs, forward_backward: ForwardBackward) -> torch.Tensor:
        """Leave the gradient of all samples in the parameters, and return their loss, without a graph.

        Raises:
            DoesNotFitError: If memory runs out and the samples cannot run in smaller parts.
        """
        self.retry.start_with([sample for batch in inputs.batches for sample in batch])
        saved = counters_of(self._trainer)
        total: Any = None
        batches: list[Any] = []

        def attempt(again: bool) -> Iterable[tuple[Parts, Outcome[torch.Tensor]]]:
            nonlocal total, batches
            if again:
                put_back_counters(self._trainer, saved)
            parts = self._split(inputs.batches)
            batches = [collated(part, self._trainer.data_collator) for part in parts]
            numbers = [self.kind.count(*each) for each in zip(batches, map(len, parts), strict=True)]
            if total is None:  # alike however samples are split; the ranks ask each other for it
                total = self._total(batches, numbers)
            runs = [
                partial(self._run, forward_backward, batch, number, total, len(parts))
                for batch, number in zip(batches, numbers, strict=True)
            ]
            fillers = [self._fillers] * self._parallel.num_fillers(len(parts))
            runs += [partial(self._run_filler, forward_backward)] * len(fillers)
            return [(parts + fillers, self.run(runs))]

        [(_, outcome)] = self.retry.run_until_fits(attempt)
        self.retry.end_step()
        self._note(inputs, batches)
        self._parallel.sum_gradients(1 / self._ranks.size)
        self._share_metrics(saved)
        return torch.stack(outcome.results).sum()

    def run(self, runs: Sequence[Callable[[], torch.Tensor]]) -> Outcome[torch.Tensor]:
        """Run forwards and backwards, up to the first that runs out of memory; the outcome is that of all ranks."""
        count_retries = partial(num_allocation_retries, self._trainer.args.device)
        with alone(self._trainer):
            return self._parallel.run([partial(self._run_alike, each) for each in runs], self._discard, count_retries)

    def get_ready(self, samples: Sequence[Sample]) -> None:
        """Find out if ``samples`` are padded, and what a sharded model communicates in a forward of a short one.

        Raises:
            ConfigError: If that is more than FSDP does.
            DoesNotFitError: If memory runs out.
        """
        trainer = self._trainer
        self.retry.pads = not _is_one_row(collated(samples[:2], trainer.data_collator), len(samples[:2]))
        self._fillers = [short_with_targets(trainer, self.kind, samples)]
        end_forward(self.models)
        forward_backward = partial(self._run_filler, partial(trainer.forward_backward, trainer.model))
        record = partial(self._parallel.record, partial(self._run_alike, forward_backward), trainer.args.device)
        with alone(trainer):
            try:
                record()
            except ConfigError:
                self._gathered_first = head_of(trainer.model)
                if not self._gathered_first:
                    raise
                record()

    def _run_alike(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        for unit in self._gathered_first:
            unit.unshard()
        loss = run()
        end_forward(self.models[1:])  # so that the next part gathers them again
        return loss

    def _run_filler(self, forward_backward: ForwardBackward) -> torch.Tensor:
        batch = collated(self._fillers, self._trainer.data_collator)
        number = self.kind.count(batch, 1) if self.kind.takes_number else None
        return run_without_weight(self._trainer, partial(forward_backward, batch, number))

    def _with_number(self, samples: list[Sample]) -> tuple[Any, int]:
        return self._trainer.data_collator(samples), len(samples)

    def _split(self, batches: Sequence[list[Sample]]) -> Parts:
        """Return the samples in parts that are expected to fit."""
        limit = self.retry.limit.max_tokens
        samples = [sample for batch in batches for sample in batch]
        if isinstance(self.size, ByLength):
            limits = [each for each in (self.max_tokens, limit) if each is not None]
            return self._by_length(samples, min(limits), min(self.forward_cost, *limits)) if limits else [samples]
        parts = list(batches)
        if isinstance(self.size, Fixed):
            count = self.size.samples
            parts = [samples[start : start + count] for start in range(0, len(samples), count)]
        if limit is None:
            return parts
        # A high cost keeps the number of parts low where the user has not asked for any.
        return [each for part in parts for each in self._within(part, limit)]

    def _within(self, part: list[Sample], limit: int) -> Parts:
        return [part] if self.retry.tokens(part) <= limit else self._by_length(part, limit, limit)

    def _by_length(self, samples: list[Sample], limit: int, forward_cost: float) -> Parts:
        lengths = [self.retry.tokens([sample]) for sample in samples]
        if self.retry.pads:
            split = split_by_length(lengths, Capacity.of_tokens(limit), forward_cost)
        else:
            split = split_end_to_end(lengths, limit)
        return [[samples[index] for index in part] for part in split]

    def _total(self, batches: list[Any], numbers: list[Any]) -> Any:
        if self.kind.takes_number:
            # The ranks ask each other on the host: one whose device is full would leave the others waiting.
            gather = lambda number: torch.tensor(self._ranks.gather(int(number)))  # noqa: E731
            with replaced(self._trainer.accelerator, gather=gather):
                return int(self._trainer._get_num_items_in_batch(batches, torch.device("cpu")))
        return sum(numbers)

    def _run(
        self, forward_backward: ForwardBackward, batch: Any, number: Any, total: Any, num_parts: int
    ) -> torch.Tensor:
        trainer = self._trainer
        if self.kind.takes_number:
            trainer.current_gradient_accumulation_steps = num_parts
            # Filled in on the device, which takes no wait, and may run out of memory as the part may.
            return forward_backward(batch, torch.full((), total, device=trainer.args.device))
        if number == 0 and total != 0:  # the mean of nothing is NaN
            if self.models:
                return self._run_filler(forward_backward)
            return torch.zeros((), device=trainer.args.device)
        # Trainer divides a mean by this: the share of a part in the batch is its number over that of all.
        trainer.current_gradient_accumulation_steps = float(total) / float(number) if total != 0 else 1
        return forward_backward(batch, None)

    def _discard(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None
        release_cached_memory(self._trainer.args.device)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return parameters_of(self._trainer.model, [self._trainer.optimizer])

    def _note(self, inputs: StepInputs, batches: list[Any]) -> None:
        name = getattr(self._trainer.model, "main_input_name", "input_ids")
        padded = sum(batch[name].numel() for batch in batches if name in batch)
        masks = [batch["attention_mask"] for batch in batches if "attention_mask" in batch]
        inputs.note(name, int(sum(mask.sum() for mask in masks)) if masks else padded, padded, len(batches))

    def _share_metrics(self, saved: Mapping[str, Any]) -> None:
        """Make what TRL has counted in this step that of all ranks.

        TRL itself gathers in every forward, where a rank that ran out of memory would keep the others waiting.
        """
        if self._ranks.size == 1 or "_metrics" not in saved:
            return
        metrics, before = self._trainer._metrics["train"], saved["_metrics"]["train"]
        new = {key: values[len(before.get(key, ())) :] for key, values in metrics.items() if key != "num_tokens"}
        here = {key: sum(values) / len(values) for key, values in new.items() if values}
        tokens = self._trainer._total_train_tokens - saved["_total_train_tokens"]
        found, counts = zip(*self._ranks.gather((here, tokens)), strict=True)
        for key in here:
            known = [each[key] for each in found if key in each]
            metrics[key] = [*before.get(key, ()), sum(known) / len(known)]
        self._trainer._total_train_tokens = saved["_total_train_tokens"] + sum(counts)
        metrics["num_tokens"] = [self._trainer._total_train_tokens]


def _is_one_row(batch: Mapping[str, Any], num_samples: int) -> bool:
    """Return True if a collate function has laid the samples of a batch end to end."""
    ids = batch.get("input_ids")
    return isinstance(ids, torch.Tensor) and ids.dim() == 2 and len(ids) == 1 < num_samples
