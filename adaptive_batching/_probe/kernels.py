"""Memory that operations take of CUDA's allocator in addition to their results: for a call, and for good."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from adaptive_batching._probe.scratch import Scratch

_aten = torch.ops.aten
MATRIX_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)
"""Operations that need a handle of cuBLAS."""

_FLASH = (
    _aten._scaled_dot_product_flash_attention_backward.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,  # its stand-in where there is no CUDA
)
_THREADS = 132 * 2048  # of an H100 at once, where the device is not known; most others have fewer


def scratch_of(func: Any, args: Sequence[Any]) -> Scratch | None:
    if func is _aten.embedding_dense_backward.default:
        gradient, indices = args[0], args[1]
        return Scratch("embedding", (indices.numel(), int(args[2]), gradient.shape[-1]))
    if func in _FLASH:
        *batch, length, width = args[1].shape
        return Scratch("attention", (prod(batch), length, width))
    if func is _aten.sum.dim_IntList and args[0].is_contiguous():
        shape, dims = args[0].shape, sorted(dim % max(args[0].dim(), 1) for dim in args[1] or ())
        if dims and dims == list(range(len(dims))) and len(dims) < len(shape):
            inputs, outputs = prod(shape[: len(dims)]), prod(shape[len(dims) :])
            return Scratch("sum of rows", (inputs, outputs, _threads_at_once()))
    return None


def handle_bytes() -> int:
    """Return what a handle of cuBLAS keeps for its products (``parseChosenWorkspaceSize`` in ``CublasHandlePool.cpp``).

    Where the device is not known, that of Ampere and Ada.
    """
    on_hopper = torch.cuda.is_initialized() and torch.cuda.get_device_capability()[0] == 9  # type: ignore[no-untyped-call]
    return (32 * 2**20) if on_hopper else (8 * 2**20 + 128 * 2**10)


def _threads_at_once() -> int:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return _THREADS
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(found.multi_processor_count * found.max_threads_per_multi_processor)
