"""Models with images: what a dry run makes for them, and how a probe runs them."""

from __future__ import annotations

from typing import Any

import torch

from adaptive_batching._torchtune.stock.stand_ins import image_of, run_without_values
from tests.support import vision


def test_the_image_of_a_dry_run_follows_from_the_model() -> None:
    image = image_of(vision.model())
    assert image is not None
    assert (image.tiles, image.size, image.channels) == (vision.TILES, vision.TILE, 3)
    assert image.tokens_per_tile == vision.TOKENS_PER_TILE


def test_adding_positions_at_once_computes_what_torchtune_computes() -> None:
    encoder: Any = vision.model().encoder.clip
    embeddings = [encoder.pre_tile_pos_embed, encoder.token_pos_embedding]
    images, ratios = torch.rand(3, vision.TILES, vision.TOKENS_PER_TILE, 64), torch.tensor([[2, 2]] * 3)
    for module in embeddings:
        torch.nn.init.ones_(module.gate)
    with torch.no_grad():
        as_in_torchtune = [module(images.clone(), ratios) for module in embeddings]
        run_without_values(encoder)
        at_once = [module(images.clone(), ratios) for module in embeddings]
    assert all(map(torch.equal, at_once, as_in_torchtune))
    assert not any(torch.equal(positions, images) for positions in at_once)
