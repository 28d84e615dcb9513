"""The optimizer step of a ``Trainer``, in parts that fit: each runs its own forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from adaptive_batching._loop.samples import FORWARD_COST, SampleRetry, collated
from adaptive_batching._memory import num_allocation_retries, release_cached_memory
from adaptive_batching._probe.trial import parameters_of
from adaptive_batching._ranks.agree import ALONE, Ranks
from adaptive_batching._ranks.fsdp import end_forward
from adaptive_batching._snapshot import StepState
from adaptive_batching._step.audit import Audit
from adaptive_batching._step.data_parallel import DataParallel
from adaptive_batching._step.forward_cost import ForwardTimes
from adaptive_batching._step.run import Outcome
from adaptive_batching._step.split import Capacity, split_by_length, split_end_to_end
from adaptive_batching._transformers.handed_out import (
    Sample,
    StepInputs,
    alone,
    replaced,
)
from adaptive_batching._transformers.loss_kind import LossKind
from adaptive_batching._transformers.sharded import head_of, run_without_weight, sharded_models, short_with_targets
from adaptive_batching._values import ByLength, ConfigError, Fixed, SplitSize

Parts = list[list[Sample]]
Metrics = tuple[dict[str, list[float]], int]
"""What TRL counts in training, by its name, and the number of tokens."""

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
        dependent_module: The module that computes over the batch, if one does.
    """

    def __init__(
        self,
        trainer: Any,
        kind: LossKind,
        size: SplitSize,
        length: Callable[[Sample], int] | None,
        ranks: Ranks = ALONE,
        *,
        dependent_module: str | None = None,
        recovers: bool = True,
        audit_every: int | None = None,
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
        self._filler_state = StepState([trainer])
        self._gathered_first: list[FSDPModule] = []
        self._fillers: list[Sample] = []  # one, to run without weight where other ranks have more parts
        self._parallel = DataParallel(ranks, self._parameters, self.models)
        self.retry = SampleRetry[Sample](
            trainer.model, None, trainer.data_collator, length, ranks, owner=trainer, enabled=recovers
        )
        self.audit = Audit[Sample](
            self.retry.tokens, self.retry.state, [trainer], self._parameters, ranks,
            "leave micro_batch_size out, or train without adaptive", audit_every,
        )  # fmt: skip
        self.retry.dependent_module, self.retry.parts_add_up = dependent_module, dependent_module is None

    def check_that_parts_add_up(self) -> None:
        """Raise ConfigError if the model computes over the batch, so that it cannot be split."""
        if (module := self.retry.dependent_module) is not None:
            raise ConfigError(
                f"micro_batch_size={self.size} would change the result: {module} computes over the batch, so that its "
                f"parts do not add up to it; leave micro_batch_size out and set a smaller per_device_train_batch_size"
            )

    def __call__(self, inputs: StepInputs, forward_backward: ForwardBackward) -> torch.Tensor:
        """Leave the gradient of all samples in the parameters, and return their loss, without a graph.

        Raises:
            DoesNotFitError: If memory runs out and the samples cannot run in smaller parts.
        """
        self.audit.begin_step()
        self.retry.start_with([sample for batch in inputs.batches for sample in batch])
        saved = _metrics_of(self._trainer)
        batches: list[Any] = []

        def attempt(again: bool) -> Iterable[tuple[Parts, Outcome[torch.Tensor]]]:
            nonlocal batches
            parts = self._split(inputs.batches)
            self.audit.look(
                parts, self._fillers, partial(self._run_parts, forward_backward=forward_backward), again=again
            )
            batches = [collated(part, self._trainer.data_collator) for part in parts]
            numbers = [self.kind.count(*each) for each in zip(batches, map(len, parts), strict=True)]
            total = self._total(batches, numbers)  # a collate function that masks at random has other targets now
            runs = [
                partial(self._run, forward_backward, batch, number, total, len(parts))
                for batch, number in zip(batches, numbers, strict=True)
            ]
            fillers = [self._fillers] * self._parallel.num_fillers(len(parts))
            runs += [partial(self._run_filler, forward_backward)] * len(fillers)
            return [(parts + fillers, self.run(runs))]

        [(_, outcome)] = self.retry.run_until_fits(attempt)
        self.retry.end_step()
        self.audit.end_step()
        self._note(inputs, batches)
        self._parallel.sum_gradients(1 / self._ranks.size)
        self._share_metrics(saved)
        return torch.stack(outcome.results).sum()

    def _run_parts(self, parts: Sequence[list[Sample]], forward_backward: ForwardBackward) -> bool:
        """Run parts as those of a batch of their own; return False if memory runs out on any rank."""
        batches = [collated(part, self._trainer.data_collator) for part in parts]
        numbers = [self.kind.count(*each) for each in zip(batches, map(len, parts), strict=True)]
        runs = [
            partial(self._run, forward_backward, batch, number, sum(numbers), len(parts))
            for batch, number in zip(batches, numbers, strict=True)
        ]
        return not self.run(runs).failed

    def run(self, runs: Sequence[Callable[[], torch.Tensor]]) -> Outcome[torch.Tensor]:
        """Run forwards and backwards, up to the first that runs out of memory; the outcome is that of all ranks."""
        count_retries = partial(num_allocation_retries, self._trainer.args.device)
        with alone(self._trainer):
            return self._parallel.run([partial(self._run_alike, each) for each in runs], self._discard, count_retries)

    def get_ready(self, samples: Sequence[Sample]) -> None:
        """Find out if ``samples`` are padded, what a sharded model communicates in a forward, and if gradients add up.

        Raises:
            ConfigError: If there are other collectives than FSDP's, or gradients of parts do not add up.
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
        if isinstance(self.size, (Fixed, ByLength)) and len(samples) > 1 and self.retry.dependent_module is None:
            by_length = sorted(samples, key=lambda sample: self.retry.tokens([sample]))
            two = by_length[len(samples) // 2 :][:1], by_length[:1]
            in_training = partial(trainer.forward_backward, trainer.model)
            self.audit.compare(*two, partial(self._run_parts, forward_backward=in_training))

    def _run_alike(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        for unit in self._gathered_first:
            unit.unshard()
        loss = run()
        end_forward(self.models[1:])  # so that the next part gathers them again
        return loss

    def _run_filler(self, forward_backward: ForwardBackward) -> torch.Tensor:
        batch = collated(self._fillers, self._trainer.data_collator)
        number = self.kind.count(batch, 1) if self.kind.takes_number else None
        self._trainer.current_gradient_accumulation_steps = 1
        self._filler_state.save()
        loss = run_without_weight(self._trainer, partial(forward_backward, batch, number))
        self._filler_state.end(put_back=True)
        return loss

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
        share = float(number) / float(total) if total != 0 else 1.0
        trainer.current_gradient_accumulation_steps = 1 / (share * self.kind.factor)
        return forward_backward(batch, None)

    def _discard(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None
        release_cached_memory(self._trainer.args.device)

    def _parameters(self) -> list[torch.nn.Parameter]:
        optimizer = self._trainer.optimizer  # which is made when training begins
        return parameters_of(self._trainer.model, [] if optimizer is None else [optimizer])

    def _note(self, inputs: StepInputs, batches: list[Any]) -> None:
        name = getattr(self._trainer.model, "main_input_name", "input_ids")
        padded = sum(batch[name].numel() for batch in batches if name in batch)
        masks = [batch["attention_mask"] for batch in batches if "attention_mask" in batch]
        inputs.note(name, int(sum(mask.sum() for mask in masks)) if masks else padded, padded, len(batches))

    def _share_metrics(self, saved: Metrics | None) -> None:
        """Make what TRL has counted in this step that of all ranks.

        TRL itself gathers in every forward, where a rank that ran out of memory would keep the others waiting.
        """
        if self._ranks.size == 1 or saved is None:
            return
        before, tokens_before = saved
        metrics = self._trainer._metrics["train"]
        new = {key: values[len(before.get(key, ())) :] for key, values in metrics.items() if key != "num_tokens"}
        here = {key: sum(values) / len(values) for key, values in new.items() if values}
        tokens = self._trainer._total_train_tokens - tokens_before
        found, counts = zip(*self._ranks.gather((here, tokens)), strict=True)
        for key in here:
            known = [each[key] for each in found if key in each]
            metrics[key] = [*before.get(key, ()), sum(known) / len(known)]
        self._trainer._total_train_tokens = tokens_before + sum(counts)
        metrics["num_tokens"] = [self._trainer._total_train_tokens]


def _metrics_of(trainer: Any) -> Metrics | None:
    """Return what TRL has counted in training so far; None for other trainers."""
    if not hasattr(trainer, "_metrics"):
        return None
    return {key: list(values) for key, values in trainer._metrics["train"].items()}, trainer._total_train_tokens


def _is_one_row(batch: Mapping[str, Any], num_samples: int) -> bool:
    """Return True if a collate function has laid the samples of a batch end to end."""
    ids = batch.get("input_ids")
    return isinstance(ids, torch.Tensor) and ids.dim() == 2 and len(ids) == 1 < num_samples
