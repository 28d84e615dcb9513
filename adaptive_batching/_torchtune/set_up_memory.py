"""Memory that a set-up takes of a device while it makes models and loads their weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
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
    with Allocations() as made:
        _quantize(shape, like)
    held = most = 0
    for event in made.events:
        held += made.sizes[event] if event >= 0 else -made.sizes[~event]
        most = max(most, held)
    return most


def _quantize(shape: torch.Size, like: Any) -> None:
    whole = torch.empty(shape, dtype=like.dtype, device="meta")
    NF4Tensor.from_tensor(whole, like.block_size, like.scaler_block_size)


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what operations under it allocate on the meta device and free, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[int] = []
        """The number of an allocation, or ``~number`` where it is freed."""
        self.sizes: list[int] = []
        """Bytes of each allocation."""
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._known: dict[Hashable, tuple[list[int], list[int]]] = {}

    def load(self, model: nn.Module) -> None:
        """Note what loading the weights of a model takes on one device: those in NF4 are quantized there."""
        for parameter in model.parameters():
            if isinstance(parameter, NF4Tensor):
                self._repeat(parameter.shape, lambda like=parameter: _quantize(like.shape, like))

    def start_dora(self, module: Any) -> None:
        """Note what the first magnitude of a DoRA layer takes (``initialize_dora_magnitude``)."""

        def norm() -> None:
            lora = module.lora_b.weight @ module.lora_a.weight
            module._get_weight_norm(module.weight.to(lora.dtype), lora)

        with torch.no_grad():
            self._repeat(("dora", module.weight.shape), norm)

    def _repeat(self, key: Hashable, function: Callable[[], None]) -> None:
        """Call a function that leaves nothing behind, or note again what it did for the same key."""
        start, first = len(self.events), len(self.sizes)
        if key not in self._known:
            function()
            of_first = [event - first if event >= 0 else ~(~event - first) for event in self.events[start:]]
            self._known[key] = of_first, self.sizes[first:]
            return
        events, sizes = self._known[key]
        self.events += [event + first if event >= 0 else ~(~event + first) for event in events]
        self.sizes += sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._hold(get_untyped_storages(value))
        return out

    def _hold(self, storages: Iterable[Any]) -> None:
        for storage in storages:
            key, size = storage._cdata, storage.nbytes()
            if size and key not in self._seen and storage.device.type == "meta":
                number = len(self.sizes)
                self._seen[key] = weakref.ref(storage, lambda _, key=key, number=number: self._free(key, number))  # type: ignore[misc]
                self.sizes.append(size)
                self.events.append(number)

    def _free(self, key: int, number: int) -> None:
        self._seen.pop(key, None)
        self.events.append(~number)


def _bytes(tensor: Any) -> int:
    return sum(storage.nbytes() for storage in get_untyped_storages(tensor))
