"""Images for a dry run. Only the data know how many a sample has: it gets one, of as many tiles as the model takes."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import nn
from torchtune.modules import VisionTransformer


@dataclass(frozen=True)
class Image:
    tiles: int  # most that it is split into
    size: int  # pixels of a tile in a row, and rows
    channels: int
    tokens_per_tile: int  # one for each patch, and one for the class

    def fields(self, length: int) -> dict[str, Any]:
        """Return what a sample of ``length`` tokens has besides text, of the type that torchtune's transform gives."""
        pixels = torch.zeros(self.tiles, self.channels, self.size, self.size, dtype=torch.bfloat16)
        mask = torch.ones(length, self.tiles * self.tokens_per_tile, dtype=torch.bool)
        ratio = torch.tensor(_grid(self.tiles))
        return {"encoder_input": {"images": [pixels], "aspect_ratio": [ratio]}, "encoder_mask": [mask]}


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


def _grid(tiles: int) -> tuple[int, int]:
    """Return rows and columns of so many tiles, as square as can be; positions of other shapes take no more."""
    rows = next(rows for rows in range(math.isqrt(tiles), 0, -1) if tiles % rows == 0)
    return rows, tiles // rows
