"""What stands in for parts of torchtune where nothing is computed.

These are activation offloading, images, and layers that a trace cannot follow image by image. How many images a sample
has only the data know: a dry run has one, of as many tiles as the model takes.
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
from torch.autograd.graph import saved_tensors_hooks
from torchtune.modules import VisionTransformer
from torchtune.modules.model_fusion import FusionEmbedding

SMALLEST = 64
"""Bytes from which on an activation moves. torchtune's 1024 may lie between the two batch sizes that are traced, whose
operations must be the same."""

_COPIES = 3  # number of their stream
_MOST_STAYING = 5


class TracedOffloading(saved_tensors_hooks):
    """Does to fake tensors what ``OffloadActivations`` does on CUDA, with its defaults and streams.

    An activation stays on the device until five more have been saved, because the copy to the host may not have ended;
    the last ones go when the first node of the backward pass that takes an activation has run. There an activation
    comes back, on the stream of the copies, and goes when the next such node has run: the copies of one are waited for
    while the next computes. Where it has to be kept until another stream has caught up, that is taken to have.
    """

    def __init__(self) -> None:
        self._count = 0
        self._saved: dict[int, Any] = {}
        self._staying: dict[int, torch.Tensor] = {}
        self._brought: dict[int, torch.Tensor] = {}
        self._graph: int | None = None
        self._node: Any = None
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> int:
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # private: a trace can do without

        self._graph = None
        self._count += 1
        number = self._count
        is_weight = isinstance(tensor, (torch.nn.Parameter, torch.nn.Buffer)) or is_traceable_wrapper_subclass(tensor)
        if is_weight or tensor.nbytes < SMALLEST:
            self._saved[number] = tensor
            return number
        self._staying = {pack: kept for pack, kept in self._staying.items() if pack > number - _MOST_STAYING}
        self._staying[number] = tensor
        self._saved[number] = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        return number

    def _unpack(self, number: int) -> torch.Tensor:
        from adaptive_batching._trace.recorder import on_stream  # which a trace has imported

        if self._graph is None:
            self._graph = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._brought.clear)
        saved = self._saved.pop(number)
        if isinstance(saved, torch.Tensor):
            return saved
        node: Any = torch._C._current_autograd_node()
        of_earlier_node: list[int] = []
        if self._graph == torch._C._current_graph_task_id() and node != self._node:
            self._node, of_earlier_node = node, list(self._brought)
        tensor = self._staying.get(number)
        comes_back = tensor is None
        if tensor is None:
            shape, strides, dtype, device = saved
            with on_stream(_COPIES):
                tensor = self._brought[number] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        uses = _uses(tensor)

        def after_node(outputs: Any, inputs: Any) -> None:
            if comes_back and _uses(self._brought[number]) > uses:  # views of it live on
                del self._brought[number]
            self._staying.clear()
            for earlier in of_earlier_node:
                del self._brought[earlier]

        node.register_hook(after_node)
        return tensor


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


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


def run_without_values(model: nn.Module) -> None:
    """Have ``model`` run without the values of a batch: torchtune adds the positions of tiles image by image, and reads
    from the batch how many each has. Here each has as many as there can be. One token of a sample stands for an image.
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
