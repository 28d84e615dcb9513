"""Samples with images are split by number, as their tokens do not tell what they take."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from adaptive_batching.transformers import AdaptiveArguments
from tests.transformers import trainers
from tests.transformers.trainers import VOCABULARY, OutOfMemory, assert_alike, make_data, make_trainer

IMAGE, START, END = VOCABULARY - 1, VOCABULARY - 2, VOCABULARY - 3  # token numbers


def make_qwen() -> Any:
    """A model whose images have sizes of their own; the patches of a batch are laid end to end."""
    torch.manual_seed(0)
    vision = dict(depth=1, embed_dim=32, hidden_size=32, num_heads=2, patch_size=4, mlp_ratio=2)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = dict(trainers.SIZES, num_key_value_heads=2, rope_parameters=rope)
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=START,
        vision_end_token_id=END,
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config)


def with_images() -> list[dict[str, Any]]:
    """Samples of text after one or two images of several sizes."""
    chance, numbers = random.Random(0), torch.Generator().manual_seed(0)
    data = []
    for sample in make_data():
        grids = [(1, 2 * chance.randrange(1, 3), 4) for _ in range(chance.randrange(1, 3))]  # frames, rows, columns
        tokens = [rows * columns // 4 for _, rows, columns in grids]
        patches = torch.rand(4 * sum(tokens), 96, generator=numbers).tolist()
        before = [token for number in tokens for token in (START, *[IMAGE] * number, END)]
        text = [min(token, END - 1) for token in sample["input_ids"]]
        labels = [-100] * len(before) + [min(label, END - 1) for label in sample["labels"]]
        data.append({"input_ids": before + text, "labels": labels, "pixel_values": patches, "image_grid_thw": grids})
    return data


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    pixels = [torch.tensor(sample["pixel_values"]) for sample in samples]
    batch = trainers.collate(samples)
    grids = torch.tensor([grid for sample in samples for grid in sample["image_grid_thw"]])
    types = (batch["input_ids"] == IMAGE).int()
    return {**batch, "pixel_values": torch.cat(pixels), "image_grid_thw": grids, "mm_token_type_ids": types}


def test_samples_with_images_train_as_the_whole_batch_does(tmp_path: Path) -> None:
    def train(name: str, ours: AdaptiveArguments | None, most_tokens: int = 10**9) -> tuple[Any, OutOfMemory]:
        model = make_qwen()
        trainer = make_trainer(
            tmp_path / name, ours, model=model, data=with_images(), collator=collate, num_train_epochs=1,
            remove_unused_columns=False,
        )  # fmt: skip
        short = OutOfMemory(model, most_tokens)
        trainer.train()
        return trainer, short

    stock, _ = train("stock", None)
    for ours in (3, "auto"):
        split, _ = train(str(ours), AdaptiveArguments(micro_batch_size=ours))
        assert_alike(split, stock)
    found, short = train("short", AdaptiveArguments(micro_batch_size=8), 150)
    assert found.adaptive.num_recoveries >= 1
    assert max(shape.numel() for shape in short.forwards) <= 150
    assert_alike(found, stock)
    in_evaluation = OutOfMemory(found.model, 150, in_training=False)
    losses = [trainer.evaluate(with_images()[:20])["eval_loss"] for trainer in (found, stock)]
    assert in_evaluation.failures >= 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_probe_takes_the_sample_with_most_of_images(tmp_path: Path) -> None:
    data = sorted(with_images(), key=lambda sample: len(sample["pixel_values"]))
    model, seen = make_qwen(), []
    model.register_forward_pre_hook(
        lambda model, args, batch: seen.append((len(batch["input_ids"]), len(batch["pixel_values"]))), with_kwargs=True
    )
    settings = AdaptiveArguments(use_maximum_batch_size=True, max_batch_size=4)
    trainer = make_trainer(
        tmp_path, settings, model=model, data=data[:30], collator=collate, remove_unused_columns=False,
        per_device_train_batch_size=2,
    )  # fmt: skip
    assert trainers.prepared(trainer).probe.batch_size == 4
    assert max(seen, key=lambda each: each[1]) == (4, 3 * len(data[29]["pixel_values"]) + len(data[0]["pixel_values"]))
