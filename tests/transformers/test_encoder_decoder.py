"""Samples of an encoder and a decoder are as long as both sides are, and the longest of both is probed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra transformers)")

import torch  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402

from adaptive_batching._transformers.handed_out import PairLength, length_function  # noqa: E402
from adaptive_batching.transformers import AdaptiveArguments  # noqa: E402
from tests.transformers import trainers  # noqa: E402
from tests.transformers.trainers import assert_alike, make_trainer  # noqa: E402

chance = random.Random(0)


def ids(count: int) -> list[int]:
    return [chance.randrange(1, trainers.VOCABULARY) for _ in range(count)]


def pairs() -> list[dict[str, Any]]:
    """Long inputs with short targets, short ones with long targets, and others."""
    chance.seed(0)
    sizes = [(40, 2), (3, 30), *((chance.randrange(3, 20), chance.randrange(2, 20)) for _ in range(38))]
    return [{"input_ids": ids(source), "labels": ids(target)} for source, target in sizes]


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    def padded(name: str, value: int) -> torch.Tensor:
        rows = [torch.tensor(sample[name]) for sample in samples]
        return pad_sequence(rows, batch_first=True, padding_value=value)

    found = padded("input_ids", 0)
    return {"input_ids": found, "attention_mask": found.ne(0).long(), "labels": padded("labels", -100)}


class Shapes:
    """The shapes of inputs and targets of forwards in training."""

    def __init__(self, model: Any) -> None:
        self.seen: list[tuple[int, int, int]] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: Any, args: Any, given: Any) -> None:
        if torch.is_grad_enabled():
            self.seen.append((*given["input_ids"].shape, given["labels"].shape[1]))


def test_the_longest_input_with_the_longest_target_is_probed_and_no_part_has_more_of_either(tmp_path: Path) -> None:
    made: dict[str, Any] = dict(data=pairs(), collator=collate)
    stock = make_trainer(tmp_path / "stock", model=trainers.make_t5(), **made)
    stock.train()
    auto = AdaptiveArguments(micro_batch_size="auto")
    ours = make_trainer(tmp_path / "ours", auto, model=trainers.make_t5(), **made)
    shapes = Shapes(ours.model)
    ours.adaptive.find()
    assert ours.adaptive.longest == 70
    assert any(shape[1:] == (40, 30) for shape in shapes.seen)
    trainers.without_probe(ours, 3 * 70)
    shapes.seen.clear()
    ours.train()
    assert_alike(ours, stock)
    parts = shapes.seen[1:]  # the first is a filler
    assert len(parts) > stock.state.global_step
    assert max(rows * source for rows, source, _ in parts) <= 3 * 40
    assert max(rows * target for rows, _, target in parts) <= 3 * 30


def test_a_pair_counts_as_the_larger_of_its_shares() -> None:
    data = pairs()
    length = PairLength(data, data.__getitem__)
    assert length.longest == {"input_ids": data[0]["input_ids"], "labels": data[1]["labels"]}
    for sample in data:
        least = len(sample["input_ids"]) / 40, len(sample["labels"]) / 30
        assert max(least) * 70 <= length(sample) < max(least) * 70 + 1


@pytest.mark.parametrize(("targets", "expected"), [(True, 5), (False, 3)])
def test_labels_count_for_a_decoder_alone(*, targets: bool, expected: int) -> None:
    sample = {"input_ids": [1, 2, 3], "labels": [4, 5]}
    length = length_function(sample, targets=targets)
    assert length is not None and length(sample) == expected
