"""From the samples of a batch to micro-batches."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from adaptive_batching._step.forward_timer import ForwardTimer
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.row_size import RowSize
from adaptive_batching._step.sharing import Sharing
from adaptive_batching._step.split import SplitRule, in_few_sizes, padded_tokens, split_samples
from adaptive_batching._step.work import Part
from adaptive_batching._torchtune.stock.compiling import MAX_COMPILED_SIZES, compiles_each_size
from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.objective import Counts, Objective
from adaptive_batching._values import ByLength, Fixed, SplitSize, Whole, memory_size

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


class Splitter:
    """Splits batches as ``split_policy`` says."""

    def __init__(self, host: Host, split_policy: SplitPolicy) -> None:
        self.limit = split_policy.limit
        self.may_differ = False
        """True if ranks may have got different numbers of parts from the last split."""

        self._objective, self._ranks = host.objective, host.ranks
        self._split_policy = split_policy
        self._makes_rows = host.rows is not None and isinstance(split_policy.size, ByLength)
        # With optimizers in the backward pass of many devices a batch cannot be split.
        few_sizes = compiles_each_size(host.loader.dataset) and (host.ranks.size == 1 or not host.steps_in_backward)
        self._compiled_sizes: set[int] | None = set() if few_sizes else None
        self._said_that_sizes_are_few = False
        self.sharing: Sharing | None = None
        """How the samples of a step are shared out among ranks; None if each keeps its own."""

        is_alone = host.ranks.size == 1 or host.ranks.size != host.num_replicas or host.steps_in_backward
        if split_policy.balances_ranks and isinstance(split_policy.size, ByLength) and not is_alone:
            self.sharing = Sharing(host.ranks, host.model, waits=True)
        self.timer = ForwardTimer(host.device, self._observe)
        """Of rows, whose size is learnt."""

    def begin_step(self) -> None:
        """Take note that a step begins, all of whose samples have one size of rows."""
        if self._makes_rows:
            self._split_policy.row_size.begin_step(self._ranks.gather)
        if self.sharing is not None:
            self.sharing.begin_step()

    def split(self, batch: list[Sample]) -> list[MicroBatch]:
        """Return micro-batches with the gradient of ``batch``."""
        parts = self._parts(batch)
        in_parts = self._split_policy.most_samples is not None or self.limit.max_tokens is not None
        # Otherwise every rank has one part, or as many as sizes have been compiled.
        in_parts = in_parts or isinstance(self._split_policy.size, ByLength) or len(parts) > 1
        self.may_differ = in_parts or self._compiled_sizes is not None
        return self.of_lists(parts)

    def split_together(self, window: list[list[Sample]]) -> list[MicroBatch]:
        """Return the micro-batches of a step, its samples sorted together as far as :func:`_of_equal_share` allows.

        Where ranks share them out, they are those that this rank computes.
        """
        self.may_differ = True
        if self.sharing is not None and (shared := self._shared(window, self.sharing)) is not None:
            return shared
        groups = _of_equal_share(window, self._objective)
        return [micro_batch for group in groups for micro_batch in self.of_lists(self._parts(group))]

    def _shared(self, window: list[list[Sample]], sharing: Sharing) -> list[MicroBatch] | None:
        """Return the micro-batches of this rank in a step that is shared out; None if each rank keeps its samples."""
        weights = {self._weight_of_term(batch) for batch in window}
        samples = [sample for batch in window for sample in batch]
        weight = weights.pop() if len(weights) == 1 else None
        sizes, cost = self._sizes(samples), self._split_policy.rule.forward_cost
        limit = self._most_tokens(sizes)
        lists = sharing.parts(samples, sizes, weight, limit, forward_cost=cost, pads=not self._makes_rows)
        if lists is None:
            return None
        assert weight is not None
        weighted = self._weighted([[part] for part in lists], weight)
        # With fillers, parts stay at the place of those that take as long on other ranks.
        return [part[0] if part else self.filler(samples) for part in weighted]

    def _weight_of_term(self, batch: list[Sample]) -> Fraction | None:
        """Return what a term of the loss of a batch is multiplied by; None if samples count that have no terms."""
        counts, each = self._objective.counts(batch), [self._objective.counts([sample]) for sample in batch]
        if counts.terms == 0 or any(count.tokens and not count.terms for count in each):
            return None
        return Fraction(self._objective.weight_of(counts), counts.terms)

    def of_lists(self, lists: list[list[Sample]]) -> list[MicroBatch]:
        """Return the micro-batches of a batch of its own that has these parts."""
        return [self._micro_batch(lists[0])] if len(lists) == 1 else self._weighted([lists])[0]

    def weighted(self, lists: list[list[Sample]]) -> list[MicroBatch]:
        """Return the same, weighted by terms also where there is one: two and their union are then on one scale.

        Stock gives a whole batch of preferences one over the number of batches in a step, whatever its size.
        """
        return self._weighted([lists])[0]

    def filler(self, batch: list[Sample]) -> MicroBatch:
        """Return a micro-batch without weight, like the samples of ``batch``."""
        return self._micro_batch([self._objective.filler(batch)], weight=0.0, num_tokens=0)

    def tokens(self, samples: Sequence[Sample]) -> int:
        """Return the tokens of samples that run together, with what padding they get."""
        sizes = self._sizes(samples)
        return sum(sizes) if self._makes_rows else padded_tokens(sizes)

    def _sizes(self, samples: Sequence[Sample]) -> list[int]:
        size = self._objective.size_in_row if self._makes_rows else self._objective.size
        return [size(sample) for sample in samples]

    def _most_tokens(self, sizes: Sequence[int]) -> int | None:
        """Return the most tokens of a part of samples of these sizes."""
        limit = self.limit.max_tokens
        if limit is None or not self._makes_rows:
            return limit
        return self._split_policy.row_size.tokens(sum(sizes), limit)

    def _parts(self, batch: list[Sample]) -> list[list[Sample]]:
        sizes = self._sizes(batch)
        split = split_samples(sizes, self._split_policy.rule, self._most_tokens(sizes), pads=not self._makes_rows)
        if (known := self._compiled_sizes) is not None:
            pieces = in_few_sizes(split, known, MAX_COMPILED_SIZES)
            if len(pieces) > len(split) and not self._said_that_sizes_are_few:
                self._said_that_sizes_are_few = True
                log.info(
                    "running %d packs as %s: attention is already compiled for %d numbers of packs, and not again for "
                    "every new one", len(batch), [len(piece) for piece in pieces], len(known),
                )  # fmt: skip
            known.update(map(len, pieces))
            split = pieces
        return [[batch[index] for index in part] for part in split]

    def _micro_batch(
        self, samples: list[Sample], weight: float | None = None, num_tokens: int | None = None
    ) -> MicroBatch:
        return MicroBatch(samples, self.tokens(samples), weight, num_tokens, self._makes_rows)

    def _weighted(
        self, groups: list[list[list[Sample]]], weight_of_term: Fraction | None = None
    ) -> list[list[MicroBatch]]:
        """Return micro-batches of the parts in each group, without those that have no terms.

        All are parts of one batch, whose loss is weighted as in stock, unless there is a ``weight_of_term``.
        """
        # A recipe's loss is a mean over terms, and stock multiplies it by a weight, which parts share by their terms.
        # A part of truncated samples can be all prompt: its share is nothing, and its mean loss would be 0/0.
        counted = [[(part, self._objective.counts(part)) for part in group] for group in groups]
        counts = [count for group in counted for _, count in group]
        total = Counts(sum(count.terms for count in counts), sum(count.tokens for count in counts))
        if weight_of_term is None:
            if total.terms == 0:
                return [[self._micro_batch(groups[0][0])], *([] for _ in groups[1:])]  # 0/0, as in stock
            weight_of_term = Fraction(self._objective.weight_of(total), total.terms)
        # Parts without terms can have tokens, as the first label of each sample; they count in the divisor.
        left = sum(count.tokens for count in counts if count.terms == 0)
        weighted: list[list[MicroBatch]] = []
        for group in counted:
            weighted.append([])
            for part, count in group:
                if count.terms > 0:
                    num_tokens = count.tokens + left if left else None
                    weighted[-1].append(self._micro_batch(part, float(count.terms * weight_of_term), num_tokens))
                    left = 0
        return weighted

    def timed(self, micro_batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        """Time a forward and backward of ``micro_batch``, if that is of use."""
        return self.timer.around(micro_batch) if self._makes_rows else contextlib.nullcontext()

    def _observe(self, micro_batch: MicroBatch, seconds: float) -> None:
        self._split_policy.row_size.observe(micro_batch.tokens, seconds)


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


def size_of_gradients(host: Host) -> str:
    return memory_size(sum(parameter.nbytes for parameter in host.model.parameters() if parameter.requires_grad))
