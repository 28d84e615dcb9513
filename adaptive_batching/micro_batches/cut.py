"""How a batch is cut into micro-batches, each one forward and backward. Pure: indices and lengths only."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass

log = logging.getLogger(__name__)


Cut = list[list[int]]
"""Micro-batches of indices into the samples; together they hold every index once."""


def padded_tokens(lengths: Sequence[int]) -> int:
    """Tokens that a micro-batch of samples of these lengths takes: each is padded to the longest."""
    return len(lengths) * max(lengths)


def length_in_chunks(length: int, num_chunks: int) -> int:
    """The least length from ``length`` on that :func:`torch.chunk` cuts into ``num_chunks`` pieces, not fewer.

    Chunks are ``ceil(length / num_chunks)`` long, the last one shorter, so 9 tokens come in 5 chunks where 8 are asked
    for. From ``num_chunks * (num_chunks - 1)`` on, every length will do; ``num_chunks`` of 0 or 1 changes nothing.
    """
    if num_chunks < 2:
        return length
    while -(-length // -(-length // num_chunks)) != num_chunks:
        length += 1
    return length


@dataclass(frozen=True)
class Capacity:
    """How many samples of a length fit in one micro-batch.

    Padded tokens bound memory: a micro-batch of as many tokens in shorter samples takes no more. Where attention takes
    memory by the square of the length it takes less, and what fits at shorter lengths tells how much less.
    """

    points: tuple[tuple[int, int], ...]
    """(Tokens, samples): so many samples of that length fit. The first is the longest, and the only one needed."""

    @classmethod
    def of_tokens(cls, max_tokens: int) -> Capacity:
        """At most ``max_tokens`` padded tokens."""
        return cls(((max_tokens, 1),))

    @property
    def tokens(self) -> int:
        """The most padded tokens of a micro-batch that holds a longest sample."""
        length, count = self.points[0]
        return length * count

    def samples(self, length: int) -> int:
        """The most samples of up to ``length`` tokens; at least 1, since a sample cannot be cut."""
        tokens = [self.tokens, *(at * count for at, count in self.points if at >= length)]
        return max(max(tokens) // length, 1)


def cut_in_order(num_samples: int, micro_batch_size: int) -> Cut:
    """Micro-batches of at most ``micro_batch_size`` samples as they come, as few as possible and about equal."""
    count = -(-num_samples // micro_batch_size)
    size = -(-num_samples // count)
    return [list(range(start, min(start + size, num_samples))) for start in range(0, num_samples, size)]


def in_known_sizes(num_samples: int, known: Set[int], max_sizes: int) -> list[int]:
    """Sizes of parts that hold ``num_samples`` together: one, while there have been fewer than ``max_sizes`` of them.

    From then on parts are of sizes that have been, or of 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, the largest first. So
    there are at most two sizes more for each doubling, and the first part holds at least two thirds of the samples.
    """
    if num_samples in known or len(known) < max_sizes:
        return [num_samples]
    powers = [2**k for k in range(num_samples.bit_length())]
    parts: list[int] = []
    for size in sorted({*known, *powers, *(3 * power for power in powers)}, reverse=True):
        count, num_samples = divmod(num_samples, size)
        parts += [size] * count
    return parts


def cut_by_length(lengths: Sequence[int], capacity: Capacity, forward_cost: float = 0.0) -> Cut:
    """Cut samples, sorted by length, into micro-batches that fit, at the least cost.

    The cost of a cut is its padded tokens, plus ``forward_cost`` for each micro-batch. In sorted order the cheapest cut
    is one of runs of neighbours, and is found exactly by dynamic programming over where the last run starts.

    Args:
        lengths: Tokens of each sample.
        capacity: What a micro-batch may hold; a sample that does not fit is alone in its micro-batch.
        forward_cost: What a forward and backward costs beside its tokens, in tokens.

    Returns:
        Micro-batches, the longest samples first: if one does not fit, that shows before work is done.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    if lengths[order[0]] == lengths[order[-1]]:  # as packed samples: any cut into as few is as good, so an even one
        return cut_in_order(len(lengths), capacity.samples(lengths[0]))
    cost = [0.0]  # cost[j]: least cost of the first j samples
    starts = [0]  # starts[j]: where the last micro-batch of that cut starts
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        first = max(end - capacity.samples(longest), 0)
        best = min(range(first, end), key=lambda start: cost[start] + forward_cost + (end - start) * longest)
        cost.append(cost[best] + forward_cost + (end - best) * longest)
        starts.append(best)
    cut, end = [], len(order)
    while end > 0:
        cut.append(order[starts[end] : end])
        end = starts[end]
    return cut
