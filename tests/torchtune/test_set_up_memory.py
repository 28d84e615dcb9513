"""Memory predicted for loading weights, against what it really takes on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4

from adaptive_batching._torchtune.on_paper import Data, on_devices, set_up
from adaptive_batching._torchtune.set_up_memory import set_up_bytes
from tests.support.real_memory import most_in_use
from tests.torchtune.test_on_paper import LENGTH, LORA, config


def test_quantizing_a_weight_takes_what_it_really_takes() -> None:
    shape = (512, 1024)
    weight = torch.randn(shape, dtype=torch.bfloat16)
    with torch.device("meta"):
        on_paper = nn.Module()
        on_paper.weight = nn.Parameter(to_nf4(torch.empty(shape, dtype=torch.bfloat16)), requires_grad=False)
    quantized = to_nf4(weight)
    really = most_in_use(lambda: quantized.copy_(weight))
    held = sum(getattr(quantized, name).nbytes for name in quantized.__tensor_flatten__()[0])
    assert isinstance(on_paper.weight, NF4Tensor)
    # On another device than the weight's, a copy of the weight comes first.
    assert set_up_bytes(on_paper) - held == pytest.approx(really + weight.nbytes, rel=0.02)


def test_loading_what_is_not_quantized_takes_no_more_than_the_model() -> None:
    model = nn.Linear(64, 32, device="meta")
    assert set_up_bytes(model) == (64 * 32 + 32) * 4


@pytest.fixture
def one_of_four() -> Iterator[None]:
    with on_devices(4):
        yield


def test_each_weight_is_whole_for_a_moment_on_several_devices(one_of_four: None, tmp_path: Path) -> None:
    host, _ = set_up("lora_finetune_distributed", config("lora", *LORA), Data(LENGTH, 50), 4)
    parameters = list(host.model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    whole = [parameter.numel() * parameter.element_size() for parameter in parameters]
    buffers = sum(buffer.nbytes for buffer in host.model.buffers())
    assert set_up_bytes(host.model) == pytest.approx(sum(whole) / 4 + max(whole) + buffers, rel=0.01)
    on_host = set_up_bytes(host.model, on_host=True)
    assert on_host == pytest.approx(max(whole) * 5 / 4 + buffers, rel=0.01)
