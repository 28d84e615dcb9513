"""A small model with images in one of its two layers, any weights and data, by the paths that a config names."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchtune.modules.model_fusion import DeepFusionModel

from adaptive_batching._torchtune.stock.images import without_torchvision

with without_torchvision():
    from torchtune.models.llama3_2_vision._component_builders import llama3_2_vision_decoder, llama3_2_vision_encoder

TILE, PATCH, TILES = 56, 14, 4
TOKENS_PER_TILE = (TILE // PATCH) ** 2 + 1
OVERRIDES = [
    "model._component_=tests.support.vision.model", "checkpointer._component_=tests.support.vision.checkpointer",
    "dataset._component_=tests.support.vision.dataset",
    "collate_fn=torchtune.data.padded_collate_tiled_images_and_mask",
]  # fmt: skip


def model(decoder_trainable: bool = True, **_: Any) -> nn.Module:
    encoder = llama3_2_vision_encoder(
        patch_size=PATCH, num_heads=4, clip_embed_dim=64, clip_num_layers=2, clip_hidden_states=[0],
        num_layers_projection=1, decoder_embed_dim=128, tile_size=TILE, max_num_tiles=TILES,
    )  # fmt: skip
    decoder = llama3_2_vision_decoder(
        vocab_size=700, num_layers=2, fusion_interval=2, num_special_tokens=8, num_heads=4, num_kv_heads=2,
        embed_dim=128, max_seq_len=512, encoder_max_seq_len=512, intermediate_dim=256,
    )  # fmt: skip
    return DeepFusionModel(decoder, encoder, encoder_trainable=True, decoder_trainable=decoder_trainable)


def checkpointer(**_: Any) -> Any:
    return SimpleNamespace(load_checkpoint=lambda: {"model": model().state_dict()})


def sample(length: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A sample with an image of as many tiles as there can be, whose token has no class in the output layer."""
    tokens = [1, 2, 3, 700, *range(4, length)]
    labels = [-100 if token == 700 else token for token in tokens]
    mask = torch.ones(length, TILES * TOKENS_PER_TILE, dtype=torch.bool)
    images = {"images": [torch.rand(TILES, 3, TILE, TILE, dtype=dtype)], "aspect_ratio": [torch.tensor([2, 2])]}
    return {"tokens": tokens, "labels": labels, "encoder_input": images, "encoder_mask": [mask]}


def dataset(tokenizer: Any, **_: Any) -> Sequence[dict[str, Any]]:
    return [sample(length) for length in (20, 30) * 25]
