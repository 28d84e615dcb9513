"""Packed data: what stands in for flex attention in a trace, against flex attention on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torchtune.modules import MultiHeadAttention

from adaptive_batching._torchtune.on_paper import Data, set_up
from adaptive_batching._torchtune.step import training_step
from adaptive_batching._trace.recorder import Recorder
from adaptive_batching._trace.trace import trace_step
from adaptive_batching._trace.traced_step import TRACED_SIZES
from tests.conftest import ARCHITECTURE
from tests.torchtune.test_on_paper import LENGTH, config


def mask_of(batch_size: int) -> BlockMask:
    """One document in each pack."""
    documents = torch.zeros(batch_size, LENGTH, dtype=torch.long)

    def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (q >= kv) & (documents[b, q] == documents[b, kv])

    return create_block_mask(sees, batch_size, None, LENGTH, LENGTH, device="cpu")


def same(score: torch.Tensor, *position: torch.Tensor) -> torch.Tensor:
    return score


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_stand_in_for_flex_attention_takes_what_flex_attention_takes(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = {size: mask_of(size).as_tuple() for size in TRACED_SIZES}

    def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **others: Any) -> torch.Tensor:
        options = {"OUTPUT_MAX": False}
        out: torch.Tensor = flex_attention(q, k, v, same, masks[len(q)], q.shape[-1] ** -0.5, options)[0]
        return out

    host, _ = set_up("full_finetune_single_device", config("full", f"dtype={dtype}"), Data(LENGTH, 50, packed=True))
    ours = trace_step(training_step(host, host.loader.dataset[0], accumulates=False))
    monkeypatch.setattr(Recorder, "supports_higher_order_operators", True, raising=False)
    layers = [module for module in host.model.modules() if isinstance(module, MultiHeadAttention)]
    for layer in layers:
        layer._attention_call = flex
    theirs = trace_step(training_step(host, host.loader.dataset[0], accumulates=False))
    # Where flex attention is not compiled, it keeps the largest score of each row as well, which is never read.
    row = ARCHITECTURE["num_heads"] * LENGTH * 4
    for size in (4, 50, 1000):
        more = theirs.curve.peak_bytes(size) - ours.curve.peak_bytes(size)
        assert 0 <= more <= len(layers) * size * row + 1024, "and some scalars"
    assert theirs.curve.resting_bytes == ours.curve.resting_bytes
    assert theirs.at(1000).at_peak()[0] == ours.at(1000).at_peak()[0]
