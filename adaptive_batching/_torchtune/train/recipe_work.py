"""The step of a recipe: splitting batches into micro-batches, their forward and backward, and the optimizer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtune import training, utils

from adaptive_batching import _state
from adaptive_batching._attention import SampleBounds
from adaptive_batching._device import RandomState, without_waiting
from adaptive_batching._memory.caching_allocator import RETRIES, counted
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._ranks.fsdp import MicroBatchCollectives
from adaptive_batching._step.data_parallel import DataParallel
from adaptive_batching._step.failed_part import FailedPart, Words
from adaptive_batching._step.forward_timer import ForwardTimer
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.row_size import RowSize
from adaptive_batching._step.runner import Outcome, StepRunner
from adaptive_batching._step.sharing import Sharing
from adaptive_batching._step.split import Split, SplitRule, in_few_sizes, padded_tokens, split_samples
from adaptive_batching._step.work import Part, R, Samples, Work, in_halves
from adaptive_batching._torchtune.stock.compiling import MAX_COMPILED_SIZES, compiles_each_size
from adaptive_batching._torchtune.stock.data import Sample, index_of
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.less_memory import remedy
from adaptive_batching._torchtune.stock.objective import Batch, Counts, Objective, Sums
from adaptive_batching._values import ByLength, Fixed, SplitSize, Whole

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MicroBatch(Part):
    """Samples of one forward and backward; ``tokens`` of multimodal samples are their number.

    ``weight`` is a factor of the mean loss; None for the number of its labels, as in stock.
    """

    samples: list[Sample]
    num_tokens: int | None = None
    """Tokens that it stands for in the sums of a step; None for its own."""

    is_row: bool = False
    """True if its samples lie end to end, without padding."""


@dataclass
class SplitPolicy:
    """The way in which batches are split, and what has been learned about it while training."""

    size: SplitSize = field(default_factory=Whole)
    samples_at_longest: int | None = None  # in a forward, where memory bounds it
    limit: TokenLimit = field(default_factory=TokenLimit)
    row_size: RowSize = field(default_factory=RowSize)
    balances_ranks: bool = False  # where batches are split by length

    @property
    def most_samples(self) -> int | None:
        """Most samples of the longest length in a forward; None for a whole batch."""
        if isinstance(self.size, Fixed):
            return self.size.samples
        return self.samples_at_longest

    @property
    def rule(self) -> SplitRule:
        return SplitRule(by_length=True) if isinstance(self.size, ByLength) else SplitRule(self.most_samples)


class RecipeWork(Work[Samples, MicroBatch, R]):
    """The base of what a recipe runs: training, validation and rollouts.

    ``find_batch_dependent_module`` names a module that computes over the batch, or returns None.
    """

    dataset, batch_key = "the dataset", "batch_size"
    everything = "the step's samples"
    """All that runs again, for messages."""

    def __init__(self, host: Host, find_batch_dependent_module: Callable[[], str | None] = lambda: None) -> None:
        self.device, self.state, self.limit = host.device, host.state, TokenLimit()
        self._host = host
        self._find_batch_dependent_module = find_batch_dependent_module

    def parameters(self) -> list[nn.Parameter]:
        return list(self._host.model.parameters())

    def forget(self) -> None:
        self._host.objective.forget()

    def put_back(self) -> None:
        self._host.objective.equalize_collectives()

    def num_retries(self) -> int:
        return 0  # to read it takes time

    def batch_dependent_module(self) -> str | None:
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
                f"{self._host.loader.batch_size}, or {remedy(self._host)}"
            ) from error

    def tokens(self, samples: list[Sample]) -> int:
        return padded_tokens([self._host.objective.size(sample) for sample in samples])

    def length(self, sample: Sample) -> int:
        return self._host.objective.size(sample)  # tokens of a rollout are on the device

    def extent(self, sample: Sample) -> int:
        return len(self._host.objective.tokens(sample))

    def words(self) -> Words:
        smaller = f"set a smaller {self.batch_key}"
        return Words(remedy(self._host), smaller, f"{smaller} or micro_batch_size", everything=self.everything)

    def failed(self, part: MicroBatch) -> FailedPart:
        objective, updating = self._host.objective, self._host.backward_optimizers
        longest = max(part.samples, key=lambda sample: len(objective.tokens(sample)))
        tokens, number = objective.tokens(longest), index_of(longest)
        unit = "samples"
        if objective.is_text(longest):
            unit = "tokens" if part.is_row else "padded tokens"
        return FailedPart(
            part.tokens, len(part.samples),
            longest=len(tokens),  # of the text of samples with images as well, whose length is 1
            unit=unit,
            name="" if number is None else f"number {number} of {self.dataset} (the first is 0)",
            first_tokens=[int(token) for token in tokens[:12]],
            shorten=f"set tokenizer.max_seq_len below {len(tokens)}",
            has_updated=updating is not None and updating.updated,
        )  # fmt: skip


class BatchesAsTheyRun:
    """The batches of a step, each read when those before it have been launched: the device computes meanwhile.

    Batches that run again meet the random numbers that they met before, whatever reading them has drawn.
    """

    def __init__(self, batches: Iterator[list[Sample]], device: torch.device) -> None:
        self.read: list[list[Sample]] = []
        self._batches, self._device = batches, device
        self._random_states: list[RandomState] = []  # before each of those that were read has run

    def __iter__(self) -> Iterator[list[Sample]]:
        for batch, random_state in zip(self.read, self._random_states, strict=True):
            random_state.put_back()
            yield batch
        for batch in self._batches:
            self.read.append(batch)
            self._random_states.append(RandomState(self._device))
            yield batch


class TrainingWork(RecipeWork[Iterable[list[Sample]], Sums]):
    """Forward and backward of the batches of an optimizer step.

    With ``together`` the samples of all batches are sorted and split together.
    """

    def __init__(
        self,
        host: Host,
        splitter: Splitter,
        find_batch_dependent_module: Callable[[], str | None] = lambda: None,
        *,
        together: bool = False,
    ) -> None:
        super().__init__(host, find_batch_dependent_module)
        self.splitter, self._together, self.limit = splitter, together, splitter.limit
        self.rearranges = splitter.makes_rows
        self._collates_ahead = compiles_each_size(host.loader.dataset)
        self._last: list[Sample] = []  # batch that was split

    def begin_step(self) -> None:
        """Take note that a step begins, all of whose samples have one size of rows."""
        if self._host.backward_optimizers is not None:
            self._host.backward_optimizers.updated = False
        if self.splitter.makes_rows:
            self.splitter.row_size.begin_step(self._host.ranks.gather)

    def split(self, samples: Iterable[list[Sample]]) -> Iterator[list[MicroBatch]]:
        """Yield the parts of batches: of all of them together, or of each by itself, before the next is read."""
        if self._together:
            window = list(samples)
            self._last = window[0]
            yield self.splitter.split_together(window)
        else:
            for self._last in samples:
                yield self.splitter.split(self._last)

    def tokens(self, samples: list[Sample]) -> int:
        return self.splitter.tokens(samples)

    def may_differ(self, parts: Sequence[MicroBatch]) -> bool:
        return self.splitter.may_differ

    def filler(self) -> MicroBatch:
        return self.splitter.filler(self._last)

    def compared(self, parts: Sequence[MicroBatch]) -> list[list[Sample]]:
        counts = self._host.objective.counts
        weighted = [part for part in parts if not part.is_filler]
        lists = [[sample for sample in part.samples if counts([sample]).terms] for part in weighted]
        lists = [samples for samples in lists if samples]
        if len(lists) == 1 and weighted[0].is_row:  # another computation than the batch that it is made of
            return in_halves(sorted(lists[0], key=lambda sample: self.tokens([sample])))
        return lists

    def as_batch(self, lists: Sequence[list[Sample]]) -> list[MicroBatch]:
        parts = self.splitter.weighted(list(lists))
        if len(parts) == 1:  # what parts are compared with: padded, as stock would run it
            return [replace(parts[0], is_row=False)]
        return parts

    def tokens_in_one(self, samples: list[Sample]) -> int:
        return super().tokens(samples)

    def runs(self, parts: Sequence[MicroBatch]) -> list[Callable[[], Sums]]:
        """Return what runs forward and backward of each part, and gives its sums.

        Nothing in between waits for the device: it computes while the next part is collated. Only the masks of flex
        attention are made on the device itself, which has to be waited for; so packs are collated before any of them
        runs.
        """
        host = self._host
        is_timed = self.rearranges and not _state.rehearsing  # as in an audit
        around = self.splitter.timer.around if is_timed else contextlib.nullcontext
        ahead: list[Batch] = []

        def run(part: MicroBatch, *, is_last: bool) -> Sums:
            if self._collates_ahead and not ahead:
                ahead.extend(batch_of(host.objective, each) for each in parts)
            batch = ahead.pop(0) if self._collates_ahead else batch_of(host.objective, part)
            with around(part):
                sums = forward_backward(host, batch, part.weight, is_last=is_last)
            if is_last and len(parts) > 1 and host.backward_optimizers is not None:
                host.backward_optimizers.flush()
            if part.num_tokens is None:
                return sums
            return replace(sums, tokens=torch.full_like(sums.tokens, part.num_tokens))

        return [partial(run, part, is_last=number == len(parts)) for number, part in enumerate(parts, 1)]

    def num_retries(self) -> int:
        return counted(self._host.device, RETRIES)

    def put_back(self) -> None:
        super().put_back()
        self.splitter.timer.forget()

    def failed(self, part: MicroBatch) -> FailedPart:
        held = size_of_gradients(self._host) if self._host.steps_in_backward else 0
        return replace(super().failed(part), gradient_bytes=held)


class Splitter:
    """Splits batches as ``split_policy`` says."""

    def __init__(self, host: Host, split_policy: SplitPolicy) -> None:
        self.limit = split_policy.limit
        self.may_differ = False
        """True if ranks may have got different numbers of parts from the last split."""

        self._objective, self._rule = host.objective, split_policy.rule
        self.makes_rows = host.rows is not None and self._rule.by_length
        """True if samples lie end to end, without padding."""

        self.row_size = split_policy.row_size
        self._size_of = self._objective.size_in_row if self.makes_rows else self._objective.size
        # With optimizers in the backward pass of many devices a batch cannot be split.
        few_sizes = compiles_each_size(host.loader.dataset) and (host.ranks.size == 1 or not host.steps_in_backward)
        self._compiled_sizes: set[int] | None = set() if few_sizes else None
        # Otherwise every rank has one part as long as there is no limit.
        self._always_may_differ = few_sizes or self._rule.by_length or self._rule.samples is not None
        self._said_that_sizes_are_few = False
        self.sharing: Sharing | None = None
        """How the samples of a step are shared out among ranks; None if each keeps its own."""

        is_alone = host.ranks.size == 1 or host.ranks.size != host.num_replicas or host.steps_in_backward
        if split_policy.balances_ranks and self._rule.by_length and not is_alone:
            self.sharing = Sharing(host.ranks, host.model, waits=True)
        self.timer = ForwardTimer(host.device, self._observe)
        """Of rows, whose size is learnt."""

    def split(self, batch: list[Sample]) -> list[MicroBatch]:
        """Return micro-batches with the gradient of ``batch``."""
        sizes = [*map(self._size_of, batch)]
        limit = self._most_tokens(sizes)
        split = split_samples(sizes, self._rule, limit, pads=not self.makes_rows)
        if self._compiled_sizes is not None:
            split = self._in_compiled_sizes(split, self._compiled_sizes)
        self.may_differ = self._always_may_differ or limit is not None
        lists = [[batch[index] for index in part] for part in split]
        return [self._micro_batch(lists[0])] if len(lists) == 1 else self.weighted(lists)

    def split_together(self, window: list[list[Sample]]) -> list[MicroBatch]:
        """Return the micro-batches of a step, its samples sorted together as far as :func:`_of_equal_share` allows.

        Where ranks share them out, they are those that this rank computes.
        """
        self.may_differ = True
        if self.sharing is not None and (shared := self._shared(window, self.sharing)) is not None:
            return shared
        groups = _of_equal_share(window, self._objective)
        return [micro_batch for group in groups for micro_batch in self.split(group)]

    def _shared(self, window: list[list[Sample]], sharing: Sharing) -> list[MicroBatch] | None:
        """Return the micro-batches of this rank in a step that is shared out; None if each rank keeps its samples."""
        weights = {self._weight_of_term(batch) for batch in window}
        samples = [sample for batch in window for sample in batch]
        weight = weights.pop() if len(weights) == 1 else None
        sizes = [*map(self._size_of, samples)]
        lists = sharing.parts(samples, sizes, weight, self._most_tokens(sizes), pads=not self.makes_rows)
        if lists is None:
            return None
        assert weight is not None
        # With fillers, parts stay at the place of those that take as long on other ranks.
        return [part or self.filler(samples) for part in self._weighted(lists, weight)]

    def _weight_of_term(self, batch: list[Sample]) -> Fraction | None:
        """Return what a term of the loss of a batch is multiplied by; None if samples count that have no terms."""
        counts, each = self._objective.counts(batch), [self._objective.counts([sample]) for sample in batch]
        if counts.terms == 0 or any(count.tokens and not count.terms for count in each):
            return None
        return Fraction(self._objective.weight_of(counts), counts.terms)

    def weighted(self, lists: list[list[Sample]]) -> list[MicroBatch]:
        """Return the micro-batches of a batch that has these parts, weighted by their terms.

        A single one is, too, so that two and their union are on one scale: stock gives a whole batch of preferences one
        over the number of batches in a step, whatever its size.
        """
        return [part for part in self._weighted(lists) if part is not None]

    def filler(self, batch: list[Sample]) -> MicroBatch:
        """Return a micro-batch without weight, like the samples of ``batch``."""
        return self._micro_batch([self._objective.filler(batch)], weight=0.0, num_tokens=0)

    def tokens(self, samples: Sequence[Sample]) -> int:
        """Return the tokens of samples that run together, with what padding they get."""
        sizes = [*map(self._size_of, samples)]
        return sum(sizes) if self.makes_rows else padded_tokens(sizes)

    def _most_tokens(self, sizes: Sequence[int]) -> int | None:
        """Return the most tokens of a part of samples of these sizes."""
        limit = self.limit.max_tokens
        if limit is None or not self.makes_rows:
            return limit
        return self.row_size.tokens(sum(sizes), limit)

    def _in_compiled_sizes(self, split: Split, known: set[int]) -> Split:
        """Return ``split``, or pieces of it, of few sizes besides those ``known``, to which new ones are added."""
        pieces = in_few_sizes(split, known, MAX_COMPILED_SIZES)
        if len(pieces) > len(split) and not self._said_that_sizes_are_few:
            self._said_that_sizes_are_few = True
            log.info(
                "running %d packs as %s: attention is already compiled for %d numbers of packs, and not again for "
                "every new one", sum(map(len, split)), [len(piece) for piece in pieces], len(known),
            )  # fmt: skip
        known.update(map(len, pieces))
        return pieces

    def _micro_batch(
        self, samples: list[Sample], weight: float | None = None, num_tokens: int | None = None
    ) -> MicroBatch:
        sizes = [*map(self._size_of, samples)]
        if self.makes_rows:
            tokens, longest = sum(sizes), max(map(self._objective.size, samples))
        else:
            tokens, longest = padded_tokens(sizes), max(sizes)
        return MicroBatch(samples, tokens, weight, longest, num_tokens, self.makes_rows)

    def _weighted(self, lists: list[list[Sample]], weight_of_term: Fraction | None = None) -> list[MicroBatch | None]:
        """Return the micro-batch of each part; None for one that has no terms. If none has, the first has to run.

        All are parts of one batch, whose loss is weighted as in stock, unless there is a ``weight_of_term``.
        """
        # A recipe's loss is a mean over terms, and stock multiplies it by a weight, which parts share by their terms.
        # A part of truncated samples can be all prompt: its share is nothing, and its mean loss would be 0/0.
        counts = [self._objective.counts(part) for part in lists]
        if weight_of_term is None:
            total = Counts(sum(count.terms for count in counts), sum(count.tokens for count in counts))
            if total.terms == 0:
                return [self._micro_batch(lists[0])]  # 0/0, as in stock
            weight_of_term = Fraction(self._objective.weight_of(total), total.terms)
        # Parts without terms can have tokens, as the first label of each sample; they count in the divisor.
        left = sum(count.tokens for count in counts if count.terms == 0)
        weighted: list[MicroBatch | None] = []
        for part, count in zip(lists, counts, strict=True):
            if count.terms == 0:
                weighted.append(None)
                continue
            num_tokens = count.tokens + left if left else None
            weighted.append(self._micro_batch(part, float(count.terms * weight_of_term), num_tokens))
            left = 0
        return weighted

    def _observe(self, micro_batch: MicroBatch, seconds: float) -> None:
        self.row_size.observe(micro_batch.tokens, seconds)


def _of_equal_share(window: list[list[Sample]], objective: Objective) -> list[list[Sample]]:
    """Group the samples of batches that give equal weight to each term of their loss; the largest group comes first.

    In SFT stock multiplies a batch's mean loss over targets by the number of its labels. Where the first label of a
    sample counts as one, batches differ in the weight of a target.
    """
    groups: dict[Fraction, list[Sample]] = {}
    without_terms: list[Sample] = []
    for samples in window:
        counts = objective.counts(samples)
        if counts.terms:
            groups.setdefault(Fraction(counts.tokens, counts.terms), []).extend(samples)
        else:
            without_terms += samples  # 0/0 in stock
    if not groups:
        return [without_terms]
    largest, *others = sorted(groups.values(), key=len, reverse=True)
    return [largest + without_terms, *others]


def size_of_gradients(host: Host) -> int:
    """Return the bytes of all gradients."""
    return sum(parameter.nbytes for parameter in host.model.parameters() if parameter.requires_grad)


def batch_of(objective: Objective, part: MicroBatch) -> Batch:
    """Return the batch of a part's forward, on the host."""
    return objective.lay(part.samples) if part.is_row else objective.collate(part.samples)


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


def to_device(batch: Batch, device: torch.device) -> None:
    """Move a batch in place, without waiting for the device."""
    for key, value in batch.items():
        if isinstance(value, dict):
            to_device(value, device)
        elif isinstance(value, torch.Tensor):
            batch[key] = without_waiting(value, device)
        elif not isinstance(value, SampleBounds):  # a mask of blocks; anything else is an error
            moved = {key: value}
            utils.batch_to_device(moved, device)
            batch[key] = moved[key]


def forward_backward(host: Host, batch: Batch, weight: float | None = None, *, is_last: bool = True) -> Sums:
    """Run one micro-batch, which may still be on the host, and return its sums.

    ``weight`` is the share of a part of a batch; see :meth:`Objective.loss`. Optimizers of the backward pass wait
    unless it ``is_last`` in its step. With them on several ranks, the sums are those of all ranks.
    """
    to_device(batch, host.device)
    optimizers = host.backward_optimizers
    waiting = contextlib.nullcontext() if is_last or optimizers is None else optimizers.closed()
    with waiting, host.taking_rows():
        loss, sums = host.objective.loss(host.model, batch, weight)
        if host.steps_in_backward and host.ranks.size > 1:
            sums = sum_over_ranks(sums.map(torch.clone), host.ranks)  # copies: backward needs the loss's own values
            divisor = host.objective.divisor(sums)
            if divisor is not None:  # there is no other moment to divide; FSDP takes the mean over ranks
                loss = loss * (host.ranks.size / divisor)
        loss.backward()  # type: ignore[no-untyped-call]
    return sums


def sum_over_ranks(sums: Sums, ranks: Ranks) -> Sums:
    """Return the sums of all ranks, added up in place, as stock does."""

    def summed(value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value)
        return value

    return sums if ranks.size == 1 else sums.map(summed)


def apply_gradients(host: Host, sums: Sums) -> torch.Tensor | None:
    """Take the optimizer step on the gathered gradients, with the sums of all ranks, and drop them.

    Returned is the norm of the mean gradient before clipping, or None where the config does not clip.
    """
    if host.steps_in_backward:
        return None  # done already, parameter by parameter
    grad_norm = None
    divisor = host.objective.divisor(sums)
    if divisor is not None:
        training.scale_grads(host.model, host.ranks.size / divisor)  # FSDP has taken the mean over ranks
    if host.clip_norm is not None:
        grad_norm = torch.nn.utils.clip_grad_norm_(host.model.parameters(), max_norm=host.clip_norm)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
    for optimizer in host.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return grad_norm
