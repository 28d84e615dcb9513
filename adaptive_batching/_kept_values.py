"""How a value is kept, compared and put back: a tensor, a container, or what has a state of its own."""

from __future__ import annotations

import dataclasses
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._values import DRY_RUN

Place = tuple[nn.Module, str]
"""A module, and the name of an attribute, a buffer or a parameter that it has or may get."""

_NEAR = 2**16  # bytes of a tensor on a device that are compared on the host
_COLUMNS = 61
_PLAIN = {bool, int, float, complex, str, bytes, type(None)}


class KeptTensor:
    """A tensor and where its memory was; with a copy, also its values."""

    def __init__(self, tensor: torch.Tensor, place: Place | None) -> None:
        self.tensor, self.place = tensor, place
        self.parts = plain_parts(tensor)
        """Plain tensors of its values, each of which is in memory once."""

        self._alias = tensor.detach() if _is_plain(tensor) else None
        self._requires_grad = tensor.requires_grad
        self._version = _version_of(tensor)
        self._copies: list[torch.Tensor] | None = None
        self._fingerprints: list[torch.Tensor | None] = [None] * len(self.parts)

    def copy(self, *, on_host: bool) -> None:
        if not on_host:
            try:
                self._copies = [part.detach().clone() for part in self.parts]
                return
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
        self._copies = [part.detach().to("cpu", copy=True) for part in self.parts]  # also where the device is full
        self._fingerprints = [fingerprint(part) if _is_far(part) else None for part in self.parts]

    @property
    def _has_moved(self) -> bool:
        if self._alias is None:
            return False
        here, before = self.tensor, self._alias
        same = (here.shape, here.dtype, here.device) == (before.shape, before.dtype, before.device)
        return not (same and here.stride() == before.stride() and here.data_ptr() == before.data_ptr())

    @property
    def was_written(self) -> bool:
        """True if an operation has written to the tensor, even the same values; copies are not needed to know."""
        return _version_of(self.tensor) != self._version

    @property
    def has_changed(self) -> bool:
        return self._has_moved or any(True for _ in self._changed())

    def put_back(self) -> None:
        if self._alias is not None and self._has_moved:
            self.tensor.data = self._alias
        if self.tensor.is_leaf and self.tensor.requires_grad != self._requires_grad:
            self.tensor.requires_grad_(self._requires_grad)
        for part, saved in self._changed():  # a write to others would break a backward that is still to come
            with torch.inference_mode(part.is_inference()), torch.no_grad():
                part.copy_(saved)

    def _changed(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for part, saved, before in zip(self.parts, self._copies or (), self._fingerprints, strict=bool(self._copies)):
            is_same = _same_bits(part, saved) if before is None else torch.equal(fingerprint(part), before)
            if not is_same:
                yield part, saved


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # those that were made for inference have none


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return True if the values of a tensor are those of others within it, as of quantized weights."""
    return type(tensor) not in (torch.Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__")


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not _is_wrapper(tensor) and not tensor.is_quantized


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return plain tensors that share the values of ``tensor``, without dimensions that repeat them."""
    if isinstance(tensor, DTensor):
        return plain_parts(tensor.to_local().detach())
    if _is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [part for name in names for part in plain_parts(getattr(tensor, name))]
    if tensor.layout == torch.sparse_coo:
        return [*plain_parts(tensor._indices()), *plain_parts(tensor._values())]
    if tensor.device.type == "meta" or not _is_plain(tensor):
        return []
    repeated = [at for at, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[at] > 1]
    if not repeated:
        return [tensor]  # itself, with what it may have for attributes
    view = tensor.detach()
    for dimension in repeated:
        view = view.narrow(dimension, 0, 1)
    return [view]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, as large numbers as possible."""
    flat = tensor.detach().contiguous().flatten()
    raw = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single number may have any stride
    return raw.view(torch.int64) if raw.numel() % 8 == 0 and raw.data_ptr() % 8 == 0 else raw


def _is_far(tensor: torch.Tensor) -> bool:
    """Return True if it takes long to bring a tensor to the host, to compare it there."""
    return tensor.device.type != "cpu" and tensor.nbytes > _NEAR and tensor.data_ptr() % 8 == 0


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return numbers that are others where bits of a tensor have changed, or words have changed places.

    Each is the exclusive or of every 61st word: a prime, so that rows that change places meet other columns. All of it
    runs on the tensor's device, in next to no memory.
    """
    raw = _raw(tensor)
    in_rows = raw.numel() // _COLUMNS * _COLUMNS
    rows = raw[:in_rows].view(-1, _COLUMNS)
    hashes = [torch.hash_tensor(rows, (0,)).view(torch.int64)] if in_rows else []
    return torch.cat([*hashes, raw[in_rows:].to(torch.int64)])  # a copy, also of a few words


def _same_bits(tensor: torch.Tensor, saved: torch.Tensor) -> bool:
    return tensor.shape == saved.shape and torch.equal(_raw(tensor).to(saved.device), _raw(saved))


def hash_of(parameter: nn.Parameter) -> int:
    if DRY_RUN in os.environ:  # where all values are zero, and reading them takes memory
        return 0
    hashes = (torch.hash_tensor(_raw(part)) for part in plain_parts(parameter) if part.numel())
    return hash(tuple(int(number.view(torch.int64)) for number in hashes))  # as uint64, half of them are no int


# Containers


def shallow(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def entries_of(container: Any) -> list[Any]:
    """Return the entries that may lead to something else, which numbers and texts do not."""
    entries = container.values() if isinstance(container, Mapping) else container
    return [] if _PLAIN.issuperset(map(type, entries)) else [each for each in entries if type(each) not in _PLAIN]


def is_as(container: Any, saved: Any) -> bool:
    """Return True if the entries of a container are the same objects as before, in the same order."""
    if len(container) != len(saved):
        return False
    if isinstance(container, set):
        return bool(container == saved)
    if isinstance(container, dict):
        pairs = zip(container.items(), saved.items(), strict=True)
        return all(now[0] is before[0] and now[1] is before[1] for now, before in pairs)
    return all(now is before for now, before in zip(container, saved, strict=True))


def refill(container: Any, saved: Any) -> None:
    container.clear()
    if isinstance(container, dict):
        for key, value in saved.items():
            container[key] = value
    else:
        (container.update if isinstance(container, set) else container.extend)(saved)


# Generators of random numbers, and arrays


@dataclasses.dataclass(frozen=True)
class HasState:
    """An object that is put back by a state of its own."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


def holder_of(value: Any) -> HasState | None:
    """Return how to read and set the state of a generator of random numbers or an array; None for anything else."""
    if isinstance(value, torch.Generator):
        generator = value
        return HasState(generator.get_state, lambda state: generator.set_state(state))
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
        return HasState(value.getstate, value.setstate)
    numpy = sys.modules.get("numpy")  # optional
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return HasState(lambda: value.get_state(legacy=False), value.set_state)
    if isinstance(value, (numpy.random.Generator, numpy.random.BitGenerator)):
        bits = getattr(value, "bit_generator", value)
        return HasState(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(value, numpy.ndarray) and value.flags.writeable and value.dtype != object:
        return HasState(value.copy, lambda saved: numpy.copyto(value, saved))
    return None


def same_state(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return torch.equal(now, before)
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(same_state(now[key], before[key]) for key in now)
    if hasattr(now, "tobytes"):  # an array
        return now.shape == before.shape and bool(now.tobytes() == before.tobytes())
    if isinstance(now, (list, tuple)):
        return len(now) == len(before) and all(map(same_state, now, before))
    return bool(now == before)
