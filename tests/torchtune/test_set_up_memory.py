"""Memory predicted for loading weights, against what it really takes on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune.modules.peft import get_adapter_params

from adaptive_batching._torchtune.on_paper import Data, on_devices, set_up
from adaptive_batching._torchtune.set_up_memory import Allocations
from tests.support.real_memory import most_in_use
from tests.torchtune.test_on_paper import LENGTH, LORA, config


def loaded(model: nn.Module, *, on_host: bool = False) -> int:
    allocations = Allocations()
    allocations.load(model, on_host=on_host)
    return allocations.so_far().most_bytes


def test_quantizing_a_weight_takes_what_it_really_takes() -> None:
    shape = (512, 1024)
    weight = torch.randn(shape, dtype=torch.bfloat16)
    with torch.device("meta"):
        on_paper = nn.Module()
        on_paper.weight = nn.Parameter(to_nf4(torch.empty(shape, dtype=torch.bfloat16)), requires_grad=False)
    quantized = to_nf4(weight)
    really = most_in_use(lambda: quantized.copy_(weight))
    assert isinstance(on_paper.weight, NF4Tensor)
    # On another device than the weight's, a copy of the weight comes first.
    assert loaded(on_paper) == pytest.approx(really + weight.nbytes, rel=0.02)


def test_loading_what_is_not_quantized_takes_no_more_than_the_model() -> None:
    allocations = Allocations()
    with allocations:
        model = nn.Linear(64, 32, device="meta")
    allocations.load(model)
    assert allocations.so_far().most_bytes == (64 * 32 + 32) * 4


@pytest.fixture
def one_of_four() -> Iterator[None]:
    with on_devices(4):
        yield


def test_each_weight_is_whole_for_a_moment_on_several_devices(one_of_four: None, tmp_path: Path) -> None:
    seen = Allocations()
    host, _ = set_up("lora_finetune_distributed", config("lora", *LORA), Data(LENGTH, 50), 4, seen)
    parameters = list(host.model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    adapters = get_adapter_params(host.model)
    first = sum(parameter.numel() * parameter.element_size() for parameter in adapters.values()) / 4
    stored = sorted((name, parameter) for name, parameter in host.model.named_parameters() if name not in adapters)
    whole = [parameter.numel() * parameter.element_size() for _, parameter in stored]
    buffers = sum(buffer.nbytes for buffer in host.model.buffers())
    shards = [sum(whole[:number]) / 4 for number in range(1, len(whole) + 1)]
    at_most = max(before + weight for before, weight in zip(shards, whole, strict=True))
    assert seen.so_far().most_bytes == pytest.approx(buffers + first + at_most, rel=0.01)
    assert loaded(host.model, on_host=True) == pytest.approx(max(whole) * 5 / 4, rel=0.01)
