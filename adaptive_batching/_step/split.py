"""Split the samples of a step into parts, each with one forward and backward. Pure: indices and lengths only.

A :class:`SplitRule` is what the settings ask for: the whole batch, parts of so many samples, or samples sorted by
length. No part has more tokens than the limit allows; other parts than those by length are split again where they have.
:func:`split_samples` does both, for recipes, Trainer and plain loops, and says what holds of its result.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass

Split = list[list[int]]  # parts, of indices into the samples; together they hold every index once

# Fixed cost of a forward and backward, in tokens: launching the kernels of a model takes some tens of milliseconds, in
# which the device could compute some hundreds of tokens more. What is best depends on model and device. For 64 samples
# of some 180 tokens, padded, 2,048 would save a quarter of a step with half a billion parameters on an H100, but cost
# 4 % with 3 billion, 5 % with 8 billion, and 1 % on an RTX 4090 (by dry runs).
FORWARD_COST = 512
_IN_LAST_PLACE = 16  # samples at the most


def padded_tokens(lengths: Sequence[int]) -> int:
    """Return the tokens in a micro-batch of samples with these lengths, each padded to the longest."""
    return len(lengths) * max(lengths)


def length_in_chunks(length: int, num_chunks: int) -> int:
    """Return the smallest length from ``length`` on that :func:`torch.chunk` splits into ``num_chunks`` pieces.

    Chunks are ``ceil(length / num_chunks)`` long and the last one is shorter: 9 tokens give 5 chunks where 8 are asked.
    """
    while num_chunks > 1 and -(-length // -(-length // num_chunks)) != num_chunks:
        length += 1
    return length


def samples_within(max_tokens: int, length: int) -> int:
    """Return how many samples of ``length`` tokens have at most ``max_tokens``; at least 1: a sample cannot be split.

    As many tokens in shorter samples take no more memory.
    """
    return max(max_tokens // length, 1)


@dataclass(frozen=True)
class SplitRule:
    """How samples are split while memory suffices: not at all, by number, or by length."""

    samples: int | None = None
    """Most samples of a part; they keep their order."""

    is_even: bool = True
    """True for parts of about one size; False for full ones and a smaller one at the end."""

    by_length: bool = False
    """True for parts of samples of similar length, with as many tokens as the limit allows."""

    forward_cost: float = FORWARD_COST
    """Time of a part besides that of its tokens, as a number of tokens; weighs few parts against little padding."""


def split_samples(
    lengths: Sequence[int],
    rule: SplitRule,
    limit: int | None = None,
    *,
    pads: bool = True,
) -> Split:
    """Split samples by ``rule``, and what is above ``limit`` into smaller parts.

    >>> split_samples([5, 100, 6, 90], SplitRule(by_length=True, forward_cost=50), 200)
    [[3, 1], [0, 2]]

    - Each sample is in exactly one part.
    - A part has at most ``limit`` tokens, unless it is one sample, and at most as many samples as the ``rule`` allows.
    - By length, the longest samples come first, and padded tokens plus the cost of forwards are no more than those of
      any other way to divide the sorted samples into runs of neighbours of at most ``limit``.
    - The result depends on the arguments alone: ranks that have the same samples split them alike.

    Args:
        lengths: Tokens of each sample.
        rule: What the settings ask for.
        limit: Most tokens of a part; None for no limit.
        pads: False if samples are laid end to end, so that a part has the sum of their tokens.
    """
    if not lengths:
        return []

    everything = range(len(lengths))
    if rule.by_length and limit is not None:
        return split_by_length(lengths, limit, rule.forward_cost) if pads else split_end_to_end(lengths, limit)
    if rule.samples is None:
        parts = [list(everything)]
    elif rule.is_even:
        parts = split_in_order(len(lengths), rule.samples)
    else:
        parts = [list(everything[start : start + rule.samples]) for start in everything[:: rule.samples]]
    if limit is None:
        return parts
    split = []
    for part in parts:
        own = [lengths[index] for index in part]
        if (padded_tokens(own) if pads else sum(own)) <= limit:
            split.append(part)
        else:  # a high cost of forwards keeps the number of parts low where nobody has asked for any
            smaller = split_by_length(own, limit, limit) if pads else split_end_to_end(own, limit)
            split += [[part[index] for index in each] for each in smaller]
    return split


def split_in_order(num_samples: int, micro_batch_size: int) -> Split:
    """Split samples in order into the fewest micro-batches of up to ``micro_batch_size``, about equal in size."""
    count = -(-num_samples // micro_batch_size)
    size = -(-num_samples // count)
    return [list(range(start, min(start + size, num_samples))) for start in range(0, num_samples, size)]


def split_end_to_end(lengths: Sequence[int], max_tokens: int) -> Split:
    """Split samples that are laid end to end into few parts, of about as many tokens each, the largest first.

    No part has more than ``max_tokens``, other than a sample that is longer: it is alone. Each sample, from the longest
    on, goes to the part that has the fewest tokens so far; if one ends above ``max_tokens``, there is a part more.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    alone = [[index] for index in order if lengths[index] > max_tokens]
    rest = order[len(alone) :]
    count = -(-sum(lengths[index] for index in rest) // max_tokens)
    while True:
        parts = [(0, number, list[int]()) for number in range(count)]  # a heap: tokens, a number of its own, samples
        for index in rest:
            tokens, number, part = parts[0]
            part.append(index)
            heapq.heapreplace(parts, (tokens + lengths[index], number, part))
        if not parts or max(parts)[0] <= max_tokens:
            return alone + [part for _, _, part in sorted(parts, key=lambda each: (-each[0], each[1]))]
        count += 1


def in_last_place(tokens: int, shortest: int) -> list[int]:
    """Return lengths that a probe lays end to end where the last of the longest samples would lie, of as many tokens.

    So rows of a probe have samples of unlike lengths, as rows of training do. None is below ``shortest``, unless that
    is more than ``tokens``; they are nearly alike, and few, as each takes time on a CPU.
    """
    number = max(min(_IN_LAST_PLACE, tokens // max(shortest, 1)), 1)
    return [(tokens + index) // number for index in range(number)]


def in_few_sizes(split: Split, known: Set[int], max_sizes: int) -> Split:
    """Return parts, or pieces of them, of few sizes besides those ``known``, as :func:`in_known_sizes` has them."""
    pieces: Split = []
    for part in split:
        start = 0
        for size in in_known_sizes(len(part), known, max_sizes):
            pieces.append(part[start : start + size])
            start += size
        known = {*known, *map(len, pieces)}
    return pieces


def in_known_sizes(num_samples: int, known: Set[int], max_sizes: int) -> list[int]:
    """Return the sizes of parts that together hold ``num_samples``: one part while fewer than ``max_sizes`` are known.

    A known size is one part, too. Otherwise parts have known sizes or 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, the
    largest first. This adds at most two sizes per doubling, and the first part has at least two thirds of the samples.
    """
    if num_samples in known or len(known) < max_sizes:
        return [num_samples]
    powers = [2**k for k in range(num_samples.bit_length())]
    parts: list[int] = []
    for size in sorted({*known, *powers, *(3 * power for power in powers)}, reverse=True):
        count, num_samples = divmod(num_samples, size)
        parts += [size] * count
    return parts


def split_by_length(lengths: Sequence[int], max_tokens: int, forward_cost: float = 0.0) -> Split:
    """Sort samples by length and split them into micro-batches that fit, at the lowest cost, the longest samples first.

    So one that does not fit fails before work is done. A sample above ``max_tokens`` is alone. The cost of a split is
    its padded tokens, plus ``forward_cost`` for each micro-batch. In sorted order, the cheapest split consists of runs
    of neighbours. Dynamic programming over the start of the last run finds it exactly.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    if lengths[order[0]] == lengths[order[-1]]:  # e.g. packed samples: an even split costs no more
        return split_in_order(len(lengths), samples_within(max_tokens, lengths[0]))
    ends = sorted(lengths)  # ends[j]: the longest of the first j + 1 samples
    within = {longest: samples_within(max_tokens, longest) for longest in set(ends)}
    too_large_from: list[int] = []  # for each start, the first end that it is too far from
    for end, longest in enumerate(ends, 1):
        too_large_from += [end] * (end - within[longest] - len(too_large_from))
    too_large_from += [len(ends) + 1] * (len(ends) - len(too_large_from))
    cost = [0.0]  # cost[j]: least cost of the first j samples
    starts = [0]  # starts[j]: where the last micro-batch of that split starts
    # Of two starts the later one is cheaper from some end on: where the longest sample is long enough, or the earlier
    # start has too many tokens. So the cheapest starts, each with the first end that it is best for, are a queue.
    cheapest, front = [(0, 1)], 0
    for end, longest in enumerate(ends, 1):
        new, takes_over = end - 1, 0
        while new:
            last, since = cheapest[-1]
            is_cheaper_from = bisect_right(ends, (cost[new] - cost[last]) / (new - last), new) + 1
            takes_over = min(is_cheaper_from, too_large_from[last])
            if takes_over > since:
                break
            cheapest.pop()
        if new and takes_over <= len(ends):
            cheapest.append((new, takes_over))
        while front + 1 < len(cheapest) and cheapest[front + 1][1] <= end:
            front += 1
        best = cheapest[front][0]
        cost.append(cost[best] + forward_cost + (end - best) * longest)
        starts.append(best)
    split, end = [], len(order)
    while end > 0:
        split.append(order[starts[end] : end])
        end = starts[end]
    return split
