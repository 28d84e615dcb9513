"""Samples end to end on a device: what a row asks of it, against a padded batch of as many tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchtune.data import padded_collate_sft
from torchtune.models.llama3_2._component_builders import llama3_2

from adaptive_batching._dry_run.device import control
from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._torchtune.stock.end_to_end import RowSeams, why_not_in_rows
from adaptive_batching._torchtune.stock.losses import NextToken
from adaptive_batching._torchtune.stock.objective import Batch
from adaptive_batching._torchtune.train.recipe_work import to_device

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


@pytest.mark.parametrize("targets", [1, 0.25], ids=["all", "a quarter"])
def test_a_row_waits_for_nothing_and_asks_for_no_more_than_a_padded_batch(targets: float) -> None:
    model = llama3_2(**SIZES).to("cuda", torch.bfloat16)
    seams = RowSeams([model])
    assert why_not_in_rows([model]) is None
    objective = NextToken(padded_collate_sft, nn.CrossEntropyLoss(), contextlib.nullcontext())

    def samples(lengths: list[int]) -> list[Sample]:
        labelled = [(length, max(int(targets * length), 2)) for length in lengths]
        return [{"tokens": [1] * length, "labels": [-100] * (length - few) + [1] * few} for length, few in labelled]

    def train(batch: Batch) -> None:
        to_device(batch, torch.device("cuda"))
        with seams.open():
            loss, _ = objective.loss(model, batch, None)
            loss.backward()
        model.zero_grad()

    padded, padded_peak = asked(lambda: train(objective.collate(samples([256] * 8))))
    unlike, unlike_peak = asked(lambda: train(objective.lay(samples([300, 200, 400, 100, 256, 256, 280, 256]))))
    many, many_peak = asked(lambda: train(objective.lay(samples([8] * 256))))
    assert unlike.synchronizations == many.synchronizations == padded.synchronizations == 0
    assert unlike.products == many.products == padded.products
    assert unlike.kernels == many.kernels <= padded.kernels
    assert unlike_peak <= (1.02 if targets == 1 else 0.9) * padded_peak, "logits of tokens alone that predict a target"
    assert many_peak <= 1.15 * padded_peak, "the backward pass works on 128 tokens of a sample at the least"
