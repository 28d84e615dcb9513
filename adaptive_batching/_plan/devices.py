"""GPUs by name: how much memory programs find on them, and how fast they multiply matrices at most."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from adaptive_batching._trace.allocator import GIB, MIB
from adaptive_batching._values import ConfigError


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float
    """Memory that a program finds: less than the nominal amount by what error correction and the driver keep. Totals as
    out-of-memory messages of PyTorch state them; drivers differ by some 0.2 GiB, and the lower ones are taken."""

    peak_tflops: float
    """Dense bfloat16 products summed in float32, from NVIDIA's data sheets; float16 on GPUs without bfloat16."""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)


GPUS = [
    Gpu("T4", 14.56, 65), Gpu("V100-16GB", 15.77, 125), Gpu("V100-32GB", 31.73, 125), Gpu("A10", 22.0, 125),
    Gpu("A10G", 22.0, 70), Gpu("L4", 22.0, 121), Gpu("RTX 3090", 23.68, 71), Gpu("RTX 4090", 23.53, 165),
    Gpu("RTX 5090", 31.36, 210), Gpu("A6000", 47.4, 155), Gpu("L40S", 44.4, 362), Gpu("A100-40GB", 39.39, 312),
    Gpu("A100-80GB", 79.15, 312), Gpu("H100", 79.1, 989), Gpu("H200", 139.8, 989), Gpu("B200", 178.3, 2250),
]  # fmt: skip


@dataclass(frozen=True)
class Outside:
    """Memory of a device that is in use outside PyTorch's allocator."""

    name: str
    least: int
    most: int
    source: str


CONTEXT = Outside("CUDA context and kernels", 300 * MIB, 700 * MIB, "pytorch/pytorch issues 28113 and 107667")
WORKSPACES = Outside("more for cuBLAS, on Hopper", 0, 48 * MIB, "pytorch/pytorch CublasHandlePool.cpp, pull 120925")
"""Workspaces of cuBLAS' two handles there, beyond the 8 MiB each that are counted as tensors."""
NCCL = Outside("buffers of NCCL", 200 * MIB, 1600 * MIB, "NVIDIA/nccl issues 864 and 986")


def outside_of_allocator(devices: int) -> list[Outside]:
    return [CONTEXT, WORKSPACES] + ([NCCL] if devices > 1 else [])


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name; ConfigError if there is none, or more than one."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla|pcie|sxm\d?", "", text.lower())

    exact = [gpu for gpu in GPUS if plain(gpu.name) == plain(name)]
    found = exact or [gpu for gpu in GPUS if plain(name) and plain(gpu.name).startswith(plain(name))]
    if len(found) == 1:
        return found[0]
    known = ", ".join(gpu.name for gpu in found or GPUS)
    if found:
        raise ConfigError(f"--gpu {name!r} is one of several ({known}); name one of them")
    closest = difflib.get_close_matches(name, [gpu.name for gpu in GPUS], n=1)
    hint = f"; did you mean {closest[0]!r}?" if closest else f"; known are {known}"
    raise ConfigError(f"--gpu {name!r} is unknown{hint} Or give its memory: --memory 24GiB")
