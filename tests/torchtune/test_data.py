from __future__ import annotations

from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from adaptive_batching._torchtune.stock.data import SampleLoader, check_data_fills_a_step, stretch
from adaptive_batching._torchtune.stock.objective import worst_case_sample
from adaptive_batching._values import ConfigError
from tests.support.hosts import ALONE, next_token

DATA = [{"tokens": list(range(n)), "labels": [-100, *range(1, n)]} for n in (5, 9, 3, 7, 4, 8, 6)]


def stock_loader(batch_size: int) -> StatefulDataLoader:
    sampler = StatefulDistributedSampler(DATA, num_replicas=1, rank=0, shuffle=True, seed=0)  # type: ignore[arg-type]
    return StatefulDataLoader(DATA, batch_size=batch_size, sampler=sampler, collate_fn=lambda x: x, drop_last=True)


def test_samples_come_in_stock_order_at_every_batch_size() -> None:
    stock = stock_loader(2)
    loader = SampleLoader(stock_loader(2))
    for epoch, batch_size in enumerate((2, 2, 3, 6)):
        loader.set_batch_size(batch_size)
        for each in (stock, loader):
            each.sampler.set_epoch(epoch)
        expected = [sample for batch in stock for sample in batch][: len(loader) * batch_size]
        batches = list(loader)
        assert {len(batch) for batch in batches} == {batch_size}
        assert [sample for batch in batches for sample in batch] == expected


@pytest.mark.parametrize(
    ("samples", "batch_size", "accumulation", "message"),
    [(0, 1, 1, "dataset is empty"), (3, 4, 1, "dataset has 3 samples"), (7, 4, 2, "at most 7")],
)
def test_data_that_fill_no_step_are_refused(samples: int, batch_size: int, accumulation: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_data_fills_a_step(samples, batch_size, accumulation)
    check_data_fills_a_step(batch_size * accumulation, batch_size, accumulation)


def worst_case(data: list[Any], **limits: int) -> dict[str, Any]:
    unset = {"sequence_length": None, "tokenizer_max": None, "model_max": None}
    return worst_case_sample(data, next_token(), **{**unset, **limits}, ranks=ALONE)


def test_the_worst_case_is_as_long_as_asked_for_else_as_truncated_to_else_as_the_longest_sample() -> None:
    def length(**limits: int) -> int:
        sample = worst_case(DATA, **limits)
        assert len(sample["tokens"]) == len(sample["labels"])
        return len(sample["tokens"])

    assert length(sequence_length=20, tokenizer_max=12) == 20
    assert length(tokenizer_max=12) == 12
    assert length(tokenizer_max=12, model_max=11) == 11
    assert length() == length(model_max=9) == 9
    with pytest.raises(ConfigError, match="longest sample has 9 tokens, but the model takes at most 8"):
        length(model_max=8)
    with pytest.raises(ConfigError, match="sequence_length asks for 20 tokens, but the model takes at most 8"):
        length(model_max=8, sequence_length=20)
    images: list[dict[str, Any]] = [{**sample, "encoder_input": object()} for sample in DATA]
    assert worst_case(images, tokenizer_max=100) == images[1], "not stretched"
    with pytest.raises(ConfigError, match="multimodal data, whose longest sample has 9 tokens"):
        worst_case(images, sequence_length=20)


def test_a_stretched_sample_has_a_target_to_learn_from() -> None:
    sample = {"tokens": [1, 2, 3, 4], "labels": [-100, -100, -100, 4]}
    assert stretch(sample, 6) == {"tokens": [1, 2, 3, 4, 1, 2], "labels": [-100, -100, -100, 4, -100, -100]}
    assert stretch({**sample, "seq_lens": [4]}, 2) is None, "a pack has its length"
    assert stretch(sample, 2) == {"tokens": [1, 2], "labels": [1, 2]}
