"""How a recipe's samples become micro-batches, for samples that no small model here can train on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.split import length_in_chunks
from adaptive_batching._torchtune.stock.host import OptimizersInBackward
from adaptive_batching._torchtune.stock.losses import NextToken
from adaptive_batching._torchtune.train import recipe_work
from adaptive_batching._torchtune.train.recipe_work import SplitPolicy, Splitter
from adaptive_batching._values import ByLength, Fixed
from tests.support.hosts import host, next_token


def of_length(length: int, label: int = 1, **more: Any) -> dict[str, Any]:
    return {"tokens": [1] * length, "labels": [label] * length, **more}


def split(
    samples: list[dict[str, Any]], capacity: int, objective: NextToken | None = None, failed: int | None = None
) -> list[list[dict[str, Any]]]:
    limit = TokenLimit(capacity)
    if failed is not None:
        limit.shrink(failed)
    splitter = Splitter(host(objective), SplitPolicy(ByLength(), limit=limit))
    return [micro_batch.samples for micro_batch in splitter.split(samples)]


def test_multimodal_samples_are_cut_by_number_whatever_their_lengths() -> None:
    samples = [of_length(n, encoder_input={"images": [torch.ones(2)]}) for n in (5, 900, 7, 40, 3, 300, 10)]
    assert [next_token().size(sample) for sample in samples] == [1] * 7
    assert [len(part) for part in split(samples, 4)] == [4, 3]
    assert [len(part) for part in split(samples, 4, failed=4)] == [2, 2, 2, 1]


def test_a_batch_without_targets_is_smaller_where_it_has_to_be() -> None:
    """Its loss is 0/0 however it runs; it must not run out of memory for ever."""
    [part] = split([of_length(10, -100)] * 8, 1000, failed=80)
    assert len(part) == 4


def test_the_labels_of_a_part_without_targets_count() -> None:
    """The first label of a sample is no target, but stock counts it."""
    samples = [of_length(1), of_length(9)]
    [part] = Splitter(host(), SplitPolicy(Fixed(1))).split(samples)
    assert (part.samples, part.weight, part.num_tokens) == (samples[1:], 10, 10)


def test_a_filler_has_a_target_so_that_its_loss_is_a_number() -> None:
    filler = next_token().filler
    assert filler([of_length(1)]) == of_length(2)
    assert filler([of_length(1), of_length(3, -100)]) == {"tokens": [1] * 3, "labels": [-100, -100, 0]}
    own = {"tokens": [1, 2, 3], "labels": [-100, -100, 3]}
    assert filler([of_length(4), own]) == own


def test_samples_that_are_padded_take_what_the_padding_takes() -> None:
    """As where short forwards would gather a sharded output layer less often than others."""
    in_chunks = next_token(num_chunks=8)
    in_chunks.equalize_collectives()
    parts = split([of_length(n) for n in (2, 3, 4, 5, 9)], 16, in_chunks)
    assert len(parts) == 3
    for part in parts:
        assert len(part) * max(length_in_chunks(len(sample["tokens"]), 8) for sample in part) <= 16


@pytest.mark.parametrize("in_backward", [False, True])
def test_packs_that_are_compiled_by_number_run_in_few_sizes_where_they_can_be_cut(
    in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_work, "compiles_each_size", lambda dataset: True)
    splitter = Splitter(
        host(ranks=SimpleNamespace(size=2), backward_optimizers=OptimizersInBackward() if in_backward else None),
        SplitPolicy(),
    )
    sizes, differ = [], set()
    for number in range(1, 40):
        sizes.append([len(part.samples) for part in splitter.split([of_length(10)] * number)])
        differ.add(splitter.may_differ)
    assert [sum(parts) for parts in sizes] == [*range(1, 40)]
    if in_backward:
        assert all(len(parts) == 1 for parts in sizes), "each part would be an optimizer step of its own"
        assert differ == {False}
    else:
        assert {size for parts in sizes for size in parts} == {1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32}
        assert differ == {True}, "a rank whose packs have no targets may run fewer"
