"""Split a batch into micro-batches, each with one forward and backward. Pure: indices and lengths only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence, Set

Split = list[list[int]]  # micro-batches of indices into the samples; together they hold every index once


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
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    alone = [[index] for index in order if lengths[index] > max_tokens]
    rest = order[len(alone) :]
    count = -(-sum(lengths[index] for index in rest) // max_tokens)
    while True:
        parts = [(0, number, list[int]()) for number in range(count)]  # a heap: tokens, a number of its own, samples
        for index in rest:
            tokens, number, part = parts[0]
            heapq.heapreplace(parts, (tokens + lengths[index], number, [*part, index]))
        if all(tokens <= max_tokens for tokens, _, _ in parts):
            return alone + [part for _, _, part in sorted(parts, key=lambda each: (-each[0], each[1]))]
        count += 1


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
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    if lengths[order[0]] == lengths[order[-1]]:  # e.g. packed samples: an even split costs no more
        return split_in_order(len(lengths), samples_within(max_tokens, lengths[0]))
    cost = [0.0]  # cost[j]: least cost of the first j samples
    starts = [0]  # starts[j]: where the last micro-batch of that split starts
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        first = max(end - samples_within(max_tokens, longest), 0)
        best = min(range(first, end), key=lambda start: cost[start] + forward_cost + (end - start) * longest)
        cost.append(cost[best] + forward_cost + (end - best) * longest)
        starts.append(best)
    split, end = [], len(order)
    while end > 0:
        split.append(order[starts[end] : end])
        end = starts[end]
    return split
