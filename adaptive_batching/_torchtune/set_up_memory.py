"""Allocations of a set-up: models are made on a device, and their weights are loaded."""

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
from torchtune.modules.peft import get_adapter_params

from adaptive_batching._trace.reserved import SetUp


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what operations under it allocate on the meta device and free, in order, and what it is told of.

    On one device a model is made there, and weights are copied into it from the host. Those in NF4 come as they were,
    and are quantized there (``copy_`` in ``torchao/dtypes/nf4tensor.py``). On several devices, models are made on the
    meta device, and each weight is whole for a moment, before its shard is cut out of it
    (``load_from_full_model_state_dict`` in torchtune, ``_broadcast_state_dict`` in
    ``torch/distributed/_state_dict_utils.py``).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events: list[int] = []
        self._sizes: list[int] = []
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._known: dict[Hashable, tuple[list[int], list[int]]] = {}

    def so_far(self, *, empties_cache: bool = False) -> SetUp:
        return SetUp(tuple(self._events), tuple(self._sizes), empties_cache)

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note tensors on the meta device that have not been seen, until they die."""
        for storage in (storage for tensor in tensors for storage in get_untyped_storages(tensor)):
            key, size = storage._cdata, storage.nbytes()
            if size and key not in self._seen and storage.device.type == "meta":
                number = self._take(size)
                self._seen[key] = weakref.ref(storage, lambda _, key=key, number=number: self._free(key, number))  # type: ignore[misc]

    def load(self, model: nn.Module, *, on_host: bool = False) -> None:
        """Note what loading the weights of a model takes; ``on_host`` where its shards are kept there."""
        adapters = get_adapter_params(model)
        if not on_host:
            self.hold(parameter.to_local() for parameter in adapters.values() if isinstance(parameter, DTensor))
        for name, parameter in sorted(model.named_parameters()):
            if name in adapters:  # not in the checkpoint
                continue
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            is_sharded = local is not parameter
            whole = None
            if isinstance(local, NF4Tensor):
                self._quantize(parameter.shape, local)
            elif is_sharded:
                whole = self._take(parameter.numel() * parameter.element_size())
            if is_sharded and on_host:
                for storage in get_untyped_storages(local):
                    self._events.append(~self._take(storage.nbytes()))
            elif is_sharded:
                self.hold([local])
            if whole is not None:
                self._events.append(~whole)

    def start_dora(self, layer: Any) -> None:
        """Note what the first magnitude of a DoRA layer takes (``initialize_dora_magnitude``)."""

        def norm() -> None:
            lora = layer.lora_b.weight @ layer.lora_a.weight
            layer._get_weight_norm(layer.weight.to(lora.dtype), lora)

        with torch.no_grad():
            self._repeat(("dora", layer.weight.shape), norm)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.hold(value for value in tree_iter(out) if isinstance(value, torch.Tensor))
        return out

    def _quantize(self, shape: torch.Size, like: Any) -> None:
        def quantize() -> None:
            whole = torch.empty(shape, dtype=like.dtype, device="meta")
            NF4Tensor.from_tensor(whole, like.block_size, like.scaler_block_size)

        self._repeat(shape, quantize)

    def _repeat(self, key: Hashable, function: Callable[[], None]) -> None:
        """Note what a function allocates that leaves nothing behind; it is called once for a key."""
        start, first = len(self._events), len(self._sizes)
        if key not in self._known:
            with self:
                function()
            self._known[key] = _shifted(self._events[start:], -first), self._sizes[first:]
            return
        events, sizes = self._known[key]
        self._events += _shifted(events, first)
        self._sizes += sizes

    def _take(self, size: int) -> int:
        self._sizes.append(size)
        self._events.append(len(self._sizes) - 1)
        return len(self._sizes) - 1

    def _free(self, key: int, number: int) -> None:
        self._seen.pop(key, None)
        self._events.append(~number)


def _shifted(events: list[int], by: int) -> list[int]:
    return [event + by if event >= 0 else event - by for event in events]
