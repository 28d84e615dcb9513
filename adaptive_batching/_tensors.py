"""The values of a tensor, whatever kind it is: as plain tensors, and as a number that tells if they have changed."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from adaptive_batching._values import DRY_RUN


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return plain tensors that share the values of ``tensor``, without dimensions that repeat them."""
    if isinstance(tensor, DTensor):
        return plain_parts(tensor.to_local().detach())
    if _is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [part for name in names for part in plain_parts(getattr(tensor, name))]
    if tensor.layout == torch.sparse_coo:
        return [*plain_parts(tensor._indices()), *plain_parts(tensor._values())]
    if tensor.device.type == "meta" or not is_plain(tensor):
        return []
    repeated = [at for at, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[at] > 1]
    if not repeated:
        return [tensor]  # itself, with what it may have for attributes
    view = tensor.detach()
    for dimension in repeated:
        view = view.narrow(dimension, 0, 1)
    return [view]


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; of a sparse one, which does not tell, as if it were dense."""
    return tensor.numel() * tensor.element_size()


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not _is_wrapper(tensor) and not tensor.is_quantized


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return True if the values of a tensor are those of others within it, as of quantized weights."""
    return type(tensor) not in (torch.Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__")


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, as large numbers as possible."""
    flat = tensor.detach().contiguous().flatten()
    raw = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single number may have any stride
    return raw.view(torch.int64) if raw.numel() % 8 == 0 and raw.data_ptr() % 8 == 0 else raw


def hash_of(tensor: torch.Tensor) -> int:
    """Return a number that is another where bits of a tensor have changed, other than by changing places."""
    if DRY_RUN in os.environ:  # where all values are zero, and reading them takes memory
        return 0
    sums = (bits_of(part).sum(dtype=torch.int64) for part in plain_parts(tensor) if part.numel())  # which wrap around
    return hash(tuple(map(int, sums)))


def same_bits(tensor: torch.Tensor, saved: torch.Tensor) -> bool:
    return tensor.shape == saved.shape and torch.equal(bits_of(tensor).to(saved.device), bits_of(saved))


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to, as far as that is counted."""
    return 0 if tensor.is_inference() else tensor._version  # those that were made for inference have none
