"""What follows from the model of CUDA's caching allocator; the allocator itself: tests/emulated/test_card.py."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from adaptive_batching._trace.allocator import GIB, KIB, MIB, AllocatorFullError, CachingAllocator, ExpandableAllocator
from adaptive_batching._trace.reserved import SetUp, replay, reserved_by_default, reserved_for
from adaptive_batching._trace.traced_step import Recorded

# 2 GiB rest; 1 GiB is taken and freed, then two times 600 MiB
STEP = Recorded((1, ~1, 2, 3, ~2, ~3), (2 * GIB, GIB, 600 * MIB, 600 * MIB), 1)
BOTH = pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])


def test_at_the_limit_free_segments_are_given_back_and_then_it_is_over() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    allocator.give_back(allocator.take(60 * MIB))
    allocator.take(80 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 80 * MIB)
    with pytest.raises(AllocatorFullError):
        allocator.take(30 * MIB)


@BOTH
@pytest.mark.parametrize("size", [KIB, 60 * MIB])
def test_what_one_stream_frees_no_other_gets(kind: Any, size: int) -> None:
    allocator = kind()
    allocator.give_back(allocator.take(size, 1))
    reserved = allocator.reserved
    allocator.take(size, 1)
    assert allocator.reserved == reserved
    allocator.take(size, 2)
    assert allocator.reserved == 2 * reserved


@BOTH
@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_what_is_reserved_holds_what_is_allocated(kind: Any, seed: int) -> None:
    held: list[Any] = []
    draw, allocator, expected = random.Random(seed), kind(), 0
    for _ in range(500):
        if held and draw.random() < 0.45:
            block, size = held.pop(draw.randrange(len(held)))
            allocator.give_back(block)
            expected -= size
        else:
            size = int(2 ** draw.uniform(5, 28))
            held.append((allocator.take(size), size))
            expected += size
        assert expected <= allocator.allocated <= allocator.reserved <= allocator.peak_reserved
    for block, _ in held:
        allocator.give_back(block)
    assert allocator.allocated == 0


def test_the_least_limit_is_one_at_which_the_step_runs_and_expandable_segments_need_less() -> None:
    reserved, allocated = reserved_for(STEP), replay(CachingAllocator, STEP).peak_allocated
    assert allocated == 2 * GIB + 1200 * MIB
    assert allocated <= reserved.least <= reserved.by_default == reserved_by_default(STEP)
    replay(CachingAllocator, STEP, limit=reserved.least)
    replay(ExpandableAllocator, STEP, limit=reserved.least_expandable)
    assert reserved.expandable < reserved.by_default
    with pytest.raises(AllocatorFullError):
        replay(CachingAllocator, STEP, limit=allocated - 1)


def test_states_come_after_activations_and_what_a_step_keeps_replaces_what_the_one_before_kept() -> None:
    assert replay(CachingAllocator, replace(STEP, made={0: 3})).peak_allocated == 2 * GIB + 1200 * MIB
    keeps = Recorded((2, ~2, 3, ~1), (2 * GIB, 600 * MIB, GIB, 600 * MIB), 2)
    assert replay(CachingAllocator, keeps).peak_allocated == 2 * GIB + 600 * MIB + GIB
    in_the_other_order = Recorded((3, 2, ~2, ~1), keeps.sizes, 2)
    assert replay(CachingAllocator, in_the_other_order).peak_allocated == 2 * GIB + 1200 * MIB + GIB


@BOTH
def test_a_step_after_a_set_up_is_as_on_the_allocator_that_ran_it(kind: Any) -> None:
    """A weight of 2 GiB and the states of 600 MiB, made between blocks that the set-up then frees."""
    set_up = SetUp((0, 1, 2, ~0, 3, ~2, 4), (700 * MIB, STEP.sizes[0], 30 * MIB, 5 * MIB, 8 * MIB))
    whole, held = kind(), {}
    for event in set_up.events:
        if event >= 0:
            held[event] = whole.take(set_up.sizes[event])
        else:
            whole.give_back(held.pop(~event))
    copied, at_hand = set_up.start(kind)
    assert [len(blocks) for blocks in at_hand.values()] == [1, 1, 1]
    draw = random.Random(0)
    for _ in range(300):
        size = int(2 ** draw.uniform(5, 28))
        for allocator in (whole, copied):
            block = allocator.take(size)
            if size % 3:
                allocator.give_back(block)
    assert (whole.reserved, whole.allocated) == (copied.reserved, copied.allocated)
    assert set_up.start(kind)[0].reserved < copied.reserved, "each starts where the set-up has ended"


def test_a_set_up_leaves_its_cache_to_the_steps_unless_that_is_emptied() -> None:
    leaves = SetUp((0, 1, 2, ~0, ~2), (200 * MIB, STEP.sizes[0], 50 * MIB))
    alone, after = reserved_for(STEP), reserved_for(STEP, leaves)
    assert after.allocated == alone.allocated
    assert after.by_default > alone.by_default
    assert alone == reserved_for(STEP, replace(leaves, empties_cache=True))
