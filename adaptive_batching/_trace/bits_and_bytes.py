"""Optimizers of bitsandbytes: as a trace sees them, and the managed memory in which paged ones keep their states.

Their kernels update states in place, so that there is nothing to trace. Nor may they run in a trace: a fake tensor has
no address, ``bitsandbytes/functional.py`` launches those that fill paged states, and before 0.47 all, on null pointers,
and the states that a trace made would be real, and never freed.

What takes memory is decided in ``bitsandbytes/optim/optimizer.py``: states of 32 bits in float32 whatever the weights
are; of 8 bits with a float32 scale for each block of 256, and 32 bits for parameters of fewer than 4,096 elements. A
paged optimizer keeps states of at least 100,000 elements in managed memory, which PyTorch's allocator knows nothing of,
and which bitsandbytes never frees.

What of it lies on the device counts as used there (bitsandbytes issue 801), until something else needs the room: then
the driver moves to the host what was used longest ago (``nvidia-uvm/uvm_pmm_gpu.c`` of NVIDIA's open kernel modules).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

_SMALLEST_OF_8_BITS, _SMALLEST_PAGED, _BLOCK = 4096, 100_000, 256
_HOST = -1  # CU_DEVICE_CPU


class BlockWise(Optimizer):
    """Stands in for an optimizer of bitsandbytes that has, for each element, ``num_states`` states of ``bits`` bits."""

    def __init__(self, params: Any, num_states: int = 2, bits: int = 32, paged: bool = False, **arguments: Any) -> None:
        defaults = {"lr": arguments.get("lr", 1e-3), "num_states": num_states, "bits": bits, "paged": paged}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make the states, as a first step does."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter in self.state:
                    continue
                of_8_bits = group["bits"] == 8 and parameter.numel() >= _SMALLEST_OF_8_BITS
                dtype = torch.uint8 if of_8_bits else torch.float32
                states: dict[str, Any] = {"step": 0}
                self.state[parameter] = states
                for number in range(1, group["num_states"] + 1):
                    if not _is_paged(parameter, group):
                        states[f"state{number}"] = torch.zeros_like(parameter, dtype=dtype)
                    if of_8_bits:
                        blocks = -(-parameter.numel() // _BLOCK)
                        states[f"absmax{number}"] = torch.zeros(blocks, device=parameter.device)


def _is_paged(parameter: torch.Tensor, group: dict[str, Any]) -> bool:
    return bool(group.get("paged")) and parameter.numel() >= _SMALLEST_PAGED


def traced_as(optimizer: Any) -> Optimizer:
    """Return what a trace steps in place of ``optimizer``: a stand-in for one of bitsandbytes, any other itself."""
    bases = [base for base in type(optimizer).__mro__ if base.__module__.startswith("bitsandbytes.")]
    if not bases:
        return optimizer  # type: ignore[no-any-return]
    names = {base.__name__ for base in bases}
    num_states = 3 if "AdEMAMix" in names else 2 if "Optimizer2State" in names else 1
    groups = [dict(group) for group in optimizer.param_groups]
    tensors = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    # Those of a checkpoint are loaded to the device, and on the CPU no optimizer pages: what there is, counts.
    paged = any(map(is_managed, tensors)) if tensors else optimizer.is_paged
    return BlockWise(groups, num_states, optimizer.args.optim_bits, paged)


def paged_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of states that a :class:`BlockWise` leaves to managed memory; 0 for another optimizer."""
    return sum(
        group["num_states"] * parameter.numel() * group["bits"] // 8
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and _is_paged(parameter, group)
    )


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


def move_to_host(device: torch.device) -> None:
    """Move this process's managed memory off ``device``, so that it can be read how much there is to take.

    It comes back where it is used. What a driver does not move, as on Windows, cannot be evicted either.
    """
    library = sys.modules.get("bitsandbytes.functional")
    if library is None or device.type != "cuda":
        return
    # Not by prefetch_tensor(to_cpu=True), which asks for an attribute of device -1 and ends the process.
    with contextlib.suppress(OSError, AttributeError):  # the driver of another vendor
        prefetch = ctypes.CDLL("libcuda.so.1").cuMemPrefetchAsync
        for tensor in library.GlobalPageManager.get_instance().paged_tensors:
            prefetch(ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), _HOST, None)
        torch.cuda.synchronize(device)
