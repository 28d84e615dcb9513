"""GPUs by name, amounts of memory, and the answers."""

from __future__ import annotations

import pytest

from adaptive_batching._dry_run.cards import GIB, GPUS, Gpu, find_gpus, gpu_memory
from adaptive_batching._dry_run.verdict import Answer, outside_of_allocator
from adaptive_batching._values import ConfigError


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


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24", 24 * GIB), ("23.5", int(23.5 * GIB)), ("24G", 24 * GIB), ("24GiB", 24 * GIB), ("24 gib", 24 * GIB),
        ("24GB", 24 * 10**9), ("4095", 4095 * GIB), ("25769803776", 24 * GIB), ("2e10", 2 * 10**10),
    ],
)  # fmt: skip
def test_a_plain_number_is_gib(text: str, num_bytes: int) -> None:
    assert gpu_memory(text) == num_bytes
