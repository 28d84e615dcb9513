"""Memory that a set-up takes of a device while it loads the weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torchao.dtypes.nf4tensor import NF4Tensor


def set_up_bytes(*models: nn.Module, on_host: bool = False) -> int:
    """Return the most that loading models takes, one after the other, with what is there by then.

    On one device weights are copied into a model from the host, one by one. Those in NF4 come as they were,
    and are quantized there (``copy_`` in ``torchao/dtypes/nf4tensor.py``). On several devices each weight is whole for
    a moment, before its shard is cut out of it (``load_from_full_model_state_dict`` in torchtune,
    ``_broadcast_state_dict`` in ``torch/distributed/_state_dict_utils.py``).

    Args:
        models: The models, set up on the meta device, in the order in which they are loaded.
        on_host: Shards are kept on the host.
    """
    held = most = 0
    for model in models:
        stays, moment = _loaded(model, on_host=on_host)
        held += stays
        most = max(most, held + moment)
    return most


def _loaded(model: nn.Module, *, on_host: bool) -> tuple[int, int]:
    """Return the bytes that stay of a model once it is loaded, and the most that a weight takes for a moment."""
    stays = sum(map(_bytes, model.buffers()))
    largest = 0
    sizes: dict[torch.Size, int] = {}
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        stays += 0 if on_host else _bytes(local)
        moment = _bytes(local) if on_host else 0
        if isinstance(local, NF4Tensor):
            if parameter.shape not in sizes:
                sizes[parameter.shape] = _quantizing_bytes(parameter.shape, local)
            moment += sizes[parameter.shape]
        elif isinstance(parameter, DTensor):
            moment += parameter.numel() * parameter.element_size()
        largest = max(largest, moment)
    return stays, largest


def _quantizing_bytes(shape: torch.Size, like: Any) -> int:
    """Return the most that a weight takes while it is quantized, itself and the result included."""
    with _Peak() as peak:
        NF4Tensor.from_tensor(
            torch.empty(shape, dtype=like.dtype, device="meta"), like.block_size, like.scaler_block_size
        )
    return int(peak.bytes)


class _Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the most bytes that are in use at once, of what operations make under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self._current = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._hold(get_untyped_storages(value))
        return out

    def _hold(self, storages: Iterable[Any]) -> None:
        for storage in storages:
            key, size = storage._cdata, storage.nbytes()
            if key not in self._seen and storage.device.type == "meta":
                self._seen[key] = weakref.ref(storage, lambda _, key=key, size=size: self._free(key, size))  # type: ignore[misc]
                self._current += size
                self.bytes = max(self.bytes, self._current)

    def _free(self, key: int, size: int) -> None:
        self._seen.pop(key, None)
        self._current -= size


def _bytes(tensor: Any) -> int:
    return sum(storage.nbytes() for storage in get_untyped_storages(tensor))
