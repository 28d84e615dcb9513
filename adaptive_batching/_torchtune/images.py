"""Samples with images, and the layers that a trace cannot follow image by image.

The model says how many tiles an image has at most. How many images a sample has only the data know: a plan assumes one.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import nn
from torchtune.modules import VisionTransformer
from torchtune.modules.model_fusion import FusionEmbedding

COLLATE = "torchtune.data.padded_collate_tiled_images_and_mask"  # the function whose samples are known


@dataclass(frozen=True)
class Image:
    tiles: int  # most that it is cut into
    size: int  # pixels of a tile in a row, and rows
    channels: int
    tokens_per_tile: int  # one for each patch, and one for the class

    def fields(self, length: int) -> dict[str, Any]:
        """Return what a sample of ``length`` tokens has besides text, of the type that torchtune's transform gives."""
        with torch.device("meta"):
            pixels = torch.empty(self.tiles, self.channels, self.size, self.size, dtype=torch.bfloat16)
            mask = torch.empty(length, self.tiles * self.tokens_per_tile, dtype=torch.bool)
        ratio = torch.tensor(_grid(self.tiles))
        return {"encoder_input": {"images": [pixels], "aspect_ratio": [ratio]}, "encoder_mask": [mask]}

    def __str__(self) -> str:
        return f"one image of {self.tiles} tiles of {self.size} x {self.size} pixels in each sample"


def image_of(model: nn.Module) -> Image | None:
    """Return the largest image that ``model`` takes; None if it takes none."""
    encoders = _encoders(model)
    if not encoders:
        return None
    [encoder] = encoders
    embedding = encoder.pre_tile_pos_embed
    tiles = 1 if embedding is None else embedding.embedding.shape[0]
    size = math.isqrt(encoder.patches_per_tile) * int(encoder.conv.kernel_size[0])
    return Image(tiles, size, encoder.conv.in_channels, encoder.get_image_tokens_per_tile())


def run_without_values(model: nn.Module) -> None:
    """Have ``model`` run without the values of a batch, for a trace.

    torchtune adds the positions of tiles image by image, and reads from the batch how many tiles each image has. Here
    each has as many as there can be, and all are one operation. Of the tokens, one in each sample stands for an image.
    """
    for encoder in _encoders(model):
        for module in (encoder.pre_tile_pos_embed, encoder.post_tile_pos_embed):
            if module is not None:
                module.forward = partial(_add_of_tiles, module)
        if hasattr(encoder.token_pos_embedding, "global_token_positional_embedding"):
            encoder.token_pos_embedding.forward = partial(_add_of_tokens, encoder.token_pos_embedding)
    for module in model.modules():
        if isinstance(module, FusionEmbedding):
            module.forward = partial(_embed, module)


@contextlib.contextmanager
def without_torchvision() -> Iterator[None]:
    """Let torchtune's models with images be imported without torchvision, which only their transforms use."""
    if find_spec("torchvision") is None:
        names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
        sys.modules.update({name: mock.MagicMock() for name in names})
        try:
            importlib.import_module("torchtune.models.llama3_2_vision")
        finally:
            for name in names:
                del sys.modules[name]
    yield


def _encoders(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, VisionTransformer)]


def _add_of_tiles(module: Any, x: torch.Tensor, aspect_ratio: torch.Tensor) -> torch.Tensor:
    x += _for_each_image(module.embedding, x) * module.gate.tanh()  # x: [images, tiles, tokens, d]
    return x


def _add_of_tokens(module: Any, x: torch.Tensor, aspect_ratio: torch.Tensor) -> torch.Tensor:
    x = x + module.local_token_positional_embedding * (1 - module.gate.tanh())
    x += _for_each_image(module.global_token_positional_embedding, x) * module.gate.tanh()
    return x


def _embed(module: FusionEmbedding, tokens: torch.Tensor) -> torch.Tensor:
    mask = tokens < module.embedding.num_embeddings  # tokens: [b, s]
    of_text = module.embedding(tokens.reshape(-1).clone())
    of_images = module.fusion_embedding(tokens[:, :1].reshape(-1).clone())
    mask = mask.unsqueeze(-1).expand(*tokens.shape, module.dim)
    out: torch.Tensor = module._fused_embed(*tokens.shape).masked_scatter(mask, of_text)
    return out.masked_scatter(~mask, of_images)


def _for_each_image(embedding: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a copy of the positions of all tiles for each image of ``x``, as torchtune makes one."""
    images, tiles = x.shape[:2]
    rows, columns = _grid(tiles)
    used = embedding[:rows, :columns]  # [rows, columns, 1 or tokens, d]
    return used.expand(images, *used.shape).reshape(images, tiles, *used.shape[2:])


def _grid(tiles: int) -> tuple[int, int]:
    """Return rows and columns of so many tiles, as square as can be; positions of other shapes take no more."""
    rows = next(rows for rows in range(math.isqrt(tiles), 0, -1) if tiles % rows == 0)
    return rows, tiles // rows
