"""What stands in for torchtune's parts in a trace, against these: activation offloading, and flex attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partialmethod
from typing import Any
from unittest import mock

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask
from torchtune.modules import MultiHeadAttention
from torchtune.training import OffloadActivations

from adaptive_batching._torchtune.plan.meta_setup import Data, set_up
from adaptive_batching._torchtune.stock import objective
from adaptive_batching._torchtune.stock.stand_ins import SMALLEST
from adaptive_batching._trace.recorder import Recorder
from adaptive_batching._trace.trace import trace_step
from adaptive_batching._trace.traced_step import TRACED_SIZES
from tests.conftest import ARCHITECTURE
from tests.support.overrides import WIDE
from tests.torchtune.test_meta_setup import LENGTH, config, step_of

SAME: Any = {"min_offload_size": SMALLEST}


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Let torchtune's context run on the host: its copies there take no memory of the device."""
    empty_like, to = torch.empty_like, torch.Tensor.to

    def on_host(tensor: torch.Tensor, *, pin_memory: bool | None = None, **options: Any) -> torch.Tensor:
        if pin_memory is None:
            return empty_like(tensor, **options)
        with mock.patch.object(Recorder, "fused", True):
            return empty_like(tensor)

    def brought(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return empty_like(tensor) if args == ("cuda",) else to(tensor, *args, **options)

    streams: Any = {"default_stream": mock.DEFAULT, "Stream": mock.DEFAULT, "stream": contextlib.nullcontext}
    of_tensors: Any = {"to": brought, "record_stream": lambda tensor, stream: None}
    with (
        mock.patch.multiple(torch.cuda, **streams), mock.patch.multiple(torch.Tensor, **of_tensors),
        mock.patch.object(torch, "empty_like", on_host),
    ):  # fmt: skip
        yield


@pytest.mark.parametrize(
    "overrides",
    [["model.num_layers=6"], ["model.num_layers=3", "dtype=bf16", "compile=True"]],
    ids=["more than stay", "compiled"],
)
def test_a_trace_keeps_on_the_device_what_torchtune_keeps(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    levers = ["enable_activation_offloading=True", "enable_activation_checkpointing=True", "device=cuda"]
    host, _ = set_up("full_finetune_single_device", config("full", *WIDE, *levers, *overrides), Data(LENGTH, 50))
    ours = trace_step(step_of(host))
    real = type("Real", (OffloadActivations,), {"__init__": partialmethod(OffloadActivations.__init__, **SAME)})
    with without_cuda():
        monkeypatch.setattr(objective, "TracedOffloading", real)
        host.objective._activations = real()  # type: ignore[attr-defined]
        theirs = trace_step(step_of(host))
    # Of 48 tokens, 2 samples have fewer than the 1024 bytes from which torchtune moves a tensor, and 3 have more.
    assert ours.is_uniform
    for size in (4, 50, 1000):
        assert ours.curve.peak_bytes(size) == theirs.curve.peak_bytes(size)
        assert ours.record_at(size).at_peak() == theirs.record_at(size).at_peak()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_stand_in_for_flex_attention_takes_what_flex_attention_takes(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **others: Any) -> Any:
        scale, options = q.shape[-1] ** -0.5, {"OUTPUT_MAX": False}
        return flex_attention(q, k, v, lambda score, *position: score, masks[len(q)], scale, options)[0]

    # One document in each pack
    made = {n: create_block_mask(lambda b, h, q, kv: q >= kv, n, None, LENGTH, LENGTH, "cpu") for n in TRACED_SIZES}
    masks = {n: mask.as_tuple() for n, mask in made.items()}
    host, _ = set_up(
        "full_finetune_single_device", config("full", *WIDE, f"dtype={dtype}"), Data(LENGTH, 50, packed=True)
    )
    step = step_of(host, host.loader.dataset[0])
    ours = trace_step(step)
    monkeypatch.setattr(Recorder, "supports_higher_order_operators", True, raising=False)
    layers = [module for module in host.model.modules() if isinstance(module, MultiHeadAttention)]
    for layer in layers:
        layer._attention_call = flex
    theirs = trace_step(step)
    # Where flex attention is not compiled, it keeps the largest score of each row as well, which is never read.
    row = ARCHITECTURE["num_heads"] * LENGTH * 4
    for size in (4, 50, 1000):
        more = theirs.curve.peak_bytes(size) - ours.curve.peak_bytes(size)
        assert 0 <= more <= len(layers) * size * row + 1024, "and some scalars"
    assert theirs.curve.resting_bytes == ours.curve.resting_bytes
    assert theirs.record_at(1000).at_peak()[0] == ours.record_at(1000).at_peak()[0]
