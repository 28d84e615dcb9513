"""Samples end to end on a device: what a row asks of it, against a padded batch of as many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchtune.models.llama3_2._component_builders import llama3_2

from adaptive_batching._attention import SampleBounds
from adaptive_batching._emulated_device import control
from adaptive_batching._torchtune.stock.end_to_end import RowSeams, why_not_in_rows

LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 1000, "num_layers": LAYERS, "num_heads": 8, "num_kv_heads": 4, "embed_dim": 512, "max_seq_len": 512,
    "intermediate_dim": 1024,
}  # fmt: skip


def asked(run: Callable[[], Any]) -> tuple[control.Counters, int]:
    """Calls that the second ``run`` makes to the device, and its peak memory in bytes."""
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        held, before = torch.cuda.memory_allocated(), control.counters()
        run()
        counted, peak = control.counters() - before, torch.cuda.max_memory_allocated() - held
    return counted, peak


def test_a_row_waits_for_nothing_and_takes_the_memory_of_a_padded_batch() -> None:
    model = llama3_2(**SIZES).to("cuda", torch.bfloat16)
    seams = RowSeams([model])
    assert why_not_in_rows([model]) is None

    def train(lengths: list[int] | None) -> None:
        if lengths is None:
            output = model(torch.ones(8, 256, dtype=torch.long, device="cuda"))
        else:
            bounds = SampleBounds(lengths)
            positions = bounds.positions().pin_memory().to("cuda", non_blocking=True)
            row = torch.ones(1, bounds.tokens, dtype=torch.long, device="cuda")
            with seams.open():
                output = model(row, mask=bounds, input_pos=positions)
        output.float().logsumexp(-1).mean().backward()
        model.zero_grad()

    padded, padded_peak = asked(lambda: train(None))
    unlike, unlike_peak = asked(lambda: train([300, 200, 400, 100, 256, 256, 280, 256]))
    many, many_peak = asked(lambda: train([8] * 256))
    assert unlike.synchronizations == many.synchronizations == padded.synchronizations == 0
    assert unlike.products == many.products == padded.products
    # A gather of positions for queries and one for keys, and what the kernel notes of random numbers, in each layer.
    assert unlike.kernels == many.kernels <= padded.kernels + 6 * LAYERS
    assert unlike_peak <= 1.02 * padded_peak
    assert many_peak <= 1.15 * padded_peak, "the backward pass works on 128 tokens of a sample at the least"
