"""Models with images: what a dry run makes for them, and forwards beside training's."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from torch import nn
from torchtune.data import padded_collate_tiled_images_and_mask

from adaptive_batching._torchtune.stock.images import image_of
from adaptive_batching._torchtune.stock.losses import NextToken
from tests.support import vision


def objective(**arguments: Any) -> NextToken:
    return NextToken(padded_collate_tiled_images_and_mask, nn.CrossEntropyLoss(), contextlib.nullcontext(), **arguments)


def test_the_image_of_a_dry_run_follows_from_the_model() -> None:
    image = image_of(vision.model())
    assert image is not None
    assert (image.tiles, image.size, image.channels) == (vision.TILES, vision.TILE, 3)
    assert image.tokens_per_tile == vision.TOKENS_PER_TILE


@pytest.mark.parametrize("has_targets", [True, False])
def test_the_loss_of_a_filler_with_an_image_is_finite(has_targets: bool) -> None:
    sample = vision.sample(20)
    if not has_targets:
        sample["labels"] = [-100] * 20
    filler = objective().filler([sample])
    loss, _ = objective().loss(vision.model(), objective().collate([filler]), 0.0)
    assert loss.isfinite() and objective().counts([filler]).terms == (16 + 2 if has_targets else 1)


def test_the_smallest_batch_of_samples_with_images_runs_the_encoder() -> None:
    model, ran = vision.model(), list[bool]()
    model.get_submodule("encoder").register_forward_hook(lambda *_: ran.append(True))
    loss, _ = objective().loss(model, objective().smallest_batch([vision.sample(20)]), 1.0)
    assert ran and loss.isfinite()
