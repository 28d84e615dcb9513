"""The managed memory in which paged optimizers of bitsandbytes keep their states.

PyTorch's allocator knows nothing of it, and bitsandbytes never frees it. What of it lies on the device counts as used
there (bitsandbytes issue 801), until something else needs the room: then the driver moves to the host what was used
longest ago (``nvidia-uvm/uvm_pmm_gpu.c`` of NVIDIA's open kernel modules).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from adaptive_batching._memory.meter import MemoryMeter

_HOST = -1  # CU_DEVICE_CPU


def is_managed(tensor: Any) -> bool:
    """Return True for a tensor in managed memory, which says that it is on the CPU."""
    return bool(getattr(tensor, "is_paged", False))


def make_paged_states(optimizers: Iterable[Any]) -> list[torch.Tensor]:
    """Make the states that paged optimizers lack, as their first step would, and return those in managed memory.

    They stay: dropped, their memory would be lost, and training would allocate it a second time. All are zero.
    """
    states: list[torch.Tensor] = []
    for optimizer in optimizers:
        if not (getattr(optimizer, "is_paged", False) and hasattr(optimizer, "init_state")):
            continue
        for group_index, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad and not optimizer.state[parameter]:
                    optimizer.init_state(group, parameter, group_index, index)
                    states += filter(is_managed, optimizer.state[parameter].values())
    return states


def set_to_zero(tensors: Sequence[torch.Tensor]) -> None:
    """Set tensors in managed memory to zero, as ``init_state`` does: on the device, in the time of one kernel each."""
    for tensor in tensors:
        sys.modules["bitsandbytes.functional"].fill(tensor, 0)


def free_without_managed(meter: MemoryMeter) -> int:
    """Return the bytes that are free once this process's managed memory, which makes room, is moved off the device.

    It comes back where it is used. What a driver does not move, as on Windows, cannot be evicted either.
    """
    library = sys.modules.get("bitsandbytes.functional")
    if library is not None and meter.device.type == "cuda":
        # Not by prefetch_tensor(to_cpu=True), which asks for an attribute of device -1 and ends the process.
        with contextlib.suppress(OSError, AttributeError):  # the driver of another vendor
            prefetch = ctypes.CDLL("libcuda.so.1").cuMemPrefetchAsync
            for tensor in library.GlobalPageManager.get_instance().paged_tensors:
                prefetch(ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), _HOST, None)
            torch.cuda.synchronize(meter.device)
    return meter.free_bytes()
