"""Models with images: the probe traces them, a dry run makes images for them, and a plan refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adaptive_batching._torchtune.plan.planning import NotPlannedError, PlanRequest, sketch
from adaptive_batching._torchtune.stock.stand_ins import image_of, run_without_values
from adaptive_batching._trace.trace import trace_step
from tests.support import vision
from tests.torchtune.test_meta_setup import LENGTH, config, predicted_bytes, real_host, step_of, transient_bytes


def small(*overrides: str, **paths: Any) -> Any:
    cfg = config("full", *vision.OVERRIDES, *overrides, **paths)
    cfg.model = {key: cfg.model[key] for key in ("_component_", "decoder_trainable") if key in cfg.model}
    return cfg


@pytest.mark.parametrize(
    "override", ["seed=0", "enable_activation_checkpointing=True", "model.decoder_trainable=False"]
)
def test_a_trace_of_the_step_says_what_it_takes(override: str, inputs: Path, tmp_path: Path) -> None:
    step = step_of(real_host("full", small(override, inputs=inputs, out=tmp_path)), vision.sample(LENGTH))
    assert predicted_bytes(trace_step(step)) == pytest.approx(transient_bytes(step), rel=0.02)


def test_the_image_of_a_dry_run_follows_from_the_model() -> None:
    image = image_of(vision.model())
    assert image is not None
    assert (image.tiles, image.size, image.channels) == (vision.TILES, vision.TILE, 3)
    assert image.tokens_per_tile == vision.TOKENS_PER_TILE


def test_a_plan_refuses_models_that_take_images() -> None:
    with pytest.raises(NotPlannedError, match="the model takes images, which plan does not count; a dry run does"):
        sketch(PlanRequest("full_finetune_single_device", small("dtype=bf16")), LENGTH)


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
