"""How a batch is cut into micro-batches, each one forward and backward. Pure: indices and lengths only."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

# Of those older than that, less than 2 % would be left.
_MEASUREMENTS_KEPT = 200
# A forward that took this many times as long as it need have has waited for something else.
_OUTLIER = 4.0

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


class ForwardCost:
    """What a forward and backward takes: a fixed time, and a time for each padded token, fitted to what was measured.

    A least-squares line through (padded tokens, seconds), older measurements counting less. Measurements that paid for
    something else, such as compiling, are left out: those that took several times as long as another one shows to be
    possible, at no fewer tokens or at the same time for each of them.

    Args:
        decay: Weight that a measurement keeps with each new one.
        warm_up: First measurements to pass over; they pay for what is set up once.
    """

    def __init__(self, decay: float = 0.98, warm_up: int = 3) -> None:
        self._decay = decay
        self._to_skip = warm_up
        self._recent: deque[tuple[int, float]] = deque(maxlen=_MEASUREMENTS_KEPT)  # (padded tokens, seconds)

    def observe(self, tokens: int, seconds: float) -> None:
        """A micro-batch of ``tokens`` padded tokens took ``seconds``."""
        if self._to_skip > 0:
            self._to_skip -= 1
            return
        self._recent.append((tokens, seconds))

    def line(self) -> tuple[float, float] | None:
        """Seconds of a forward whatever its size, and seconds of a padded token; None while unknown."""
        if len(self._recent) < 2:
            return None
        tokens, seconds = np.array(self._recent, dtype=np.float64).T
        weights = self._decay ** np.arange(len(tokens) - 1, -1, -1)
        # The time of each measurement as every other one bounds it: [measurement, other]
        bounds = seconds[None, :] * np.maximum(tokens[:, None] / np.maximum(tokens[None, :], 1), 1)
        usual = seconds <= _OUTLIER * bounds.min(axis=1)
        weights, tokens, seconds = weights[usual], tokens[usual], seconds[usual]
        mean_tokens, mean_seconds = np.average(tokens, weights=weights), np.average(seconds, weights=weights)
        spread = np.average((tokens - mean_tokens) ** 2, weights=weights)
        if len(tokens) < 2 or spread <= 1e-6 * mean_tokens**2:  # all of one size: no slope to be seen
            return None
        covariance = np.average((tokens - mean_tokens) * (seconds - mean_seconds), weights=weights)
        per_token = float(covariance / spread)
        return (max(float(mean_seconds - per_token * mean_tokens), 0.0), per_token) if per_token > 0 else None

    def in_tokens(self, default: float) -> float:
        """The fixed time of a forward, in the number of tokens that take as long; ``default`` while unknown."""
        line = self.line()
        return default if line is None else line[0] / line[1]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is to hold."""
        return {"to_skip": self._to_skip, "recent": [list(measurement) for measurement in self._recent]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._to_skip = state["to_skip"]
        self._recent.extend((tokens, seconds) for tokens, seconds in state["recent"])


class TokenLimit:
    """The most padded tokens of a micro-batch, as running out of memory has taught it.

    There is none until a micro-batch runs out of memory. Each time one does, it falls to half of that one. After a
    number of steps without, it doubles, but never to what has failed twice; once beyond what failed, it is lifted. With
    each failure after the first it stays down for twice as many steps, so that a run of any length has few of them.

    Args:
        steps_to_recover: Clean steps after which it is raised for the first time.
    """

    def __init__(self, steps_to_recover: int = 50) -> None:
        self.max_tokens: int | None = None
        self.num_recoveries = 0
        self._steps_to_recover = steps_to_recover
        self._clean_steps = 0
        self._failed: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is to hold."""
        return {
            "max_tokens": self.max_tokens,
            "num_recoveries": self.num_recoveries,
            "clean_steps": self._clean_steps,
            "steps_to_recover": self._steps_to_recover,
            "failed": self._failed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.max_tokens, self.num_recoveries = state["max_tokens"], state["num_recoveries"]
        self._clean_steps, self._failed = state["clean_steps"], list(state["failed"])
        self._steps_to_recover = state["steps_to_recover"]

    def keep(self) -> None:
        """A micro-batch ran out of memory, and is to run again as it was."""
        self.num_recoveries += 1

    def shrink(self, tokens: int, *, fitted_before: bool = False) -> None:
        """A micro-batch of ``tokens`` padded tokens ran out of memory: take half, or where as many have fitted before,
        an eighth less."""
        self.num_recoveries += 1
        if fitted_before:
            self.lower(tokens)
        else:
            self._fall_to(tokens // 2, tokens)

    def lower(self, tokens: int) -> None:
        """Micro-batches of ``tokens`` padded tokens have fitted just so, at the price of time; take an eighth less."""
        self._fall_to(tokens - max(tokens // 8, 1), tokens)

    def _fall_to(self, max_tokens: int, failed: int) -> None:
        if self._failed:
            self._steps_to_recover *= 2
        self._failed.append(failed)
        self._clean_steps = 0
        self.max_tokens = max(max_tokens, 1)

    def step_done(self) -> None:
        """An optimizer step ended without running out of memory."""
        if self.max_tokens is None:
            return
        self._clean_steps += 1
        if self._clean_steps < self._steps_to_recover:
            return
        self._clean_steps = 0
        wanted = 2 * self.max_tokens
        if len(self._failed) > 1:
            wanted = min(wanted, sorted(self._failed)[1] - 1)
        elif self.max_tokens >= max(self._failed, default=0):  # what failed had its second chance
            log.info("micro-batches may take any number of padded tokens again, from %d", self.max_tokens)
            self.max_tokens = None
            return
        if wanted > self.max_tokens:
            log.info("micro-batches may take %d padded tokens again, from %d", wanted, self.max_tokens)
            self.max_tokens = wanted
