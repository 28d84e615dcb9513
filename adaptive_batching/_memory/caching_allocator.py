"""The caching allocator of a device: what it counts, and what its settings say of how it reserves memory."""

from __future__ import annotations

import os
import re
from typing import Any

import torch

_ALLOCATOR_VARIABLES = (
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
)  # fmt: skip
BYTES_IN_USE = "allocated_bytes.all.current"
"""The name by which :func:`counted` gives the bytes in use."""

RETRIES = "num_alloc_retries"
"""The name by which it gives how often the allocator has emptied its cache and tried again."""


def workspace_bytes(device: int | None = None) -> int:
    """Return what a handle of cuBLAS keeps for its products; that of Ampere and Ada where the device is not known.

    There are two: of the thread that runs forward passes, and of autograd's. From ``parseChosenWorkspaceSize`` in
    ``CublasHandlePool.cpp``; Blackwell's are larger since pytorch/pytorch pull 175344.
    """
    if chosen := re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")):
        return sum(int(kibibytes) * int(count) for kibibytes, count in chosen) * 2**10
    major = torch.cuda.get_device_capability(device)[0] if torch.cuda.is_initialized() else 8  # type: ignore[no-untyped-call]
    large = (9, 10, 12) if torch.__version__ >= "2.12" else (9,)
    return 32 * 2**20 if major in large else 8 * 2**20 + 128 * 2**10


def settings_in_environment() -> dict[str, str]:
    """Return the settings in the environment that change how much the allocator reserves."""
    return {name: os.environ[name] for name in _ALLOCATOR_VARIABLES if name in os.environ}


def allocator_advice(device: torch.device) -> str | None:
    """Return a setting of CUDA's caching allocator that would let more fit, or None if it is set or does not apply."""
    # By default it splits segments of fixed size, and the unused gaps between blocks count as taken.
    chosen = " ".join(os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES)
    if device.type != "cuda" or "expandable_segments" in chosen or "backend:cudaMallocAsync" in chosen:
        return None
    if torch.version.hip is not None and int(torch.version.hip.split(".")[0]) < 7:
        return None  # it has no such segments
    return "PYTORCH_ALLOC_CONF=expandable_segments:True"


def counted(device: torch.device, name: str) -> int:
    """Return what the device's allocator counts by a name of ``torch.cuda.memory_stats``; 0 if it does not count."""
    module = torch.get_device_module(device)
    if not hasattr(module, "memory_stats_as_nested_dict"):
        return int(module.memory_stats(device).get(name, 0)) if hasattr(module, "memory_stats") else 0
    stats: Any = module.memory_stats_as_nested_dict(device)  # which takes an eighth of the time, in each step
    for key in name.split("."):
        stats = stats.get(key, {})
    return int(stats or 0)
