"""What a step needs at any batch size, the three answers, and GPUs by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adaptive_batching._gpus import GPUS, Gpu, find_gpus
from adaptive_batching._plan import SET_UP, Answer, Forecast, outside_of_allocator
from adaptive_batching._trace.allocator import MIB
from adaptive_batching._trace.reserved import SetUp
from adaptive_batching._trace.trace import trace_step
from adaptive_batching._trace.traced_step import TracedStep
from adaptive_batching._trace.training import TrainingStep
from adaptive_batching._values import ConfigError


def linear_step() -> TracedStep:
    model = nn.Linear(1024, 1024)

    def run(batch: torch.Tensor) -> None:
        model(batch)

    return trace_step(TrainingStep(model, [], lambda b: torch.ones(b, 1024), lambda *_: run))


@pytest.mark.parametrize("fits", [0, 1, 2, 5, 11, 30])
def test_a_size_fits_where_the_one_below_it_does_not(fits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserved memory is not quite monotonic, as blocks are rounded."""
    forecast = Forecast(linear_step(), [])
    budget = forecast.step.curve.peak_bytes(40)
    reserved = {size: budget + (1 if size > fits or size == fits - 1 else 0) for size in range(100)}
    monkeypatch.setattr(Forecast, "_reserved", lambda _, size: reserved[size])
    assert forecast.largest(budget) == fits


def test_a_set_up_that_takes_more_than_a_step_is_the_peak() -> None:
    step = linear_step()
    outside = outside_of_allocator(1)
    without, small, large = (Forecast(step, outside, SetUp((0, ~0), (size,))) for size in (0, MIB, 100 * MIB))
    assert without.need(4).kinds == small.need(4).kinds
    need = large.need(4)
    assert need.moment == SET_UP != small.need(4).moment
    assert need.peak_bytes == sum(need.kinds.values()) == 100 * MIB
    assert min(need.reserved.by_default, need.reserved.least, need.reserved.expandable) >= 100 * MIB
    assert need.resting_bytes == without.need(4).resting_bytes
    others = sum(each.most for each in outside)
    assert large.largest(90 * MIB + others) == 0 < without.largest(90 * MIB + others)


def test_exit_codes_are_those_of_the_documentation() -> None:
    codes = {"fits": 0, "does not fit": 1, "tight": 3, "cannot tell": 4}
    assert {str(answer): answer.value for answer in Answer} == codes


def test_several_devices_have_buffers_of_nccl() -> None:
    assert len(outside_of_allocator(2)) == len(outside_of_allocator(1)) + 1
    assert all(0 <= each.least < each.most and each.source for each in outside_of_allocator(2))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *((name, ["RTX 4090"]) for name in ("rtx4090", "4090", "NVIDIA GeForce RTX 4090", "4090 24GB")),
        *((name, ["H100"]) for name in ("h100", "h100 80gb", "NVIDIA H100 80GB HBM3", "H100 SXM5")),
        *((name, ["A100-80GB"]) for name in ("a100-80gb", "A100 80GB SXM", "NVIDIA A100-SXM4-80GB")),
        *((name, ["H100 PCIe"]) for name in ("h100 pcie", "NVIDIA H100 PCIe", "h100-pcie-80gb", "H100 HBM2e PCIe")),
        *((name, ["A100-PCIe-80GB"]) for name in ("A100 80GB PCIe", "NVIDIA A100 80GB PCIe", "a100-pcie-80")),
        ("NVIDIA A100-PCIE-40GB", ["A100-PCIe-40GB"]), ("a100 pcie", ["A100-PCIe-40GB", "A100-PCIe-80GB"]),
        ("H100 HBM2e", ["H100 HBM2e"]), ("A100 80GB HBM2e", ["A100-80GB"]), ("L40S PCIe", ["L40S"]),
        ("Tesla V100-PCIE-32GB", ["V100-PCIe-32GB"]),
        ("a100", ["A100-40GB", "A100-80GB"]), ("A100-40", ["A100-40GB"]), ("Tesla V100-SXM2-16GB", ["V100-16GB"]),
        ("rtx3060-12g", ["RTX 3060"]), ("4080", ["RTX 4080"]), ("RTX 4080 SUPER", ["RTX 4080 Super"]),
        ("NVIDIA RTX 6000 Ada Generation", ["RTX 6000 Ada"]), ("Quadro RTX 6000", ["Quadro RTX 6000"]),
        ("v100 32", ["V100-32GB"]), ("3080 12GB", ["RTX 3080-12GB"]), ("4060 Ti 16GB", ["RTX 4060 Ti-16GB"]),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", ["RTX PRO 6000"]), ("H100 NVL 94GB", ["H100 NVL"]),
        ("A10", ["A10"]), ("L40", ["L40"]), ("RTX A6000", ["A6000"]), ("A800 80GB", ["A800"]),
    ],
)  # fmt: skip
def test_gpus_are_found_however_they_are_spelled(name: str, found: list[str]) -> None:
    assert [gpu.name for gpu in find_gpus(name)] == found


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_each_gpu_is_found_by_its_own_name_and_by_the_one_that_its_driver_gives(gpu: Gpu) -> None:
    assert find_gpus(gpu.name) == [gpu] and gpu in find_gpus(gpu.device_name)


def test_drivers_name_geforce_and_workstation_cards_apart() -> None:
    names = {gpu.name: gpu.device_name for gpu in GPUS}
    assert names["RTX 4070 Ti Super"] == "NVIDIA GeForce RTX 4070 Ti SUPER"
    assert names["RTX 3080-12GB"] == names["RTX 3080-10GB"] == "NVIDIA GeForce RTX 3080"
    assert names["RTX 4000 Ada"] == "NVIDIA RTX 4000 Ada Generation" and names["A5000"] == "NVIDIA RTX A5000"
    assert (names["T4"], names["L40S"], names["H100"]) == ("Tesla T4", "NVIDIA L40S", "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RTX 4091", "the closest: .*RTX 4090"),
        ("h10", "the closest: .*A10, .*H100"),
        ("H100 40GB", "the closest: H100; or give its memory"),
        ("nonsense", "known: T4, .*B200.*; or give its memory, such as --memory 24GiB"),
        ("", "known: T4"),
    ],
)
def test_an_unknown_gpu_is_refused_with_the_closest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--gpu '{name}' is unknown; {message}"):
        find_gpus(name)


@pytest.mark.parametrize(
    ("name", "vendor"),
    [
        *((name, "AMD") for name in ("MI300X", "AMD Instinct MI250", "RX 7900 XTX", "Radeon Pro W7900", "mi210")),
        *((name, "Apple") for name in ("M2 Ultra", "Apple M3 Max", "m1")),
        *((name, "Intel") for name in ("Arc A770", "Gaudi 3")), ("TPU v4", "Google"),
    ],
)  # fmt: skip
def test_a_card_of_another_vendor_is_told_that_only_nvidia_s_are_known(name: str, vendor: str) -> None:
    with pytest.raises(ConfigError, match=f"--gpu '{name}' is {vendor}'s, and only NVIDIA's cards are emulated"):
        find_gpus(name)
