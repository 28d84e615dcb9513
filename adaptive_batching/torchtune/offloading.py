"""torchtune's activation offloading as a trace sees it: what is on the device, and when."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class TracedOffloading(saved_tensors_hooks):
    """Does to fake tensors what ``OffloadActivations`` does on CUDA, with its defaults and streams.

    An activation stays on the device until five more have been saved, because the copy to the host may not have ended.
    In the backward pass it comes back, and goes when the node that took it has run. A copy on the host takes no memory
    of the device.
    """

    def __init__(self) -> None:
        self._count = 0
        self._saved: dict[int, Any] = {}
        self._staying: dict[int, torch.Tensor] = {}
        self._brought: dict[int, torch.Tensor] = {}
        self._node: Any = None
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> int:
        self._count += 1
        number = self._count
        stays = (
            tensor.numel() * tensor.element_size() < _SMALLEST
            or isinstance(tensor, (torch.nn.Parameter, torch.nn.Buffer))
            or is_traceable_wrapper_subclass(tensor)
        )
        if stays:
            self._saved[number] = tensor
            return number
        for earlier in list(self._staying):
            if earlier > number - _MOST_STAYING:
                break
            del self._staying[earlier]
        self._staying[number] = tensor
        self._saved[number] = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        return number

    def _unpack(self, number: int) -> torch.Tensor:
        saved = self._saved.pop(number)
        if isinstance(saved, torch.Tensor):
            return saved
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self._node = node
            self._brought.clear()
        if number in self._staying:
            return self._staying[number]
        shape, strides, dtype, device = saved
        self._brought[number] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return self._brought[number]


_SMALLEST = 1024
_MOST_STAYING = 5
