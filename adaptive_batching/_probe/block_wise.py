"""Optimizers of bitsandbytes as a trace sees them: their states, on the device or in managed memory.

Their kernels update states in place, so that there is nothing to trace. Nor may they run in a trace: a fake tensor has
no address, and before 0.47 ``bitsandbytes/functional.py`` launched them on null pointers; those that fill paged states,
and ask for them to be moved, it still does, and the states that a trace made would be real, and never freed.

What takes memory is decided in ``bitsandbytes/optim/optimizer.py``: states of 32 bits in float32 whatever the weights
are; of 8 bits with a float32 scale for each block of 256, and 32 bits for parameters of fewer than 4,096 elements. A
paged optimizer keeps states of at least 100,000 elements in managed memory, which PyTorch's allocator knows nothing of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from adaptive_batching._probe.managed_memory import is_managed

_SMALLEST_OF_8_BITS, _SMALLEST_PAGED, _BLOCK = 4096, 100_000, 256


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
                if parameter.grad is not None and parameter not in self.state:
                    self.state[parameter] = {"step": 0, **_states(parameter, group)}


def traced_as(optimizer: Any) -> Optimizer:
    """Return what a trace steps in place of ``optimizer``: a stand-in for one of bitsandbytes, any other itself."""
    bases = [base for base in type(optimizer).__mro__ if base.__module__.startswith("bitsandbytes.")]
    if not bases:
        return optimizer  # type: ignore[no-any-return]
    names = {base.__name__ for base in bases}
    num_states = 3 if "AdEMAMix" in names else 2 if "Optimizer2State" in names else 1
    groups = [dict(group) for group in optimizer.param_groups]
    found = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    # Those of a checkpoint are loaded to the device, and on the CPU no optimizer pages: what there is, counts.
    paged = any(map(is_managed, found)) if found else optimizer.is_paged
    return BlockWise(groups, num_states, optimizer.args.optim_bits, paged)


def paged_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of states that a :class:`BlockWise` leaves to managed memory; 0 for another optimizer."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group.get("paged") and parameter.requires_grad and parameter.numel() >= _SMALLEST_PAGED:
                total += group["num_states"] * parameter.numel() * group["bits"] // 8
    return total


def _states(parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
    small = group["bits"] == 8 and parameter.numel() < _SMALLEST_OF_8_BITS
    of_8_bits = group["bits"] == 8 and not small
    found = {}
    for number in range(group["num_states"]):
        if not (group["paged"] and parameter.numel() >= _SMALLEST_PAGED):
            dtype = torch.uint8 if of_8_bits else torch.float32
            found[f"state{number + 1}"] = torch.zeros_like(parameter, dtype=dtype)
        if of_8_bits:
            blocks = -(-parameter.numel() // _BLOCK)
            found[f"absmax{number + 1}"] = torch.zeros(blocks, device=parameter.device)
    return found
