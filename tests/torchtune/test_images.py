"""Models with images: what a dry run makes for them."""

from __future__ import annotations

from adaptive_batching._torchtune.stock.images import image_of
from tests.support import vision


def test_the_image_of_a_dry_run_follows_from_the_model() -> None:
    image = image_of(vision.model())
    assert image is not None
    assert (image.tiles, image.size, image.channels) == (vision.TILES, vision.TILE, 3)
    assert image.tokens_per_tile == vision.TOKENS_PER_TILE
