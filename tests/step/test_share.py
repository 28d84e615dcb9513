from __future__ import annotations

import math
import random
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_batching._step.share import Drawn, Parts, SampleCost, share_out
from adaptive_batching._step.split import SplitRule, split_samples

drawn_lengths = st.lists(st.lists(st.integers(1, 3000), max_size=9), min_size=1, max_size=6)
costs = st.builds(SampleCost, st.floats(0, 1000), st.floats(0.1, 2), st.floats(0, 0.001))
TOKENS = SampleCost(fixed=0.0)
MODEL = SampleCost(fixed=0.0, per_token_squared=SampleCost.of_model(2048).per_token_squared)


def draw(generator: random.Random, num_ranks: int, num_samples: int) -> list[list[int]]:
    """Lengths as of instructions: log-normal, with a median of 200 tokens and a mean of 296, at most 2,048."""
    return [
        [min(math.ceil(generator.lognormvariate(math.log(200), 0.9)), 2048) for _ in range(num_samples)]
        for _ in range(num_ranks)
    ]


def times_of(parts: Parts, lengths: list[list[int]], cost: SampleCost, *, pads: bool = False) -> list[list[float]]:
    """Time of each part, by rank and turn."""

    def time(part: list[Drawn]) -> float:
        own = [lengths[home][index] for home, index in part]
        own = [max(own)] * len(own) if pads and own else own
        return cost.fixed + sum(cost.per_token * tokens + cost.per_token_squared * tokens**2 for tokens in own)

    return [[time(part) for part in turns] for turns in parts]


def in_step(times: list[list[float]]) -> float:
    """Time of a step in which ranks wait for each other in every turn."""
    return sum(max(turn) for turn in zip(*times, strict=True))


@settings(max_examples=300, deadline=None)
@given(drawn_lengths, costs, st.none() | st.integers(1, 6000), st.booleans(), st.data())
def test_each_sample_is_in_one_part_within_the_limit_and_no_step_is_slower(
    lengths: list[list[int]], cost: SampleCost, limit: int | None, pads: bool, data: st.DataObject
) -> None:
    speeds = data.draw(st.none() | st.lists(st.floats(0.5, 2), min_size=len(lengths), max_size=len(lengths)))
    share = share_out(lengths, cost, speeds, limit, pads=pads)
    placed = sorted(chain.from_iterable(chain.from_iterable(share.parts)))
    assert placed == [(rank, index) for rank, own in enumerate(lengths) for index in range(len(own))]
    assert len(share.parts) == len(lengths) and len({len(turns) for turns in share.parts}) == 1
    for part in chain.from_iterable(share.parts):
        own = [lengths[home][index] for home, index in part]
        assert limit is None or len(part) <= 1 or (len(own) * max(own) if pads else sum(own)) <= limit
    rule = SplitRule(by_length=True, forward_cost=cost.fixed / cost.per_token)
    drawn = [
        [[(r, i) for i in part] for part in split_samples(own, rule, limit, pads=pads)] for r, own in enumerate(lengths)
    ]
    most = max(map(len, drawn))
    times_drawn, times = (
        [[time / speed for time in own] for own, speed in zip(each, speeds or [1.0] * len(lengths), strict=True)]
        for each in (
            times_of([own + [[]] * (most - len(own)) for own in drawn], lengths, cost, pads=pads),
            times_of(share.parts, lengths, cost, pads=pads),
        )
    )
    assert in_step(times) <= in_step(times_drawn) * (1 + 1e-9)
    assert (share.unbalanced.slowest, share.time.slowest) == pytest.approx((in_step(times_drawn), in_step(times)))
    assert share.time.mean == pytest.approx(sum(map(sum, times)) / len(lengths))
    assert share == share_out(tuple(map(tuple, lengths)), cost, speeds, limit, pads=pads), "on every rank"


def test_drawn_steps_take_two_percent_more_than_the_least_possible_and_most_samples_stay() -> None:
    generator = random.Random(0)
    moved = tokens_moved = tokens = 0
    for _ in range(1000):
        lengths = draw(generator, 8, 8)
        share = share_out(lengths, MODEL)
        samples = [MODEL.of_sample(tokens) for tokens in chain(*lengths)]
        assert share.time.slowest <= 1.02 * max(sum(samples) / 8, max(samples))
        moved += share.num_moved
        tokens += sum(map(sum, lengths))
        tokens_moved += sum(
            lengths[home][index]
            for rank, turns in enumerate(share.parts)
            for part in turns
            for home, index in part
            if home != rank
        )
    assert moved < 0.27 * 64 * 1000
    assert tokens_moved < 0.18 * tokens


@pytest.mark.parametrize(("num_samples", "limit", "most"), [(8, 4096, 1.02), (32, 4096, 1.01), (32, 2048, 1.02)])
def test_ranks_wait_for_nobody_in_any_turn(num_samples: int, limit: int, most: float) -> None:
    generator = random.Random(0)
    time, least = 0.0, 0.0
    for _ in range(50):
        lengths = draw(generator, 8, num_samples)
        samples = [MODEL.of_sample(tokens) for tokens in chain(*lengths)]
        time += share_out(lengths, MODEL, limit=limit).time.slowest
        least += max(sum(samples) / 8, max(samples))
    assert time <= most * least


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([1.0, 1.5, 3.0]), min_size=2, max_size=6), st.floats(0, 500))
def test_a_rank_gets_work_by_its_speed(speeds: list[float], fixed: float) -> None:
    lengths = [[20] * 100 for _ in speeds]
    share = share_out(lengths, SampleCost(fixed), speeds)
    times = [fixed / speed + 20 * len(turns[0]) / speed for turns, speed in zip(share.parts, speeds, strict=True)]
    assert max(times) <= 1.02 * (len(speeds) * (fixed + 2000) / sum(speeds)) + 20
    assert (share.num_moved == 0) == (len(set(speeds)) == 1)


def test_the_longest_sample_goes_to_a_rank_that_is_fast_enough_and_the_last_to_the_one_that_ends_first() -> None:
    assert share_out([[1000], [100, 100]], TOKENS, [0.5, 1.0]).parts == [[[(1, 0), (1, 1)]], [[(0, 0)]]]
    assert share_out([[100], [900, 100]], TOKENS, [0.5, 1.0], pads=True).parts == [[[(0, 0), (1, 1)]], [[(1, 0)]]]
    assert share_out([[50, 50], [70, 70]], TOKENS, [0.5, 1.0]).parts == [[[(0, 0)]], [[(1, 0), (1, 1), (0, 1)]]]


def test_what_is_even_stays_where_it_is() -> None:
    share = share_out([[100] * 5] * 4, SampleCost(), limit=250)
    assert share.num_moved == 0 and share.time == share.unbalanced and share.time.over_mean == 1.0
    assert share_out([[990, 10], [500, 500]], TOKENS).num_moved == 0
    assert share_out([[1005], [995]], TOKENS).num_moved == 0, "less than is worth sending"
    assert share_out([[], []], SampleCost(), limit=10).parts == [[], []]


def test_samples_move_from_the_rank_that_has_too_much_and_a_turn_is_as_long_as_its_longest_sample() -> None:
    share = share_out([[900, 300], [200, 200]], TOKENS)
    assert share.parts == [[[(0, 0)]], [[(0, 1), (1, 0), (1, 1)]]]
    assert (share.unbalanced.slowest, share.time.slowest, share.time.mean, share.num_moved) == (1200, 900, 800, 1)
    share = share_out([[1000, 300, 50], [50, 500, 500]], TOKENS, limit=1000)
    assert share.parts == [[[(0, 0)], [(0, 1)]], [[(1, 1), (1, 2)], [(0, 2), (1, 0)]]]


@pytest.mark.parametrize("limit", [None, 4096])
def test_padded_samples_run_beside_others_of_their_length_in_parts_that_take_as_long(limit: int | None) -> None:
    generator, cost = random.Random(0), SampleCost.of_model(2048)
    drawn, shared, mean = 0.0, 0.0, 0.0
    for _ in range(20):
        lengths = draw(generator, 8, 32)
        share = share_out(lengths, cost, limit=limit, pads=True)
        drawn, shared, mean = drawn + share.unbalanced.slowest, shared + share.time.slowest, mean + share.time.mean
        runs = [
            sorted(lengths[home][index] for home, index in part)
            for turn in zip(*share.parts, strict=True)
            for part in turn
        ]
        runs = [run for run in runs if run]
        assert all(shorter[-1] <= longer[0] for longer, shorter in pairwise(runs))
    assert shared <= 1.12 * mean
    assert drawn >= 1.5 * shared


def test_the_fixed_cost_is_that_of_a_forward_and_attention_that_of_a_sample() -> None:
    cost = SampleCost.of_model(4096)
    assert cost.of_sample(24576) == pytest.approx(2 * 24576), "attention takes as long as all else"
    assert cost.of_part([100, 300]) == pytest.approx(cost.of_part([100]) + cost.of_part([300]) - cost.fixed)
    assert cost.of_part([100, 300], pads=True) == cost.of_part([300, 300])
    assert cost.of_part([], pads=True) == cost.of_part([]) == cost.fixed > 0
