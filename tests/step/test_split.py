from __future__ import annotations

import random
from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.split import (
    Split,
    SplitRule,
    in_few_sizes,
    in_known_sizes,
    length_in_chunks,
    padded_tokens,
    samples_within,
    split_samples,
)

lengths_of_samples = st.lists(st.integers(1, 600), min_size=1, max_size=80)
limits = st.none() | st.integers(1, 5000)


def by_length(forward_cost: float = 0.0) -> SplitRule:
    return SplitRule(by_length=True, forward_cost=forward_cost)


rules = st.one_of(
    st.just(SplitRule()),
    st.builds(SplitRule, st.integers(1, 20), st.booleans()),
    st.builds(by_length, st.floats(0, 1000)),
)


def tokens(split: Split, lengths: list[int]) -> list[int]:
    return [padded_tokens([lengths[i] for i in micro_batch]) for micro_batch in split]


def cost(split: Split, lengths: list[int], forward_cost: float) -> float:
    return sum(tokens(split, lengths)) + forward_cost * len(split)


def in_order_within(lengths: list[int], max_tokens: int) -> Split:
    """Samples as they come, each micro-batch filled as far as the budget allows."""
    split: Split = [[]]
    for index, length in enumerate(lengths):
        if split[-1] and padded_tokens([*(lengths[i] for i in split[-1]), length]) > max_tokens:
            split.append([])
        split[-1].append(index)
    return split


@settings(max_examples=300, deadline=None)
@given(lengths_of_samples, rules, limits, st.booleans())
def test_each_sample_is_in_one_part_and_no_part_is_too_large_but_single_samples(
    lengths: list[int], rule: SplitRule, limit: int | None, pads: bool
) -> None:
    split = split_samples(lengths, rule, limit, pads=pads)
    everything = [*range(len(lengths))]
    in_split = [*chain(*split)]
    assert sorted(in_split) == everything
    for part in split:
        own = [lengths[index] for index in part]
        count = padded_tokens(own) if pads else sum(own)
        assert len(part) == 1 or limit is None or count <= limit
        assert rule.samples is None or len(part) <= rule.samples
    if rule.by_length and limit is not None and pads:
        longest = [max(lengths[index] for index in part) for part in split]
        assert longest == sorted(longest, reverse=True), "one that does not fit fails before work is done"
    if limit is None:
        assert in_split == everything, "in their order"
    assert split == split_samples(tuple(lengths), rule, limit, pads=pads), "on every rank"


class Counted(float):
    """A number that counts how often it is added."""

    times = 0

    def __radd__(self, other: float) -> float:
        Counted.times += 1
        return float(self) + other


def test_a_step_of_many_short_samples_is_split_in_about_one_look_at_each() -> None:
    chance = random.Random(0)
    lengths = [chance.randrange(1, 129) for _ in range(4096)]
    Counted.times = 0
    parts = split_samples(lengths, by_length(Counted(512)), 65_536)
    assert sorted(chain.from_iterable(parts)) == list(range(4096))
    assert Counted.times <= 2 * 4096, "not as many as there are samples in a part"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 200), st.integers(0, 60))
def test_no_other_cut_costs_less(lengths: list[int], max_tokens: int, forward_cost: int) -> None:
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    ends = range(1, len(order))
    every_split = [
        [order[a:b] for a, b in zip((0, *inner), (*inner, len(order)), strict=True)]
        for count in range(len(order))
        for inner in combinations(ends, count)
    ]
    allowed = [
        split
        for split in every_split
        if all(n <= max_tokens or len(m) == 1 for n, m in zip(tokens(split, lengths), split, strict=True))
    ]
    found = split_samples(lengths, by_length(forward_cost), max_tokens)
    assert cost(found, lengths, forward_cost) == min(cost(split, lengths, forward_cost) for split in allowed)


@settings(max_examples=300, deadline=None)
@given(lengths_of_samples, st.integers(1, 5000))
def test_samples_laid_end_to_end_make_few_parts_of_about_one_size(lengths: list[int], max_tokens: int) -> None:
    split = split_samples(lengths, by_length(), max_tokens, pads=False)
    sums = [sum(lengths[index] for index in part) for part in split]
    assert sums == sorted(sums, reverse=True), "one that does not fit fails before work is done"
    together = [count for count in sums if count <= max_tokens]
    assert max(together, default=0) - min(together, default=0) <= max(lengths), "none is left with little"
    assert len(together) <= 2 * sum(together) / max_tokens + 1
    assert len(split) <= len(in_order_within(lengths, max_tokens)), "padding would only take more"


def test_cuts_of_a_few_samples() -> None:
    assert [samples_within(1200, n) for n in (2000, 600, 401, 400, 100)] == [1, 2, 2, 3, 12]
    assert [len(part) for part in split_samples([10] * 9, by_length(), 30)] == [3, 3, 3]
    assert [len(part) for part in split_samples([10] * 10, by_length(20), 70)] == [5, 5]
    assert split_samples([5, 100, 6, 90], by_length(50), 200) == [[3, 1], [0, 2]], "longest first"
    assert split_samples([5, 100, 6, 90], by_length(), 110, pads=False) == [[3, 2, 0], [1]]
    assert split_samples([5, 200, 6, 90], by_length(), 100, pads=False) == [[1], [3], [2, 0]]
    for forward_cost, parts in ((0, 4), (1000, 1)):
        assert len(split_samples([10, 20, 30, 40], by_length(forward_cost), 1000)) == parts
    assert split_samples([10] * 7, SplitRule(3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert [len(part) for part in split_samples([10] * 9, SplitRule(4))] == [3, 3, 3]
    assert [len(part) for part in split_samples([10] * 9, SplitRule(4, is_even=False))] == [4, 4, 1]
    assert split_samples([9, 1, 1, 9], SplitRule(), 18) == [[0, 3], [1, 2]], "what is above a limit is sorted"
    assert split_samples([], SplitRule()) == []


@given(st.integers(1, 400), st.integers(0, 20))
def test_a_padded_length_comes_in_all_chunks(length: int, num_chunks: int) -> None:
    padded = length_in_chunks(length, num_chunks)

    def chunks(tokens: int) -> int:  # as torch.chunk, which this module does not import
        return len(range(0, tokens, -(-tokens // num_chunks)))

    if num_chunks < 2:
        assert padded == length
        return
    assert chunks(padded) == num_chunks
    assert all(chunks(shorter) != num_chunks for shorter in range(length, padded)), "no longer than need be"
    assert length < num_chunks * (num_chunks - 1) or padded == length


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.integers(1, 8))
def test_however_many_sizes_are_asked_for_few_are_run(asked: list[int], max_sizes: int) -> None:
    known: set[int] = set()
    for size in asked:
        parts = in_known_sizes(size, known, max_sizes)
        pieces = in_few_sizes([[*range(size)]], known, max_sizes)
        assert [len(piece) for piece in pieces] == parts and [*chain(*pieces)] == [*range(size)]
        assert parts[0] >= size * 2 / 3
        known.update(parts)
    round_sizes = {factor << k for factor in (1, 3) for k in range(8)}
    assert len(known - round_sizes) <= max_sizes


def test_the_limit_halves_grows_back_and_stays_below_what_failed_twice() -> None:
    limit = TokenLimit(steps_to_recover=2)
    limit.note_clean_step()
    assert limit.max_tokens is None
    limit.shrink(1000)
    assert limit.max_tokens == 500
    seen: list[int | None] = []
    for _ in range(4):
        limit.note_clean_step()
        seen.append(limit.max_tokens)
    assert seen == [500, 1000, 1000, None], "and beyond what failed it is lifted"
    limit.shrink(900)
    for _ in range(10):
        limit.note_clean_step()
    assert limit.max_tokens == 999, "900 and 1000 have failed: two failures at or below 1000"
    assert limit.num_recoveries == 2
