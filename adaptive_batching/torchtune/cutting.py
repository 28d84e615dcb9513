"""From the samples of a batch to micro-batches, each with its share in the gradient."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from adaptive_batching.micro_batches.cut import Capacity, cut_by_length, cut_in_order, in_known_sizes, padded_tokens
from adaptive_batching.micro_batches.forward_cost import ForwardCost
from adaptive_batching.micro_batches.limits import TokenLimit
from adaptive_batching.torchtune.compiling import MAX_COMPILED_SIZES, compiles_each_size
from adaptive_batching.torchtune.data import Sample, sizes, stretch

log = logging.getLogger(__name__)

# What a forward is taken to cost beside its tokens until that has been measured, in tokens: launching the kernels of a
# model takes some tens of milliseconds, in which the device could do some hundreds of tokens more.
FIRST_FORWARD_COST = 512


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward."""

    samples: list[Sample]
    weight: float | None = None
    """What its mean loss is multiplied by; None: the number of its labels, as in stock."""
    num_labels: int | None = None
    """Labels that it stands for; None: its own."""

    @property
    def is_filler(self) -> bool:
        """Whether it only keeps this rank in step with the others."""
        return self.weight == 0

    @property
    def tokens(self) -> int:
        """Its padded tokens; of multimodal samples, their number."""
        return padded_tokens(sizes(self.samples))


class Cutter:
    """Cuts the batches of a recipe, and learns what a forward costs.

    Args:
        recipe: A recipe that has been set up.
        micro_batch_size: As in the config, ``"explore"`` excepted.
        cost: What a forward costs, as far as it has been measured; timings are added to it.
        limit: What has been seen not to fit.
        learns: Time every forward, even where the cut does not depend on it.
    """

    def __init__(
        self,
        recipe: Any,
        micro_batch_size: int | str | None,
        cost: ForwardCost,
        limit: TokenLimit,
        *,
        learns: bool = False,
    ) -> None:
        self._recipe = recipe
        self._micro_batch_size = micro_batch_size
        self._cost = cost
        self._limit = limit
        self._learns = learns or micro_batch_size == "auto"
        # With optimizers in the backward pass of many devices a batch cannot be cut.
        cuts = recipe.ranks.size == 1 or not getattr(recipe, "_optimizer_in_bwd", False)
        few_sizes = compiles_each_size(recipe._dataloader.dataset) and cuts
        self._compiled_sizes: set[int] | None = set() if few_sizes else None
        self._said_that_sizes_are_few = False
        self._events: list[tuple[int, torch.Event, torch.Event]] = []

    def cut(self, batch: list[Sample], min_parts: int = 1, *, in_order: bool = False) -> list[MicroBatch]:
        """The micro-batches of ``batch``; together they have its gradient.

        Args:
            batch: The samples, in the random order of the data.
            min_parts: How many micro-batches there have to be, where there are as many samples.
            in_order: Whatever is cut smaller for want of memory keeps the samples in their order, so that all
                micro-batches are drawn alike.
        """
        parts = self._parts(batch, min_parts, in_order=in_order)
        micro_batches = [MicroBatch(parts[0])] if len(parts) == 1 else self._weighted([parts])[0]
        in_parts = self._micro_batch_size or self._recipe.samples_per_forward or self._limit.max_tokens is not None
        in_parts = in_parts or (self._compiled_sizes is not None and self._recipe.settings.enabled)
        # Without any of these, there is one on every rank.
        return self._as_many_on_every_rank(micro_batches, batch) if in_parts or min_parts > 1 else micro_batches

    def cut_together(self, window: list[list[Sample]]) -> list[MicroBatch]:
        """The micro-batches of all batches of an optimizer step, their samples sorted together as far as that is exact.

        See :func:`_of_equal_share` for how far.
        """
        micro_batches = [each for group in _of_equal_share(self._counted(window)) for each in self._cut_group(group)]
        return self._as_many_on_every_rank(micro_batches, window[0])

    def cut_apart(self, window: list[list[Sample]], first: int) -> list[list[MicroBatch]]:
        """The micro-batches of up to ``first`` samples of ``window`` and those of the others; all together have its
        gradient. There are none of samples without targets."""
        group, *others = _of_equal_share(self._counted(window))
        apart, rest = self._weighted([self._parts(group[:first]), self._parts(group[first:]) if group[first:] else []])
        rest += [each for other in others for each in self._cut_group(other)]
        return [self._as_many_on_every_rank(micro_batches, window[0]) for micro_batches in (apart, rest)]

    def _cut_group(self, group: list[Sample]) -> list[MicroBatch]:
        parts = self._parts(group)
        return [MicroBatch(parts[0])] if len(parts) == 1 else self._weighted([parts])[0]

    def _counted(self, window: list[list[Sample]]) -> list[tuple[list[Sample], int, int]]:
        """Each batch with the numbers of its labels and of its targets."""
        return [(batch, count_labels(self._recipe, batch), count_labels(self._recipe, batch, 1)) for batch in window]

    def _parts(self, batch: list[Sample], min_parts: int = 1, *, in_order: bool = False) -> list[list[Sample]]:
        lengths = sizes(batch, self._recipe.length_in_forward)
        most = self._micro_batch_size or self._recipe.samples_per_forward or len(batch)
        if isinstance(most, str):
            capacity = self._recipe.capacity
            cost = min(self._cost.in_tokens(FIRST_FORWARD_COST), capacity.tokens)
            cut = cut_by_length(lengths, capacity, cost)
        else:
            cut = cut_in_order(len(batch), most)
        if len(cut) < min_parts:
            cut = cut_in_order(len(batch), max(len(batch) // min_parts, 1))
        parts = [[batch[i] for i in indices] for indices in cut]
        if self._limit.max_tokens is not None:
            most_tokens = self._limit.max_tokens
            parts = [part for whole in parts for part in _cut_to(whole, most_tokens, in_order=in_order)]
        return parts if self._compiled_sizes is None else self._of_few_sizes(parts, self._compiled_sizes)

    def _of_few_sizes(self, parts: list[list[Sample]], known: set[int]) -> list[list[Sample]]:
        """``parts``, or pieces of them, so that no more sizes have to be compiled than are worth it."""
        pieces = []
        for part in parts:
            start, sizes_of_pieces = 0, in_known_sizes(len(part), known, MAX_COMPILED_SIZES)
            if len(sizes_of_pieces) > 1 and not self._said_that_sizes_are_few:
                self._said_that_sizes_are_few = True
                log.info(
                    "%d packs run as %s: attention has been compiled for %d numbers of packs, and is not for each more "
                    "that comes", len(part), sizes_of_pieces, len(known),
                )  # fmt: skip
            for size in sizes_of_pieces:
                known.add(size)
                pieces.append(part[start : start + size])
                start += size
        return pieces

    def _weighted(self, groups: list[list[list[Sample]]]) -> list[list[MicroBatch]]:
        # A recipe's loss is a mean over targets, all but a sample's first label, and stock multiplies it by the number
        # of labels. Each part gets its share by targets of what the whole batch would have had. A part of truncated
        # samples can be all prompt: its share is nothing, and its mean loss would be 0/0.
        counts = [
            [(count_labels(self._recipe, part, 1), count_labels(self._recipe, part)) for part in group]
            for group in groups
        ]
        all_targets, all_labels = (sum(count[i] for group in counts for count in group) for i in (0, 1))
        if all_targets == 0:
            return [[MicroBatch(groups[0][0])], *([] for _ in groups[1:])]  # 0/0, as in stock
        # Parts without targets can have labels, the first of each sample; they count in what the sum is divided by.
        left = sum(labels for group in counts for targets, labels in group if targets == 0)
        weighted: list[list[MicroBatch]] = []
        for group, counts_of_group in zip(groups, counts, strict=True):
            weighted.append([])
            for part, (targets, labels) in zip(group, counts_of_group, strict=True):
                if targets > 0:
                    weighted[-1].append(MicroBatch(part, targets * all_labels / all_targets, labels + left))
                    left = 0
        return weighted

    def _as_many_on_every_rank(self, micro_batches: list[MicroBatch], batch: list[Sample]) -> list[MicroBatch]:
        """FSDP needs as many forwards on every rank."""
        missing = int(self._recipe.ranks.largest(len(micro_batches))) - len(micro_batches)
        return micro_batches + [_filler(batch)] * missing if missing else micro_batches

    def timed(self, micro_batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        """Measure what a forward and backward of ``micro_batch`` takes, where the cut depends on it."""
        return self._timed(micro_batch.tokens) if self._learns else contextlib.nullcontext()

    @contextlib.contextmanager
    def _timed(self, tokens: int) -> Iterator[None]:
        device = self._recipe._device
        if device.type == "cpu":
            start = time.perf_counter()
            yield
            self._cost.observe(tokens, time.perf_counter() - start)
            return
        # Events are read when the step is over, so that the device is not waited for in between.
        begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((tokens, begin, end))

    def read_timings(self) -> None:
        """A step is over: learn from what it took."""
        for tokens, begin, end in self._events:
            end.synchronize()
            self._cost.observe(tokens, begin.elapsed_time(end) / 1000)
        self._events.clear()

    def forget_timings(self) -> None:
        """A step was broken off."""
        self._events.clear()


def _of_equal_share(batches: list[tuple[list[Sample], int, int]]) -> list[list[Sample]]:
    """Put together the samples of batches that have as many labels for each target; the largest group comes first.

    Stock multiplies a batch's mean loss over targets by the number of its labels. Where the first label of a sample
    counts as one, a target's share in the gradient is another in each batch, and samples of two batches in one forward
    would get the same.

    Args:
        batches: (samples, labels, targets) of each batch.
    """
    groups: dict[Fraction, list[Sample]] = {}
    without_targets: list[Sample] = []
    for samples, labels, targets in batches:
        if targets:
            groups.setdefault(Fraction(labels, targets), []).extend(samples)
        else:
            without_targets += samples  # 0/0 in stock
    if not groups:
        return [without_targets]
    largest, *others = sorted(groups.values(), key=len, reverse=True)
    return [largest + without_targets, *others]


def count_labels(recipe: Any, samples: list[Sample], first: int = 0) -> int:
    """How many labels of ``samples``, each from its ``first`` on, are not to be ignored; from 1 on they are targets."""
    ignored = recipe._loss_fn.ignore_index
    return sum(int((np.asarray(sample["labels"][first:]) != ignored).sum()) for sample in samples)


def _filler(batch: list[Sample]) -> MicroBatch:
    """A short forward and backward that adds nothing, whatever its loss."""
    several = [sample for sample in batch if len(sample["tokens"]) > 1] or [stretch(batch[0], 2)]
    sample = min(several, key=lambda sample: len(sample["tokens"]))
    # a mean over no targets would be 0/0
    return MicroBatch([{**sample, "labels": sample["tokens"]}], weight=0.0, num_labels=0)


def _cut_to(part: list[Sample], max_tokens: int, *, in_order: bool) -> list[list[Sample]]:
    lengths = sizes(part)
    if padded_tokens(lengths) <= max_tokens:
        return [part]
    capacity = Capacity.of_tokens(max_tokens)
    if in_order:
        cut = cut_in_order(len(part), capacity.samples(max(lengths)))
    else:  # what a forward costs is not known here; a high price keeps their number low
        cut = cut_by_length(lengths, capacity, forward_cost=max_tokens)
    return [[part[i] for i in indices] for indices in cut]
