"""Models with images: a plan counts what a real step takes, with one image of as many tiles as there can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adaptive_batching._torchtune.host import Host
from adaptive_batching._torchtune.images import image_of, run_without_values
from adaptive_batching._torchtune.on_paper import Data, set_up
from adaptive_batching._torchtune.planning import NotPlannedError, Question, sketch
from adaptive_batching._torchtune.training_step import training_step
from adaptive_batching._trace.trace import trace_step
from tests.support import vision
from tests.torchtune.test_on_paper import LENGTH, config, real_host
from tests.torchtune.test_real_steps import BATCH, transient_bytes


def small(*overrides: str, **paths: Any) -> Any:
    cfg = config("full", *vision.OVERRIDES, *overrides, **paths)
    cfg.model = {key: cfg.model[key] for key in ("_component_", "decoder_trainable") if key in cfg.model}
    return cfg


CASES = {
    "all trained": [],
    "checkpointing": ["enable_activation_checkpointing=True"],
    "language frozen": ["model.decoder_trainable=False"],
}


@pytest.mark.parametrize("case", CASES)
def test_a_real_step_with_images_takes_what_is_predicted(case: str, inputs: Path, tmp_path: Path) -> None:
    host = real_host("full", small(*CASES[case], inputs=inputs, out=tmp_path))
    curve = trace_step(training_step(host, vision.sample(LENGTH), accumulates=False)).curve
    predicted = curve.peak_bytes(BATCH) - curve.resting_bytes
    assert predicted == pytest.approx(transient_bytes(host, vision.sample(LENGTH)), rel=0.02)


@pytest.mark.parametrize("case", CASES)
def test_the_step_on_paper_is_that_of_the_recipe_to_the_byte(case: str, inputs: Path, tmp_path: Path) -> None:
    cfg = small(*CASES[case], "dtype=bf16", inputs=inputs, out=tmp_path)
    real = real_host("full", cfg)
    on_paper, _ = set_up("full_finetune_single_device", small(*CASES[case], "dtype=bf16"), Data(LENGTH, 50))
    sample = vision.sample(LENGTH, torch.bfloat16)
    curves = [curve_of(on_paper, on_paper.loader.dataset[0]), curve_of(real, sample)]
    assert curves[0].resting_bytes == curves[1].resting_bytes
    for size in (1, 3, 100):
        assert curves[0].peak_bytes(size) == curves[1].peak_bytes(size)


def curve_of(host: Host, sample: Any) -> Any:
    return trace_step(training_step(host, sample, accumulates=False)).curve


def test_the_largest_image_follows_from_the_model() -> None:
    image = image_of(vision.model())
    assert image is not None
    assert (image.tiles, image.size, image.channels) == (vision.TILES, vision.TILE, 3)
    assert image.tokens_per_tile == vision.TOKENS_PER_TILE
    assert image_of(torch.nn.Linear(2, 2)) is None


def test_what_is_assumed_of_images_is_said() -> None:
    made = sketch(Question("full_finetune_single_device", small("dtype=bf16")), LENGTH)
    assert made.assumes == "one image of 4 tiles of 56 x 56 pixels in each sample"
    assert sketch(Question("full_finetune_single_device", config("full")), LENGTH).assumes is None


def test_batches_of_images_that_are_not_known_are_refused() -> None:
    with pytest.raises(NotPlannedError, match=r"collate_fn=my\.collate_images"):
        sketch(Question("full_finetune_single_device", small("collate_fn=my.collate_images")), LENGTH)


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
