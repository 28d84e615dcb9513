"""Attention within samples that are laid end to end in one row, so that a forward computes no padding.

Everything in a transformer but attention treats each token by itself. A row of all tokens, [1, tokens], computes what
the samples do one by one, if positions start over in each sample and attention stays within it:

    bounds = SampleBounds([len(sample) for sample in samples])
    out = attend_within_samples(query, key, value, bounds)  # in place of scaled_dot_product_attention

Lengths are numbers on the host, so that nothing here waits for a device.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from adaptive_batching._device import without_waiting

log = logging.getLogger(__name__)

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256  # of FlashAttention, which takes multiples of 8
_LARGEST_HEAD_ANYWHERE = 192  # backward passes of larger ones need the shared memory of an A100, or of an H100 on


class SampleBounds:
    """Where the samples of a row lie.

    It is no tensor: modules, and checkpoints of activations, pass it on as it is.

    Args:
        lengths: Tokens of each sample, in the order of the row; at least 1 each.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"a row is made of samples of at least one token each, not of lengths {list(lengths)}")
        self.longest, self.tokens = max(self.lengths), sum(self.lengths)
        self._made: dict[Any, torch.Tensor] = {}  # for all layers of a model, and for their backward passes

    def positions(self) -> torch.Tensor:
        """Return the position of each token in its sample, [1, tokens], on the host."""
        return torch.cat([torch.arange(length) for length in self.lengths])[None]

    def starts(self) -> list[int]:
        """Return the index of the first token of each sample."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        return [0, *ends[:-1]]

    def offsets(self, like: torch.Tensor) -> torch.Tensor:
        """Return where each sample starts, and where the last one ends, [samples + 1] int32, on the device of ``like``.

        They are known elsewhere as ``cu_seqlens``.
        """

        def make() -> torch.Tensor:
            return without_waiting(torch.tensor((0, *self.lengths)).cumsum(0).int(), like.device)

        return self._kept("offsets", like, make)

    def band(self, like: torch.Tensor, window: int, *, causal: bool) -> torch.Tensor:
        """Return which tokens of the longest sample see each other, bool [longest, longest]; of others, a corner.

        A token sees ``window`` tokens on its left, itself included, and as many on its right unless it is ``causal``.
        """

        def make() -> torch.Tensor:
            seen = torch.ones(self.longest, self.longest, dtype=torch.bool, device=like.device).triu(1 - window)
            return seen.tril(0 if causal else window - 1)

        return self._kept(("band", window, causal), like, make)

    def _kept(self, name: Any, like: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        key = (name, like.device)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_within_samples(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: SampleBounds,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return the attention of each sample of a row to itself, [1, heads, tokens, head size].

    On CUDA, in half precision, it is one kernel of torch's :func:`varlen_attn` where the head's size and the device
    allow it; elsewhere each sample runs :func:`scaled_dot_product_attention`. Code that is compiled calls it as it is.

    Args:
        query: [1, heads, tokens, head size].
        key: As ``query``, or with fewer heads, each for as many of the query's.
        value: As ``key``.
        bounds: Where the samples lie.
        causal: True if a token sees none after it.
        scale: Of the scores; None for one over the root of the head's size.
        window: Tokens that a token sees, itself included; None for all.
        dropout: Probability that a score is dropped; 0 for evaluation.

    Raises:
        ValueError: If ``query``, ``key`` and ``value`` are not a row of as many tokens as ``bounds`` have.
    """
    for tensor in (query, key, value):
        if tensor.dim() != 4 or tensor.shape[0] != 1 or tensor.shape[2] != bounds.tokens:
            raise ValueError(f"attention was given {list(tensor.shape)} for a row of {bounds.tokens} tokens")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # which casts for scaled_dot_product_attention alone
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    if window is not None and window >= bounds.longest:
        window = None
    if not dropout and (varlen_attn := _fused(query, value)) is not None:
        return _attend_at_once(varlen_attn, query, key, value, bounds, causal=causal, scale=scale, window=window)
    key, value = for_each_head(query, key, value)  # not all kernels take groups
    outputs = []
    for q, k, v in sample_by_sample(bounds, query, key, value):
        mask = None
        if window is not None and q.shape[2] > window:
            mask = bounds.band(query, window, causal=causal)[: q.shape[2], : q.shape[2]]
        output = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, dropout_p=dropout
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))  # [length, heads, head size], as kernels lay it out
    return torch.cat(outputs)[None].transpose(1, 2)


def for_each_head(query: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return keys or values, [b, heads, tokens, head size], copied for all heads of ``query`` that share them."""
    return tuple(
        tensor if tensor.shape[1] == query.shape[1] else tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)
        for tensor in tensors
    )


def sample_by_sample(bounds: SampleBounds, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the part of each sample in tensors [1, heads, tokens, head size]."""
    yield from zip(*(torch.split(tensor, list(bounds.lengths), 2) for tensor in tensors), strict=True)


def _attend_at_once(
    varlen_attn: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: SampleBounds,
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    left = -1 if window is None else window - 1
    offsets = bounds.offsets(query)
    in_groups = {"enable_gqa": query.shape[1] != key.shape[1]} if _takes_groups(varlen_attn) else {}
    if not in_groups:
        key, value = for_each_head(query, key, value)
    rows = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [tokens, heads, head size]
    output = varlen_attn(
        *rows, offsets, offsets, bounds.longest, bounds.longest, scale=scale,
        window_size=(left, 0 if causal else left), **in_groups,
    )  # fmt: skip
    return output.transpose(0, 1).unsqueeze(0)  # as indexing, but without a kernel in the backward pass


def _fused(query: torch.Tensor, value: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """Return the kernel that attends within all samples at once; None where it cannot."""
    if not query.is_cuda or query.dtype not in _HALF:
        return None
    why = _why_not_fused(query.device, query.shape[-1], value.shape[-1])
    return None if why is not None else _varlen_attn()


@functools.cache
def _varlen_attn() -> Callable[..., Any] | None:
    """Return torch's kernel, of 2.11 and later."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None


@functools.cache
def _takes_groups(varlen_attn: Callable[..., Any]) -> bool:
    """Return False for torch 2.11, whose kernel is not told of heads that share keys and values."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@functools.cache  # so that it is said once
def _why_not_fused(device: torch.device, size: int, size_of_value: int) -> str | None:
    capability, why = torch.cuda.get_device_capability(device), None
    if _varlen_attn() is None:
        why = f"torch {torch.__version__} has no varlen_attn with windows"
    elif capability < (8, 0):
        why = f"FlashAttention needs compute capability 8.0, and this device has {capability[0]}.{capability[1]}"
    elif size != size_of_value or size % 8 or size > _LARGEST_HEAD:
        why = f"FlashAttention does not take heads of size {size}"
    elif size > _LARGEST_HEAD_ANYWHERE and capability[0] == 8 and capability[1] > 0:
        why = f"FlashAttention has no backward pass for heads of size {size} on this device"
    if why is not None:
        log.info("attention runs sample by sample: %s", why)
    return why
