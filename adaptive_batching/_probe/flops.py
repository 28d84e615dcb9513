"""Floating-point operations of what a training step computes: its matrix products and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten


_ATTENTION = (
    _aten.bmm,  # layers are products of two matrices; batches of products are those of attention written out
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_cudnn_attention_backward,
)


def is_attention(func: Any) -> bool:
    """Return True for a call whose operations grow with the square of the length."""
    return getattr(func, "_overloadpacket", None) in _ATTENTION


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the operations of one call, two for each multiplication and addition; 0 where few are made.

    As in :mod:`torch.utils.flop_counter`, causal attention counts as full attention.
    """
    packet = getattr(func, "_overloadpacket", None)
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
        query, key, value = args[:3]
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu_backward:
        gradient, query, key, value = args[:4]
        return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))
