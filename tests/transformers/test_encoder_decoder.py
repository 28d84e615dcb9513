"""Samples of an encoder and a decoder are as long as both sides are, and the longest of both is probed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

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
    assert trainers.prepared(ours).longest == 70
    assert any(shape[1:] == (40, 30) for shape in shapes.seen)
    trainers.without_probe(ours, 3 * 70)
    shapes.seen.clear()
    ours.train()
    assert_alike(ours, stock)
    parts = shapes.seen[1:]  # the first is a filler
    assert len(parts) > stock.state.global_step
    assert max(rows * source for rows, source, _ in parts) <= 3 * 40
    assert max(rows * target for rows, _, target in parts) <= 3 * 30


def test_samples_with_a_label_each_train_and_are_evaluated_as_before(tmp_path: Path) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        config = transformers.BartConfig(
            vocab_size=trainers.VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_labels=3, dropout=0.0,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
        )  # fmt: skip
        return transformers.BartForSequenceClassification(config)

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        tokens = trainers.collate([{**sample, "labels": sample["input_ids"]} for sample in samples])
        return {**tokens, "labels": torch.tensor([sample["labels"] for sample in samples])}

    texts = [[token for token in sample["input_ids"] if token != 2] + [2] for sample in trainers.make_data(24)]
    data = [{"input_ids": text, "labels": text[0] % 3} for text in texts]
    made: dict[str, Any] = dict(collator=collate, data=data, num_train_epochs=1)
    stock = trained(tmp_path / "stock", model=model(), **made)
    ours = make_trainer(tmp_path / "ours", AdaptiveArguments(micro_batch_size="auto"), model=model(), **made)
    trainers.without_probe(ours, 60).train()
    assert_alike(ours, stock)
    trainers.OutOfMemory(ours.model, 60, in_training=False)
    assert ours.evaluate(data)["eval_loss"] == pytest.approx(stock.evaluate(data)["eval_loss"], rel=1e-4)
