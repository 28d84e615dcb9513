"""The optimizer step of a ``Trainer``, in parts that fit: each runs its own forward and backward."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from adaptive_batching import _state
from adaptive_batching._loop.samples import SampleWork, collated
from adaptive_batching._ranks.agree import ALONE, Ranks
from adaptive_batching._ranks.fsdp import end_forward
from adaptive_batching._state import State, parameters_of
from adaptive_batching._step.data_parallel import DataParallel
from adaptive_batching._step.failed_part import FailedPart
from adaptive_batching._step.forward_timer import ForwardTimer
from adaptive_batching._step.forward_times import ForwardTimes
from adaptive_batching._step.judge import Audit
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.row_size import RowSize, first_row
from adaptive_batching._step.runner import Outcome, StepRunner
from adaptive_batching._step.sharing import Sharing
from adaptive_batching._step.split import SplitRule, split_samples
from adaptive_batching._step.work import Part, in_halves
from adaptive_batching._transformers.declared import state_of, trl_metrics_of
from adaptive_batching._transformers.handed_out import (
    Sample,
    StepInputs,
    is_left_out,
    replaced,
    rows_of,
    unlogged,
    without_gathering,
)
from adaptive_batching._transformers.loss_kind import LossKind
from adaptive_batching._transformers.neftune import NeftuneNoise
from adaptive_batching._transformers.older_versions import scaling_loss_func
from adaptive_batching._transformers.row_of_samples import (
    NoRowError,
    Row,
    RowAttention,
    row_of,
)
from adaptive_batching._transformers.sharded import run_without_weight, sharded_models
from adaptive_batching._values import ByLength, ConfigError, Fixed, SplitSize

log = logging.getLogger(__name__)

Parts = list[list[Sample]]
ForwardBackward = Callable[[Any, Any], torch.Tensor]
"""(batch, num_items_in_batch) -> the loss; what ``training_step`` of a trainer does."""


@dataclass(frozen=True)
class CollatedPart(Part):
    """Samples that run as Trainer would run them, padded, where others run as rows."""


@dataclass(frozen=True)
class PartToRun:
    """A part whose samples are collated, on the host."""

    part: Part
    batch: Any
    row: Row | None
    """The row that the batch is laid out in; None if it is padded."""

    number: Any
    """The number of its losses."""


class StepInParts(SampleWork[Sample, Sequence[list[Sample]], Part, torch.Tensor]):
    """Runs forward and backward of all samples of an optimizer step, in parts, and again in smaller ones if need be.

    The gradient is that of the loss over all samples, as ``Trainer`` defines it, however they are split. With DDP, no
    part communicates with other ranks: when all have run everywhere, gradients are summed once.

    Args:
        trainer: Has the model, the collate function and the loss.
        kind: What the loss is.
        size: How a step is split.
        length: Tokens of a sample; None if unknown.
        ranks: That train together.
        state: What a step may change.
        padding: True to pad samples whatever the model; False to lay them end to end where it honours that.
        balances_ranks: True to have ranks share out the samples of a step, where these are split by length.
        joins_batches: True to have samples of several batches of a step share a forward.
        dependent_module: The module that computes over the batch, if one does.
        recovers: False to let nothing run again.
        audit_every: Steps from one audit to the next; None for powers of ten.
    """

    def __init__(
        self,
        trainer: Any,
        kind: LossKind,
        size: SplitSize,
        length: Callable[[Sample], int] | None,
        ranks: Ranks = ALONE,
        *,
        state: State,
        padding: bool = True,
        balances_ranks: bool = False,
        joins_batches: bool = True,
        dependent_module: str | None = None,
        recovers: bool = True,
        audit_every: int | None = None,
    ) -> None:
        super().__init__(trainer.args.device, lambda samples: trainer.data_collator(samples), length, state)
        self.kind = kind
        """How the losses of parts make up that of a step."""

        self.times = ForwardTimes()
        """Of forwards and backwards of a probe."""

        self.models = sharded_models(trainer)
        """Models that are sharded."""

        self.size = size
        self.limit = TokenLimit()
        """The limit on the tokens of a part."""

        self._metrics = trl_metrics_of(trainer)
        noise = NeftuneNoise(trainer.model)
        self.noise = noise if noise else None
        """NEFTune's, if the trainer adds any."""

        self._batches: Sequence[list[Sample]] = []  # of the step
        self.joins_batches = joins_batches and self.noise is None
        """True if samples of several batches may run together."""

        self.trainer, self._dependent_module = trainer, dependent_module
        self._of_batches: list[Parts] = []  # how each batch of the step is split, where they do not join
        self.may_be_rows = isinstance(size, ByLength) and not padding
        """True to lay samples end to end if the model computes the same."""

        self.in_rows = False
        """True if samples are laid end to end here, and attention stays within each."""

        self.sharing: Sharing | None = None
        """How the samples of a step are shared out among ranks; None if each keeps its own."""

        if balances_ranks and self.joins_batches and ranks.size > 1 and isinstance(size, ByLength) and length:
            self.sharing = Sharing(ranks, trainer.model, waits=bool(self.models))
        self._num_drawn: int | None = None  # what this rank would divide a mean by, in a step that is shared out
        self.label: str | None = None
        """The field of a sample that is its only target, if one is."""

        self._has_warned = False  # that some samples do not make a row
        self._row_size = RowSize(first_row(trainer.args.device.type))
        self._timer: ForwardTimer[Part] = ForwardTimer(trainer.args.device, self._observe)
        self.targets: tuple[str, ...] = ()
        """Keys of what belongs to the prediction from the token before, of rows."""

        self._attention = RowAttention(trainer.model)
        self._filler_state = state_of(trainer)
        self.gathered_first: list[FSDPModule] = []
        """Units of a sharded model that are gathered before each part."""

        self.filler_samples: list[Sample] = []
        """One, to run without weight where other ranks have more parts."""

        self._to_run: list[PartToRun] = []
        self.parallel = DataParallel(ranks, self.parameters, self.models)
        remedy = "leave micro_batch_size out, or train without adaptive"
        # Batches over which something computes do not add up to their union, nor are they asked to.
        audit = Audit(self, ranks, remedy, audit_every) if dependent_module is None else None
        self.runner = StepRunner(self, self.parallel, audit=audit, recovers=recovers)

    def check_that_parts_add_up(self) -> None:
        """Raise ConfigError if the model computes over the batch, so that it cannot be split."""
        if (module := self._dependent_module) is not None:
            raise ConfigError(
                f"micro_batch_size={self.size} would change the result: {module} computes over the batch, so that its "
                f"parts do not add up to it; leave micro_batch_size out and set a smaller per_device_train_batch_size"
            )

    def __call__(self, inputs: StepInputs, forward_backward: ForwardBackward) -> torch.Tensor:
        """Leave the gradient of all samples in the parameters, and return their loss, without a graph.

        Raises:
            DoesNotFitError: If memory runs out and the samples cannot run in smaller parts.
        """
        self._batches, self.forward_backward = inputs.batches, forward_backward
        self.samples = [sample for batch in inputs.batches for sample in batch]
        if self._metrics is not None:
            self._metrics.begin_step()
        if self.models:
            end_forward(self.models)  # of an evaluation, which leaves parameters gathered
        self._timer.read()  # of the step before
        if self.in_rows:
            self._row_size.begin_step(self.parallel.ranks.gather)
        losses = [loss for _, loss in self.runner.step(inputs.batches)]
        self._note(inputs)
        self.parallel.sum_gradients(1 / self.parallel.ranks.size)
        if self._metrics is not None:
            ranks, takes_number = self.parallel.ranks, self.kind.takes_number
            batches = [each.batch for each in self._to_run]
            numbers = [float(each.number) for each in self._to_run]
            self._metrics.end_step(batches, numbers, ranks, takes_number=takes_number)
        self._to_run = []
        return torch.stack(losses).sum()

    def run(self, runs: Sequence[Callable[[], torch.Tensor]]) -> Outcome[torch.Tensor]:
        """Run forwards and backwards, up to the first that runs out of memory; the outcome is that of all ranks."""
        end_forward(self.models)
        return self.runner.run_once([partial(self.run_alike, run) for run in runs])

    # Rows

    def row(self, samples: Sequence[Sample]) -> tuple[Any, Row | None]:
        """Return samples as a batch, None if all of them are left out, and as a row if they are laid end to end."""
        batch = self._collated(samples)
        if not self.in_rows or batch is None:
            return batch, None
        try:
            row = self.row_of_batch(batch, self.targets)
        except NoRowError as error:  # which those that were looked at are not
            if not self._has_warned:
                log.warning("some samples are padded: %s", error)
            self._has_warned = True
            return batch, None
        return row.counted, row

    def _collated(self, samples: Sequence[Sample]) -> Any:
        try:
            batch = collated(samples, self.collate)
        except Exception:
            if not is_left_out(samples, self.filler_samples, self.collate):
                raise
            return None
        return batch if rows_of(batch) else None

    def row_of_batch(self, batch: Any, targets: Sequence[str]) -> Row:
        return row_of(batch, targets, self.kind.no_target)

    def cut_again(self, row: Row, shortest: int) -> Row:
        """Return a row whose last sample is several, for a probe."""
        return row.cut_again(shortest, self.targets)

    def split(self, samples: Sequence[list[Sample]]) -> Iterator[list[Part]]:
        """Yield the batches of a step in parts that are expected to fit."""
        lists = None if self.sharing is None else self._shared(samples, self.sharing)
        if lists is None:
            together = list(samples)
            if self.joins_batches and isinstance(self.size, (Fixed, ByLength)):
                together = [[sample for batch in samples for sample in batch]]
            rule = SplitRule(by_length=isinstance(self.size, ByLength))
            if isinstance(self.size, Fixed):
                rule = SplitRule(self.size.samples, is_even=False)
            self._of_batches = []
            for batch in together:
                split = split_samples(self.lengths(batch), rule, self._most_tokens(batch), pads=self.pads)
                self._of_batches.append([list(map(batch.__getitem__, part)) for part in split])
            lists = [part for parts in self._of_batches for part in parts]
        yield [self._part(each) if each else self.filler() for each in lists]

    def _part(self, samples: list[Sample]) -> Part:
        tokens, longest = self.tokens_and_longest(samples)
        return Part(samples, tokens, longest=longest)

    def as_batch(self, lists: Sequence[list[Sample]]) -> list[Part]:
        if len(lists) == 1:  # what parts are compared with
            return [CollatedPart(lists[0], self.tokens_in_one(lists[0]))]
        return [self._part(samples) for samples in lists]

    @property
    def rearranges(self) -> bool:  # type: ignore[override]
        return self.in_rows or not self.joins_batches

    def compared(self, parts: Sequence[Part]) -> list[list[Sample]]:
        lists = super().compared(parts) if self.joins_batches else max(self._of_batches, key=len)
        if self.in_rows and len(lists) == 1:  # a row is another computation than the batch that it is made of
            return in_halves(sorted(lists[0], key=lambda sample: self.tokens([sample])))
        return lists

    def tokens_in_one(self, samples: list[Sample]) -> int:
        return len(samples) * max(self.lengths(samples))

    def _shared(self, batches: Sequence[list[Sample]], sharing: Sharing) -> Parts | None:
        """Return what this rank computes of a step that is shared out; None if each rank keeps its samples."""
        samples = [sample for batch in batches for sample in batch]
        weight = self._weight_of_sample(samples)
        parts = sharing.parts(samples, self.lengths(samples), weight, self._most_tokens(samples), pads=self.pads)
        self._num_drawn = None if parts is None else weight
        return parts

    def _weight_of_sample(self, samples: list[Sample]) -> int | None:
        """Return what has to be alike on all ranks for a sample to weigh as much on each; None if nothing will do.

        Trainer divides the sum over ranks by the targets of all of them, or else takes the mean of their means.
        """
        if self.kind.takes_number:
            return 1 if self.trainer.args.average_tokens_across_devices else None
        if self.kind.of == "samples":
            return len(samples)
        if self.label is None:
            return None
        return sum(operator.index(sample[self.label]) != self.kind.ignored for sample in samples)

    def filler(self) -> Part:
        return replace(self._part(self.filler_samples), weight=0)

    def runs(self, parts: Sequence[Part]) -> list[Callable[[], torch.Tensor]]:
        weighted = [part for part in parts if not part.is_filler]
        self._to_run = to_run = []
        for part in weighted:
            is_row = not isinstance(part, CollatedPart)
            batch, row = self.row(part.samples) if is_row else (self._collated(part.samples), None)
            if batch is not None:
                to_run.append(PartToRun(part, batch, row, self.kind.count(batch, len(part.samples))))
        counts = [each.number for each in to_run]
        total = self._total(counts)  # a collate function that masks at random has other targets now
        noise = [1.0] * len(to_run) if self.noise is None else self._noise_of(self.noise, to_run)
        runs: list[Callable[[], torch.Tensor]] = [
            partial(self._run_part, each, total, len(to_run), factor)
            for each, factor in zip(to_run, noise, strict=True)
        ]
        given = sum(len(part.samples) for part in weighted)
        if self._num_drawn is not None and self.kind.rows and sum(counts) != given:
            runs[:1] = [self._refuse_to_leave_out]  # within a run, whose error other ranks are told
        runs += [self._run_nothing] * (len(weighted) - len(to_run))
        runs += [self.run_filler] * (len(parts) - len(weighted))
        return [partial(self.run_alike, run) for run in runs]

    def _run_nothing(self) -> torch.Tensor:
        return self.run_filler() if self.models else torch.zeros((), device=self.trainer.args.device)

    def _refuse_to_leave_out(self) -> torch.Tensor:
        raise ConfigError(
            "data_collator leaves out samples, by whose number the loss is a mean, while samples are balanced over "
            "devices; leave them out of train_dataset, or set balance_ranks=False"
        )

    def run_alike(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        for unit in self.gathered_first:
            unit.unshard()
        with without_gathering(self.trainer):
            loss = run()
        if self.models:
            end_forward(self.models[1:])  # so that the next part gathers them again
        return loss

    def run_filler(self) -> torch.Tensor:
        batch, row = self.row(self.filler_samples)
        number = self.kind.count(batch, 1) if self.kind.takes_number else None
        self.trainer.current_gradient_accumulation_steps = 1
        self._filler_state.save()
        inputs = batch if row is None else row.inputs
        around = contextlib.nullcontext() if row is None else self._attention.within(row.bounds)
        with around, unlogged(self.trainer):
            loss = run_without_weight(self.trainer, partial(self.forward_backward, inputs, number))
        self._filler_state.end(put_back=True)
        return loss

    def _most_tokens(self, samples: list[Sample]) -> int | None:
        """Return the most tokens of a part of samples that run together."""
        limit = self.limit.max_tokens
        if limit is None or not self.in_rows:
            return limit
        return self._row_size.tokens(self.tokens(samples), limit)

    def _total(self, counts: list[Any]) -> Any:
        if self.kind.takes_number:
            # The ranks ask each other on the host: one whose device is full would leave the others waiting.
            gather = lambda number: torch.tensor(self.parallel.ranks.gather(int(number)))  # noqa: E731
            with replaced(self.trainer.accelerator, gather=gather):
                batches = [each.batch for each in self._to_run]
                return int(self.trainer._get_num_items_in_batch(batches, torch.device("cpu")))
        return sum(counts) if self._num_drawn is None else self._num_drawn

    def _noise_of(self, noise: NeftuneNoise, to_run: Sequence[PartToRun]) -> list[float]:
        """Return what the noise of each part is multiplied by, so that it is that of its batch."""
        batch_of = {id(sample): number for number, batch in enumerate(self._batches) for sample in batch}
        name = getattr(self.trainer.model, "main_input_name", "input_ids")
        lengths = [float(each.batch[name].shape[-1]) if name in each.batch else 1.0 for each in to_run]
        batches = [batch_of.get(id(each.part.samples[0]), -1) for each in to_run]
        return noise.factors(lengths, batches, pads=self.pads)

    def _run_part(self, to_run: PartToRun, total: Any, num_parts: int, noise: float) -> torch.Tensor:
        with contextlib.ExitStack() as around:
            if self.noise is not None:
                around.enter_context(self.noise.times(noise))
            if to_run.row is not None:
                around.enter_context(self._attention.within(to_run.row.bounds))
            if isinstance(self.size, ByLength) and not _state.rehearsing:  # as in an audit
                around.enter_context(self._timer.around(to_run.part))
            inputs = to_run.batch if to_run.row is None else dict(to_run.row.inputs)
            return self.run_inputs(inputs, to_run.number, total, num_parts)

    def _observe(self, part: Part, seconds: float) -> None:
        if self.in_rows:
            self._row_size.observe(part.tokens, seconds)
        if self.sharing is not None:
            self.sharing.observe(self.lengths(part.samples), seconds, pads=self.pads)

    def put_back(self) -> None:
        self._timer.forget()

    def run_inputs(self, batch: Any, number: Any, total: Any, num_parts: int) -> torch.Tensor:
        trainer = self.trainer
        if self.kind.takes_number:
            trainer.current_gradient_accumulation_steps = num_parts
            # Filled in on the device, which takes no wait, and may run out of memory as the part may.
            return self.forward_backward(batch, torch.full((), total, device=trainer.args.device))
        if number == 0 and total != 0:  # the mean of nothing is NaN
            return self._run_nothing()
        # Trainer divides a mean by this: the share of a part in the batch is its number over that of all.
        share = float(number) / float(total) if total != 0 else 1.0
        weight = share * self.kind.factor
        trainer.current_gradient_accumulation_steps = 1 / weight
        with scaling_loss_func(trainer, weight):
            return self.forward_backward(batch, None)

    def parameters(self) -> list[torch.nn.Parameter]:
        optimizer = self.trainer.optimizer  # which is made when training begins
        return parameters_of(self.trainer.model, [] if optimizer is None else [optimizer])

    def _note(self, inputs: StepInputs) -> None:
        name = getattr(self.trainer.model, "main_input_name", "input_ids")
        tokens = padded = 0
        dimensions = set[int]()
        for each in self._to_run:
            batch = each.batch if each.row is None else each.row.inputs
            padded += batch[name].numel() if name in batch else 0
            if (mask := batch.get("attention_mask")) is not None:
                dimensions.add(mask.dim())
                tokens += int(mask.sum()) if mask.dim() == 2 else 0  # others say which tokens see each other
        inputs.note(name, tokens if dimensions == {2} else padded, padded, len(self._to_run))

    def failed(self, part: Part) -> FailedPart:
        failed = super().failed(part)
        return replace(failed, unit="tokens") if self.in_rows else failed

    def batch_dependent_module(self) -> str | None:
        return self._dependent_module
