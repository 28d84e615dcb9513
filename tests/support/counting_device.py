"""A training step on a device that counts bytes, for tests of decisions without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batching._memory.meter import MemoryMeter
from adaptive_batching._probe.probed_step import TrainingStep

KIB, MIB, GIB = 2**10, 2**20, 2**30


class Memory:
    """Bytes that are taken for as long as this object lives, as a tensor's are."""

    def __init__(self, allocator: Any, num_bytes: int) -> None:
        self._allocator = allocator
        self._block = allocator.take(num_bytes)

    def __del__(self) -> None:
        if hasattr(self, "_block"):
            self._allocator.give_back(self._block)


@dataclass(frozen=True)
class Layer:
    """Memory that a layer takes."""

    weights: int
    kept_per_token: int  # from the forward to the backward pass
    passing_per_token: int  # while it runs


@dataclass
class Device(MemoryMeter):
    """A device with an allocator, other memory, and a model whose training steps run on it."""

    total_bytes: int = 0
    layers: Sequence[Layer] = ()
    length: int = 512  # tokens of a worst-case sample
    libraries_bytes: int = 0  # taken by the first step, unknown to the allocator, and never given back
    overhead: float = 1.0  # bytes reserved for each byte allocated
    fails_safely: bool = True
    is_predictable: bool = False
    keeps_freed_memory: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    device_name: str = "a model"

    def __post_init__(self) -> None:
        self.allocator = Allocator(self.total_bytes, self.overhead)
        self._loaded = 0
        self._weights = [Memory(self.allocator, layer.weights) for layer in self.layers]
        self.optimizer = Moments(self)
        self.steps: list[int] = []
        self.errors = 0

    def step(self, tokens: int) -> None:
        """Run forward, backward and optimizer step on so many padded tokens."""
        self.steps.append(tokens)
        try:
            self.forward_backward(tokens)
            self.optimizer.make_states()
            temporaries = [Memory(self.allocator, layer.weights) for layer in self.layers]  # as of a foreach optimizer
            del temporaries
        except torch.OutOfMemoryError:
            self.errors += 1
            raise

    def forward_backward(self, tokens: int) -> None:
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

    def training_step(self) -> TrainingStep:
        """Steps on batches of worst-case samples."""
        return TrainingStep(nn.Linear(1, 1), [self.optimizer], lambda size: size * self.length, self.step)

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

    def outside_bytes(self) -> int:
        return 0

    def num_retries(self) -> int:
        return self.allocator.retries

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


class Moments(Optimizer):
    """Has two numbers for each weight of a device's layers, which its first step makes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        super().__init__([nn.Parameter(torch.zeros(1)) for _ in range(max(len(device.layers), 1))], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.make_states()

    def make_states(self) -> None:
        for parameter, layer in zip(self.param_groups[0]["params"], self._device.layers, strict=False):
            if parameter not in self.state:
                self.state[parameter]["moments"] = Memory(self._device.allocator, 2 * layer.weights)


class Allocator:
    """Reserves a fixed share more than is allocated, whatever the sizes, and fails as torch does."""

    def __init__(self, limit: float, overhead: float) -> None:
        self.limit, self._overhead = limit, overhead
        self.allocated = self.peak_allocated = self.retries = 0

    @property
    def peak_reserved(self) -> int:
        return int(self.peak_allocated * self._overhead)

    def take(self, num_bytes: int) -> int:
        if int((self.allocated + num_bytes) * self._overhead) > self.limit:
            self.retries += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes.")
        self.allocated += num_bytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.allocated -= num_bytes

    def empty_cache(self) -> None:
        pass

    def reset_peak(self) -> None:
        self.peak_allocated = self.allocated
