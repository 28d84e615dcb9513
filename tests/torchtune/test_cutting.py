"""How a recipe's samples become micro-batches, for samples that no small model here can train on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptive_batching._micro_batches.cut import Capacity, length_in_chunks
from adaptive_batching._micro_batches.limits import TokenLimit
from adaptive_batching._torchtune import cutting
from adaptive_batching._torchtune.cutting import Cutter, Execution
from adaptive_batching._torchtune.data import index_of
from adaptive_batching._torchtune.host import Gate
from adaptive_batching._torchtune.losses import NextToken
from adaptive_batching._values import ByLength, Fixed
from tests.support.hosts import host, next_token


def with_image(length: int) -> dict[str, Any]:
    tokens = list(range(length))
    return {"tokens": tokens, "labels": tokens, "mask": [False] * length, "encoder_input": {"images": [torch.ones(2)]}}


def cut(
    samples: list[dict[str, Any]], limit: TokenLimit, capacity: Capacity, objective: NextToken | None = None
) -> list[list[dict[str, Any]]]:
    cutter = Cutter(host(objective), Execution(ByLength(), capacity, limit=limit))
    return [micro_batch.samples for micro_batch in cutter.cut(samples)]


def test_multimodal_samples_are_cut_by_number_whatever_their_lengths() -> None:
    samples = [with_image(length) for length in (5, 900, 7, 40, 3, 300, 10)]
    assert [next_token().size(sample) for sample in samples] == [1] * 7
    parts = cut(samples, TokenLimit(), capacity=Capacity(((1, 4),)))
    assert [len(part) for part in parts] == [4, 3]
    limit = TokenLimit()
    limit.shrink(4)
    assert [len(part) for part in cut(samples, limit, capacity=Capacity(((1, 4),)))] == [2, 2, 2, 1]


def test_a_batch_without_targets_is_smaller_where_it_has_to_be() -> None:
    """Its loss is 0/0 however it runs; it must not run out of memory for ever."""
    samples = [{"tokens": [1] * 10, "labels": [-100] * 10} for _ in range(8)]
    limit = TokenLimit()
    limit.shrink(80)
    [part] = cut(samples, limit, capacity=Capacity.of_tokens(1000))
    assert len(part) == 4


def test_the_labels_of_a_part_without_targets_count() -> None:
    """The first label of a sample is no target, but stock counts it."""
    samples = [{"tokens": [1] * n, "labels": [1] * n} for n in (1, 9)]
    cutter = Cutter(host(), Execution(Fixed(1)))
    [part] = cutter.cut(samples)
    assert (part.samples, part.weight, part.num_tokens) == (samples[1:], 10, 10)


def test_a_filler_has_a_target_so_that_its_loss_is_a_number() -> None:
    filler = next_token().filler
    assert filler([{"tokens": [7], "labels": [7]}]) == {"tokens": [7, 7], "labels": [7, 7]}
    several = [{"tokens": [7], "labels": [7]}, {"tokens": [1, 2, 3], "labels": [-100] * 3}]
    assert filler(several) == {"tokens": [1, 2, 3], "labels": [1, 2, 3]}


def test_a_rank_with_fewer_forwards_fills_up_with_some_that_weigh_nothing() -> None:
    ranks = CountingRanks(at_least=3)
    cutter = Cutter(host(ranks=ranks), Execution(Fixed(2)))
    samples = [{"tokens": [1] * n, "labels": [1] * n} for n in (3, 4)]
    micro_batches = cutter.cut(samples)
    assert [(each.is_filler, each.weight, each.num_tokens) for each in micro_batches] == [
        (False, None, None), (True, 0, 0), (True, 0, 0),
    ]  # fmt: skip


def test_samples_apart_without_targets_leave_all_to_the_others() -> None:
    samples = [{"tokens": [1] * 10, "labels": [label] * 10} for label in (-100, 1, 1, 1)]
    cutter = Cutter(host(), Execution(ByLength(), Capacity.of_tokens(1000)))
    first, others = cutter.cut_apart([samples], 1)
    assert first == []
    assert [(each.samples, each.weight, each.num_tokens) for each in others] == [(samples[1:], 30, None)]


def test_text_samples_are_cut_by_tokens() -> None:
    samples = [{"tokens": [1] * n, "labels": [1] * n} for n in (5, 900, 7, 40, 3, 300, 10)]
    parts = cut(samples, TokenLimit(), capacity=Capacity.of_tokens(1000))
    assert sorted(len(sample["tokens"]) for part in parts for sample in part) == [3, 5, 7, 10, 40, 300, 900]
    assert all(len(part) * max(len(sample["tokens"]) for sample in part) <= 1000 for part in parts)
    assert index_of(samples[0]) is None


def test_samples_that_are_padded_take_what_the_padding_takes() -> None:
    """As where short forwards would gather a sharded output layer less often than others."""
    samples = [{"tokens": [1] * n, "labels": [1] * n} for n in (2, 3, 4, 5, 9)]
    in_chunks = next_token(num_chunks=8)
    in_chunks.equalize_collectives()
    parts = cut(samples, TokenLimit(), Capacity.of_tokens(16), in_chunks)
    assert len(parts) == 3
    for part in parts:
        assert len(part) * max(length_in_chunks(len(sample["tokens"]), 8) for sample in part) <= 16


class CountingRanks:
    """Two ranks; counts how often they agree on a number of forwards."""

    size = 2

    def __init__(self, at_least: int = 0) -> None:
        self.agreements = 0
        self._at_least = at_least

    def largest(self, value: float) -> float:
        self.agreements += 1
        return max(value, self._at_least)


@pytest.mark.parametrize("in_backward", [False, True])
def test_packs_that_are_compiled_by_number_run_in_few_sizes_where_they_can_be_cut(
    in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "compiles_each_size", lambda dataset: True)
    ranks = CountingRanks()
    cutter = Cutter(host(ranks=ranks, gate=Gate() if in_backward else None), Execution(is_stock=False))
    pack = {"tokens": [1] * 10, "labels": [1] * 10}
    sizes = [[len(each.samples) for each in cutter.cut([pack] * number)] for number in range(1, 40)]
    assert [sum(parts) for parts in sizes] == [*range(1, 40)]
    if in_backward:
        assert all(len(parts) == 1 for parts in sizes), "each part would be an optimizer step of its own"
        assert ranks.agreements == 0
    else:
        assert {size for parts in sizes for size in parts} == {1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32}
        assert ranks.agreements == len(sizes), "a rank whose packs have no targets may run fewer"
