"""Samples of an encoder and a decoder are as long as both sides are, and the longest of both is probed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from adaptive_batching.transformers import AdaptiveArguments
from tests.transformers import trainers
from tests.transformers.trainers import assert_alike, make_trainer, trained

chance = random.Random(0)


def ids(count: int) -> list[int]:
    return [chance.randrange(1, trainers.VOCABULARY) for _ in range(count)]


def pairs() -> list[dict[str, Any]]:
    """Long inputs with short targets, short ones with long targets, and others."""
    chance.seed(0)
    sizes = [(40, 2), (3, 30), *((chance.randrange(3, 20), chance.randrange(2, 20)) for _ in range(38))]
    return [{"input_ids": ids(source), "labels": ids(target)} for source, target in sizes]


class Shapes:
    """The shapes of inputs and targets of forwards in training."""

    def __init__(self, model: Any) -> None:
        self.seen: list[tuple[int, int, int]] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: Any, args: Any, given: Any) -> None:
        if torch.is_grad_enabled():
            self.seen.append((*given["input_ids"].shape, given["labels"].shape[1]))


def test_the_longest_input_with_the_longest_target_is_probed_and_no_part_has_more_of_either(tmp_path: Path) -> None:
    made: dict[str, Any] = dict(data=pairs(), collator=trainers.collate)
    stock = trained(tmp_path / "stock", model=trainers.make_t5(), **made)
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
