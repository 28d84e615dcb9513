"""Models with images: a plan counts what a real step takes, with one image of as many tiles as there can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adaptive_batching._torchtune.plan.meta_setup import Data, set_up
from adaptive_batching._torchtune.plan.planning import NotPlannedError, PlanRequest, sketch
from adaptive_batching._torchtune.stock.stand_ins import image_of, run_without_values
from adaptive_batching._trace.trace import trace_step
from tests.support import vision
from tests.torchtune.test_meta_setup import (
    LENGTH,
    assert_same,
    config,
    predicted_bytes,
    real_host,
    step_of,
    transient_bytes,
)

RECIPE = "full_finetune_single_device"


def small(*overrides: str, **paths: Any) -> Any:
    cfg = config("full", *vision.OVERRIDES, *overrides, **paths)
    cfg.model = {key: cfg.model[key] for key in ("_component_", "decoder_trainable") if key in cfg.model}
    return cfg


@pytest.mark.parametrize(
    "override", ["seed=0", "enable_activation_checkpointing=True", "model.decoder_trainable=False"]
)
def test_the_step_on_paper_is_that_of_the_recipe_and_takes_what_it_takes(
    override: str, inputs: Path, tmp_path: Path
) -> None:
    meta_setup, _ = set_up(RECIPE, small(override, "dtype=bf16"), Data(LENGTH, 50))
    ours = trace_step(step_of(meta_setup, meta_setup.loader.dataset[0]))
    real = real_host("full", small(override, "dtype=bf16", inputs=inputs, out=tmp_path))
    assert_same(ours, trace_step(step_of(real, vision.sample(LENGTH, torch.bfloat16))))
    precise = step_of(real_host("full", small(override, inputs=inputs, out=tmp_path)), vision.sample(LENGTH))
    assert predicted_bytes(trace_step(precise)) == pytest.approx(transient_bytes(precise), rel=0.02)


def test_what_is_assumed_of_images_follows_from_the_model_and_is_said() -> None:
    image = image_of(vision.model())
    assert image is not None
    assert (image.tiles, image.size, image.channels) == (vision.TILES, vision.TILE, 3)
    assert image.tokens_per_tile == vision.TOKENS_PER_TILE
    said = sketch(PlanRequest(RECIPE, small("dtype=bf16")), LENGTH).assumes
    assert said == "one image of 4 tiles of 56 x 56 pixels in each sample"
    assert sketch(PlanRequest(RECIPE, config("full")), LENGTH).assumes is None


def test_batches_of_images_that_are_not_known_are_refused() -> None:
    with pytest.raises(NotPlannedError, match=r"collate_fn=my\.collate_images"):
        sketch(PlanRequest(RECIPE, small("collate_fn=my.collate_images")), LENGTH)


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
