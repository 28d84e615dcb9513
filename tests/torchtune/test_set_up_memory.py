"""Memory predicted for loading weights, against what it really takes on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune.modules.peft import get_adapter_params

from adaptive_batching._torchtune.on_paper import Data, on_devices, set_up
from adaptive_batching._torchtune.set_up_memory import Allocations
from tests.support.steps import most_in_use
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


def test_each_weight_is_whole_for_a_moment_on_several_devices() -> None:
    seen = Allocations()
    with on_devices(4):
        host, _ = set_up("lora_finetune_distributed", config("lora", *LORA), Data(LENGTH, 50), 4, seen)
        on_host = loaded(host.model, on_host=True)
    assert all(isinstance(parameter, DTensor) for parameter in host.model.parameters())
    adapters = get_adapter_params(host.model)
    sizes = {name: each.numel() * each.element_size() for name, each in sorted(host.model.named_parameters())}
    whole = [size for name, size in sizes.items() if name not in adapters]
    held = sum(buffer.nbytes for buffer in host.model.buffers()) + sum(sizes[name] for name in adapters) / 4
    at_most = max(sum(whole[: number + 1]) / 4 + weight for number, weight in enumerate(whole))
    assert seen.so_far().most_bytes == pytest.approx(held + at_most, rel=0.01)
    assert on_host == pytest.approx(max(whole) * 5 / 4, rel=0.01)
