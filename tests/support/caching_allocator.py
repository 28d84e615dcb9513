"""A training step that takes memory from a model of CUDA's caching allocator, for tests without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batching._caching_allocator import Segments
from adaptive_batching._memory import MemoryMeter
from adaptive_batching._trace import allocator, traced_step
from adaptive_batching._trace.allocator import GIB, KIB, MIB
from adaptive_batching._trace.training import TrainingStep

__all__ = ["GIB", "KIB", "MIB", "CachingAllocator", "Device", "Layer", "Memory", "Recorded"]


class CachingAllocator(allocator.CachingAllocator):
    """Fails as torch does."""

    full = torch.OutOfMemoryError

    def __init__(self, limit: float) -> None:
        super().__init__(limit)
        self.freed = 0

    def empty_cache(self) -> None:
        before = self.reserved
        super().empty_cache()
        self.freed += before - self.reserved


class Tape:
    """Takes down what is allocated and freed, in place of an allocator."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.sizes: list[int] = []

    def take(self, num_bytes: int, stream: int = 0) -> int:
        self.sizes.append(num_bytes)
        self.events.append(len(self.sizes) - 1)
        return self.events[-1]

    def give_back(self, number: int) -> None:
        self.events.append(~number)


class Recorded(traced_step.Recorded):
    def at_peak(self) -> tuple[str, dict[str, int]]:
        return "", {}  # neither the moment nor kinds of memory have a name here


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
    overhead: float = 1.0  # instead of the allocator's rules: bytes reserved for each byte allocated
    workspace_bytes: int = 0  # taken from the allocator by the first step, and kept; no trace sees it
    rules: Segments | None = None  # by which the allocator says that it reserves memory
    fails_safely: bool = True
    is_predictable: bool = False
    keeps_freed_memory: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    device_name: str = "a model"

    def __post_init__(self) -> None:
        self.allocator = CachingAllocator(self.total_bytes) if self.overhead == 1 else Inflated(self)
        self._loaded = 0
        self._workspace: list[Memory] = []
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
        if self.workspace_bytes and not self._workspace:
            self._workspace.append(Memory(self.allocator, self.workspace_bytes))
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

    def recorded(self, tokens: int) -> Recorded:
        """Return what a trace would record of a step."""
        tape = Tape()
        traced = Device(self.total_bytes, (), self.length)
        traced.layers, traced.allocator, traced._loaded = self.layers, tape, 1  # type: ignore[assignment]
        traced._weights = [Memory(tape, layer.weights) for layer in self.layers]
        traced.optimizer = Moments(traced)
        traced.optimizer.make_states()
        num_resting = len(tape.sizes)
        states = range(len(self.layers), num_resting)
        tape.events.clear()
        traced.forward_backward(tokens)
        made = dict.fromkeys(states, len(tape.events))
        tape.events.clear()
        del tape.sizes[num_resting:]
        traced.step(tokens)
        return Recorded(tuple(tape.events), tuple(tape.sizes), num_resting, made=made)

    def training_step(self) -> TrainingStep:
        """Steps on batches of worst-case samples."""
        return TrainingStep(nn.Linear(1, 1), [self.optimizer], lambda size: size * self.length, lambda *_: self.step)

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

    def num_freed_bytes(self) -> int:
        return self.allocator.freed

    def segments(self) -> Segments | None:
        return self.rules

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


class Inflated(CachingAllocator):
    """Reserves a fixed share more than is allocated, whatever the sizes."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.total_bytes)
        self._overhead = device.overhead

    def take(self, num_bytes: int, stream: int = 0) -> Any:
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
