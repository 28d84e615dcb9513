"""The answers that a dry run can give, and memory of a card that PyTorch's allocator does not see: without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MIB = 2**20


class Answer(Enum):
    """The verdict on a run and a card's memory; the value is the exit code."""

    FITS = 0
    DOES_NOT_FIT = 1
    TIGHT = 3
    CANNOT_TELL = 4

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class OutsideAllocator:
    """Bytes of a device that are in use outside PyTorch's allocator."""

    name: str
    least: int
    most: int
    source: str


CONTEXT = OutsideAllocator(
    "CUDA context and kernels", 300 * MIB, 800 * MIB, "pytorch/pytorch issues 28113 and 107667; 767 MiB on an H200"
)
WORKSPACES = OutsideAllocator(
    "more for cuBLAS, on Hopper and Blackwell", 0, 48 * MIB, "pytorch/pytorch CublasHandlePool.cpp, pull 120925"
)
"""Workspaces of cuBLAS' two handles there, beyond the 8 MiB each that are counted as tensors."""
NCCL = OutsideAllocator("buffers of NCCL", 200 * MIB, 1600 * MIB, "NVIDIA/nccl issues 864 and 986")


def outside_of_allocator(devices: int) -> list[OutsideAllocator]:
    return [CONTEXT, WORKSPACES] + ([NCCL] if devices > 1 else [])
