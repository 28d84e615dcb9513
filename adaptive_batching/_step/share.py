"""Share out the samples of a step among ranks, so that none waits for another. Pure: lengths and costs only.

A step takes as long as its slowest rank, and lengths drawn at random are far from equal. As gradients are summed over
all ranks, any of them may compute a sample. Ranks of a sharded model wait for each other in every forward, because each
layer is gathered from all: what they compute at the same time is a *turn*, which is as long as its slowest part.

Samples laid end to end cost what they cost one by one. A turn is filled from the longest sample on (as in scheduling
by longest processing time, Graham 1969, https://doi.org/10.1137/0117039), but at home first: a sample stays with the
rank that drew it if that has room. Otherwise it goes to the rank with the most room, or waits for the next turn if none
has enough. Room is an even share of the work that is left, or what the longest sample needs, if that is more. So a rank
gives away its shortest samples, and few tokens move.

Where samples are padded to the longest in their part, a part is cheapest if its samples have similar lengths. So they
are sorted and cut into one run per rank and turn, with the shortest possible time for a turn. Few stay with the rank
that drew them.

Each sample is in one part, and all ranks have as many parts. The step is not slower than without balancing. A part is
within the limit, unless it is a single sample. The result depends on the arguments alone: ranks that know all lengths
agree on it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from adaptive_batching._step.split import FORWARD_COST, SplitRule, samples_within, split_samples

Drawn = tuple[int, int]  # a sample: the rank that drew it, and its index there
PlacedSample = tuple[int, int, int]  # its tokens, and where it was drawn
Parts = list[list[list[Drawn]]]  # of each rank, by turn; all have as many, of which some may be empty

# Share of a turn's time that is not worth sending samples for: forwards of one size differ by as much.
_TOLERANCE = 0.01


@dataclass(frozen=True)
class SampleCost:
    """Time of a forward and backward on a device of speed 1, in any unit, such as that of a token.

    Attention stays within a sample, so its square counts for each, also end to end; only ``fixed`` is of the forward.
    """

    fixed: float = FORWARD_COST
    """Of a forward, whatever it computes. Ranks that run as many have it in common; it decides how many they run."""

    per_token: float = 1.0
    per_token_squared: float = 0.0

    @classmethod
    def of_model(cls, hidden_size: int) -> SampleCost:
        """Return the cost in tokens, by the operations of a transformer's layer.

        For ``s`` tokens these are in proportion to ``s * (1 + s / (6 * hidden_size))`` (Narayanan et al. 2021,
        https://arxiv.org/abs/2104.04473, equation 3, without the output layer).
        """
        return cls(per_token_squared=1 / (6 * hidden_size))

    def of_sample(self, tokens: int) -> float:
        return tokens * (self.per_token + self.per_token_squared * tokens)

    def of_part(self, lengths: Sequence[int], *, pads: bool = False) -> float:
        """Return the time of samples of these lengths, end to end or padded; of none, that of a filler."""
        if pads and lengths:
            return self.fixed + len(lengths) * self.of_sample(max(lengths))
        return self.fixed + sum(map(self.of_sample, lengths))


@dataclass(frozen=True)
class StepTime:
    """Time of a step's forwards and backwards, in the unit of its :class:`SampleCost`."""

    slowest: float
    """Sum over turns of the slowest rank's."""

    mean: float
    """Mean over ranks of the time in which they compute."""

    @property
    def over_mean(self) -> float:
        return self.slowest / self.mean if self.mean else 1.0


@dataclass(frozen=True)
class Share:
    """The samples that each rank computes in a step."""

    parts: Parts
    unbalanced: StepTime
    """With each rank's own samples, split like any others."""

    time: StepTime

    @property
    def unbalanced_over_mean(self) -> float:
        """Time of the slowest rank with each rank's own samples, over the mean with those that it computes.

        Balancing puts samples of similar length together: the padding that it saves counts against the unbalanced step.
        """
        return self.unbalanced.slowest / self.time.mean if self.time.mean else 1.0

    @property
    def num_moved(self) -> int:
        """Number of samples that a rank computes for another."""
        return sum(home != rank for rank, turns in enumerate(self.parts) for part in turns for home, _ in part)


def share_out(
    lengths: Sequence[Sequence[int]],
    cost: SampleCost,
    speeds: Sequence[float] | None = None,
    limit: int | None = None,
    *,
    pads: bool = False,
) -> Share:
    """Return which samples each rank computes, in parts that take about as long as those of other ranks in their turn.

    >>> share_out([[900, 300], [200, 200]], SampleCost()).parts
    [[[(0, 0)]], [[(0, 1), (1, 0), (1, 1)]]]

    Args:
        lengths: For each rank, the tokens, at least 1, of the samples that it has drawn; what must stay together, such
            as a pair of DPO, is one sample.
        cost: Of samples; the same numbers on all ranks.
        speeds: Of each rank, relative to others; None if all are as fast.
        limit: Most tokens of a part; None for no limit. Then samples end to end are one part on each rank, which may
            split it as it likes if ranks do not wait for each other within a step, as with DDP.
        pads: True if samples are padded to the longest of their part; False if they are laid end to end.
    """
    num_ranks = len(lengths)
    speeds = [1.0] * num_ranks if speeds is None else speeds
    drawn = [(tokens, home, index) for home, own in enumerate(lengths) for index, tokens in enumerate(own)]
    samples = sorted(drawn, key=lambda sample: -sample[0])

    def time(parts: Parts) -> StepTime:
        times = [
            [cost.of_part([lengths[home][index] for home, index in part], pads=pads) / speed for part in turns]
            for turns, speed in zip(parts, speeds, strict=True)
        ]
        return StepTime(sum(map(max, zip(*times, strict=True))), sum(map(sum, times)) / num_ranks)

    unbalanced = _unbalanced(lengths, cost, limit, pads=pads)
    parts = (_sorted_in_runs if pads else _end_to_end)(samples, cost, speeds, limit)
    time_unbalanced, time_shared = time(unbalanced), time(parts)
    if time_shared.slowest >= (1 - _TOLERANCE) * time_unbalanced.slowest:
        return Share(unbalanced, time_unbalanced, time_unbalanced)
    return Share(parts, time_unbalanced, time_shared)


def _unbalanced(lengths: Sequence[Sequence[int]], cost: SampleCost, limit: int | None, *, pads: bool) -> Parts:
    """Return the samples of each rank where it drew them, split as they are without being shared out."""
    rule = SplitRule(by_length=True, forward_cost=cost.fixed / cost.per_token)
    split = [split_samples(own, rule, limit, pads=pads) for own in lengths]
    most = max(map(len, split))
    return [
        [[(rank, index) for index in part] for part in parts] + [[] for _ in range(len(parts), most)]
        for rank, parts in enumerate(split)
    ]


def _end_to_end(samples: Sequence[PlacedSample], cost: SampleCost, speeds: Sequence[float], limit: int | None) -> Parts:
    """Fill turn after turn with samples, from the longest on, in as few turns as they fit into."""
    least = 1
    if limit is not None:  # as many as if all parts were full
        least = max(-(-sum(min(tokens, limit) for tokens, _, _ in samples) // (len(speeds) * limit)), 1)
    for num_turns in count(least):
        turns, waiting = list[_Turn](), samples
        for turns_left in range(num_turns, 0, -1):
            turns.append(_Turn(waiting, turns_left, cost, speeds, limit))
            waiting = [sample for sample in waiting if not turns[-1].add(*sample)]
        if not waiting:
            break
    return [list(parts) for parts in zip(*(turn.parts for turn in turns), strict=True)]


class _Turn:
    """The parts that ranks run at the same time, while they are filled."""

    def __init__(
        self,
        waiting: Sequence[PlacedSample],
        turns_left: int,
        cost: SampleCost,
        speeds: Sequence[float],
        limit: int | None,
    ) -> None:
        work = sum(cost.of_sample(tokens) for tokens, _, _ in waiting) / turns_left + len(speeds) * cost.fixed
        longest = cost.of_part([tokens for tokens, _, _ in waiting[:1]])
        time = (1 + _TOLERANCE) * max(work / sum(speeds), longest / max(speeds))
        self.parts: list[list[Drawn]] = [[] for _ in speeds]
        self._is_last = turns_left == 1
        self._cost, self._speeds, self._limit = cost, speeds, limit
        self._tokens = [0] * len(speeds)
        self._room = [time * speed - cost.fixed for speed in speeds]  # cost of the samples that are still to come
        self._most_room = [(-room, rank) for rank, room in enumerate(self._room)]  # a heap, in which rooms may be old
        heapq.heapify(self._most_room)

    def add(self, tokens: int, home: int, index: int) -> bool:
        """Give a sample to a rank; return False if it has to wait for a later turn."""
        work, rank = self._cost.of_sample(tokens), home
        if not self._fits(rank, work, tokens):
            while -self._most_room[0][0] > self._room[self._most_room[0][1]]:
                rank = self._most_room[0][1]
                heapq.heapreplace(self._most_room, (-self._room[rank], rank))
            rank = self._most_room[0][1]
        if not self._fits(rank, work, tokens):
            ranks = [rank for rank in range(len(self.parts)) if self._holds(rank, tokens)] if self._is_last else []
            if not ranks:
                return False
            rank = min(ranks, key=lambda rank: (work - self._room[rank]) / self._speeds[rank])  # late by the least
        self.parts[rank].append((home, index))
        self._tokens[rank] += tokens
        self._room[rank] -= work
        return True

    def _fits(self, rank: int, work: float, tokens: int) -> bool:
        return work <= self._room[rank] and self._holds(rank, tokens)

    def _holds(self, rank: int, tokens: int) -> bool:
        return self._limit is None or not self._tokens[rank] or self._tokens[rank] + tokens <= self._limit


def _sorted_in_runs(
    samples: Sequence[PlacedSample], cost: SampleCost, speeds: Sequence[float], limit: int | None
) -> Parts:
    """Cut sorted samples into one run for each rank and turn, in as many turns as take the least time."""
    ranks = sorted(range(len(speeds)), key=lambda rank: -speeds[rank])  # the longest samples go to the fastest

    def runs_within(time: float, num_turns: int) -> list[list[PlacedSample]] | None:
        runs, start = list[list[PlacedSample]](), 0
        for rank in ranks * num_turns:
            end = start
            if start < len(samples):
                tokens = samples[start][0]
                end += max(int((time * speeds[rank] - cost.fixed) / cost.of_sample(tokens)), 0)
                if limit is not None:
                    end = min(end, start + samples_within(limit, tokens))
            runs.append(list(samples[start:end]))
            start = end
        return runs if start >= len(samples) else None

    longest = [tokens for tokens, _, _ in samples[:1]]
    best, best_time = list[list[PlacedSample]](), math.inf
    for num_turns in count(1):
        least = cost.of_part(longest) / max(speeds)
        most = (1 + _TOLERANCE) * cost.of_part(longest * len(samples)) / max(speeds)  # all in the first part
        if (runs := runs_within(most, num_turns)) is None:
            continue
        while most - least > _TOLERANCE / 10 * most:
            time = (least + most) / 2
            if (shorter := runs_within(time, num_turns)) is None:
                least = time
            else:
                most, runs = time, shorter
        if num_turns * most >= (1 - _TOLERANCE) * best_time:
            break
        best, best_time = runs, num_turns * most
    parts: Parts = [[] for _ in speeds]
    for start in range(0, len(best), len(ranks)):
        for rank, run in zip(ranks, best[start : start + len(ranks)], strict=True):
            parts[rank].append([(home, index) for _, home, index in run])
    return parts
