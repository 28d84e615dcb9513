"""Optimizers of bitsandbytes as a trace sees them: their states, on the device or in managed memory.

Their kernels update states in place and need CUDA, so that there is nothing to trace. What takes memory is decided in
``bitsandbytes/optim/optimizer.py``: states of 32 bits in float32 whatever the weights are; of 8 bits with a float32
scale for each block of 256, and 32 bits for parameters of fewer than 4,096 elements. A paged optimizer keeps states of
at least 100,000 elements in managed memory, which PyTorch's allocator knows nothing of.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.optim import Optimizer

from adaptive_batching._values import ConfigError

_STATES = {"Adam": 2, "AdamW": 2, "Lion": 1, "SGD": 1, "RMSprop": 1, "Adagrad": 1, "LAMB": 2, "AdEMAMix": 3}
_SMALLEST_OF_8_BITS, _SMALLEST_PAGED, _BLOCK = 4096, 100_000, 256


def stand_in_for(component: str) -> dict[str, Any] | None:
    """Return arguments of :class:`BlockWise` for a component of a config; None if it is not of bitsandbytes.

    Raises:
        ConfigError: If it is one whose states are not known.
    """
    if not component.startswith("bitsandbytes."):
        return None
    match = re.fullmatch(r"(Paged)?([A-Za-z]+?)(8bit|32bit)?", component.split(".")[-1])
    if match is None or match[2] not in _STATES:
        raise ConfigError(
            f"optimizer._component_={component} is not known to the plan; known are those of bitsandbytes called "
            f"{', '.join(_STATES)}, also Paged..., ...8bit"
        )
    return {"num_states": _STATES[match[2]], "bits": 8 if match[3] == "8bit" else 32, "paged": match[1] is not None}


class BlockWise(Optimizer):
    """Stands in for an optimizer of bitsandbytes.

    Args:
        params: Parameters, or groups of them.
        num_states: States for each element.
        bits: Of a state.
        paged: True to keep large states in managed memory.
        arguments: Of the original; they do not matter to memory.
    """

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


def paged_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of states that an optimizer keeps in managed memory."""
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
