"""A model of CUDA's caching allocator, and a training step that takes memory from it, for tests without a GPU.

The rules are those of PyTorch's default settings on one stream (c10/cuda/CUDACachingAllocator.cpp): sizes are rounded
up to 512 bytes; up to 1 MiB comes from segments of 2 MiB, below 10 MiB from segments of 20 MiB, and more from segments
of its own in steps of 2 MiB; the smallest free block that is large enough is taken, and split where enough would be
left over; free neighbours merge; where the limit is reached, segments that are wholly free are given back, and the
allocation is tried once more, which is a retry. What counts against a limit is what is reserved.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batching.probe.trial import TrainingStep

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass
class _Block:
    size: int
    small: bool
    before: _Block | None = None
    after: _Block | None = None
    key: tuple[int, int] = (0, 0)
    """Its place among the free blocks."""
    free: bool = False


class CachingAllocator:
    """Bytes reserved and allocated; ``limit`` bounds what is reserved."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = self.retries = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._count = 0

    def take(self, num_bytes: int) -> _Block:
        size = max(-(-num_bytes // 512), 1) * 512
        small = size <= MIB
        keys = self._free[small]
        at = bisect_left(keys, (size, 0))
        block = self._blocks.pop(keys.pop(at)) if at < len(keys) else self._new_segment(size, small)
        left = block.size - size
        if left >= 512 if small else left > MIB:
            rest = _Block(left, small, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._offer(rest)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give_back(self, block: _Block) -> None:
        self.allocated -= block.size
        if block.after is not None and block.after.free:
            self._withdraw(block.after)
            block.size += block.after.size
            block.after = block.after.after
            if block.after is not None:
                block.after.before = block
        if block.before is not None and block.before.free:
            before = block.before
            self._withdraw(before)
            before.size += block.size
            before.after = block.after
            if before.after is not None:
                before.after.before = before
            block = before
        self._offer(block)

    def empty_cache(self) -> None:
        """Give back the segments that are wholly free."""
        for block in [b for b in self._blocks.values() if b.before is None and b.after is None]:
            self._withdraw(block)
            self.reserved -= block.size

    def reset_peak(self) -> None:
        self.peak_reserved, self.peak_allocated = self.reserved, self.allocated

    def _new_segment(self, size: int, small: bool) -> _Block:
        segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + segment > self.limit:
            self.retries += 1
            self.empty_cache()
            if self.reserved + segment > self.limit:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return _Block(segment, small)

    def _offer(self, block: _Block) -> None:
        self._count += 1
        block.free, block.key = True, (block.size, self._count)
        self._blocks[block.key] = block
        insort(self._free[block.small], block.key)

    def _withdraw(self, block: _Block) -> None:
        keys = self._free[block.small]
        keys.pop(bisect_left(keys, block.key))
        del self._blocks[block.key]


class Memory:
    """Bytes that are taken for as long as this object lives, as a tensor's are."""

    def __init__(self, allocator: CachingAllocator, num_bytes: int) -> None:
        self._allocator = allocator
        self._block = allocator.take(num_bytes)

    def __del__(self) -> None:
        if hasattr(self, "_block"):
            self._allocator.give_back(self._block)


@dataclass(frozen=True)
class Layer:
    """Memory that a layer takes."""

    weights: int
    kept_per_token: int
    """From the forward to the backward pass."""
    passing_per_token: int
    """While it runs."""


@dataclass
class Device:
    """A device with an allocator, other memory, and a model whose training steps run on it.

    Also what a :class:`~adaptive_batching.memory.MemoryMeter` is.
    """

    total_bytes: int
    layers: Sequence[Layer]
    length: int = 512
    """Tokens of a worst-case sample."""
    libraries_bytes: int = 0
    """Taken by the first step, unknown to the allocator, and never given back."""
    overhead: float = 1.0
    """Instead of the allocator's rules: bytes reserved for each byte allocated."""

    fails_safely: bool = True
    is_predictable: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    device_name: str = "a model"

    def __post_init__(self) -> None:
        self.allocator = CachingAllocator(self.total_bytes) if self.overhead == 1 else Inflated(self)
        self._loaded = 0
        self._resting = [Memory(self.allocator, 3 * layer.weights) for layer in self.layers]  # with the optimizer's
        self.steps: list[int] = []
        self.errors = 0

    def step(self, tokens: int) -> None:
        """Run forward, backward and optimizer step on so many padded tokens."""
        self.steps.append(tokens)
        try:
            self.forward_backward(tokens)
            temporaries = [Memory(self.allocator, layer.weights) for layer in self.layers]  # as of a foreach optimizer
            del temporaries
        except torch.OutOfMemoryError:
            self.errors += 1
            raise

    def forward_backward(self, tokens: int) -> None:
        """Run forward and backward."""
        if not self._loaded:
            self._loaded = self.libraries_bytes
            self.allocator.limit = min(self.allocator.limit, self.total_bytes - self._loaded)
        kept = []
        for layer in self.layers:
            passing = Memory(self.allocator, layer.passing_per_token * tokens)
            kept.append(Memory(self.allocator, layer.kept_per_token * tokens))
            del passing
        gradients = []
        for layer in reversed(self.layers):
            passing = Memory(self.allocator, layer.passing_per_token * tokens)
            gradients.append(Memory(self.allocator, layer.weights))
            kept.pop()
            del passing

    def peak_allocated(self, tokens: int) -> int:
        """Bytes in use at once during a step, not rounded, as a trace would count them."""
        resting = sum(3 * layer.weights for layer in self.layers)
        current = peak = resting
        for layer in self.layers:
            peak = max(peak, current + (layer.passing_per_token + layer.kept_per_token) * tokens)
            current += layer.kept_per_token * tokens
        for layer in reversed(self.layers):
            peak = max(peak, current + layer.passing_per_token * tokens + layer.weights)
            current += layer.weights - layer.kept_per_token * tokens
        return max(peak, resting + sum(layer.weights for layer in self.layers))

    def training_step(self) -> TrainingStep:
        """Steps on batches of worst-case samples."""

        def bind(model: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[Any], None]:
            return self.step

        return TrainingStep(nn.Linear(1, 1), [], lambda batch_size: batch_size * self.length, bind)

    # As a meter

    def used_bytes(self) -> int:
        return self.allocator.allocated

    def free_bytes(self) -> int:
        return self.total_bytes - self._loaded - self.allocator.allocated

    def reset_peak(self) -> None:
        self.allocator.reset_peak()

    def peak_bytes(self) -> int:
        return self.allocator.peak_reserved

    def peak_allocated_bytes(self) -> int:
        return self.allocator.peak_allocated

    def num_retries(self) -> int:
        return self.allocator.retries

    def allocator_settings(self) -> dict[str, str]:
        return {}

    def release(self) -> None:
        self.allocator.empty_cache()

    def synchronize(self) -> None:
        pass

    @contextlib.contextmanager
    def limit(self, num_bytes: int) -> Iterator[None]:
        before = self.allocator.limit
        self.allocator.limit = min(num_bytes, self.total_bytes - self._loaded)
        try:
            yield
        finally:
            self.allocator.limit = self.total_bytes - self._loaded if before > num_bytes else before


class Inflated(CachingAllocator):
    """Reserves a fixed share more than is allocated, whatever the sizes."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.total_bytes)
        self._overhead = device.overhead

    def take(self, num_bytes: int) -> Any:
        if int((self.allocated + num_bytes) * self._overhead) > self.limit:
            self.retries += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes.")
        self.allocated += num_bytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = int(self.peak_allocated * self._overhead)
        return num_bytes

    def give_back(self, block: Any) -> None:
        self.allocated -= block

    def empty_cache(self) -> None:
        pass

    def reset_peak(self) -> None:
        self.peak_allocated = self.allocated
        self.peak_reserved = int(self.allocated * self._overhead)
