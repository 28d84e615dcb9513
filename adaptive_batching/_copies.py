"""Copies from the host that it does not wait for."""

from __future__ import annotations

import torch

_PINS_MEMORY = ("cuda", "xpu")


def without_waiting(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``, and go on while it is copied there.

    A copy from ordinary memory would wait until the device has finished all its work, so that the next micro-batch
    could not be collated meanwhile.
    """
    pins = device.type in _PINS_MEMORY  # elsewhere a copy that is not waited for could outlive its source
    if pins and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=pins)
