"""Memory that a run would take, whether a device has it, and the largest batch for which it has: without torch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from adaptive_batching._trace.allocator import MIB
from adaptive_batching._trace.reserved import NO_SET_UP, Reserved, SetUp, reserved_by_default, reserved_for
from adaptive_batching._trace.traced_step import MEMORY_KINDS, OTHER, WEIGHTS, TracedStep
from adaptive_batching._values import ConfigError, MemoryAmount

SET_UP = "set-up"  # the moment before the first step, while weights are loaded


def gpu_memory(text: str) -> int:
    """Return the bytes that ``--memory`` stands for.

    Raises:
        ConfigError: If it is no amount of memory.
    """
    with contextlib.suppress(ConfigError):
        if num_bytes := MemoryAmount.parse("--memory", text).num_bytes:
            return num_bytes
    raise ConfigError(f"--memory {text} is not a memory size; write 24GiB, or 24")


@dataclass(frozen=True)
class OutsideAllocator:
    """Bytes of a device that are in use outside PyTorch's allocator."""

    name: str
    least: int
    most: int
    source: str


CONTEXT = OutsideAllocator(
    "CUDA context and kernels", 300 * MIB, 800 * MIB, "pytorch/pytorch issues 28113 and 107667; 767 MiB on an H200"
)
WORKSPACES = OutsideAllocator(
    "more for cuBLAS, on Hopper and Blackwell", 0, 48 * MIB, "pytorch/pytorch CublasHandlePool.cpp, pull 120925"
)
"""Workspaces of cuBLAS' two handles there, beyond the 8 MiB each that are counted as tensors."""
NCCL = OutsideAllocator("buffers of NCCL", 200 * MIB, 1600 * MIB, "NVIDIA/nccl issues 864 and 986")


def outside_of_allocator(devices: int) -> list[OutsideAllocator]:
    return [CONTEXT, WORKSPACES] + ([NCCL] if devices > 1 else [])


class Answer(Enum):
    """The verdict on a run and a device's memory; the value is the exit code."""

    FITS = 0
    DOES_NOT_FIT = 1
    TIGHT = 3
    CANNOT_TELL = 4

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory and work of a step at one batch size."""

    batch_size: int
    peak_bytes: int  # of tensors
    resting_bytes: int  # of tensors, between steps
    moment: str  # part of the step that the peak falls into, or SET_UP
    kinds: dict[str, int]  # bytes at the peak
    reserved: Reserved
    outside: Sequence[OutsideAllocator]
    flops: int  # of a forward and backward, and an optimizer step
    recomputed_flops: int  # part of them for activations that are computed again
    attention_flops: int  # part of them that grows with the square of the length

    @property
    def least_bytes(self) -> int:
        """Least memory in which it can run, with expandable segments or without."""
        return min(self.reserved.least, self.reserved.least_expandable) + sum(
            overhead.least for overhead in self.outside
        )

    @property
    def most_bytes(self) -> int:
        """Memory in which it runs in any case, by default settings."""
        return self.reserved.by_default + sum(overhead.most for overhead in self.outside)

    def within(self, memory_bytes: int | None) -> Answer:
        if memory_bytes is None:
            return Answer.CANNOT_TELL
        if self.most_bytes <= memory_bytes:
            return Answer.FITS
        return Answer.TIGHT if self.least_bytes <= memory_bytes else Answer.DOES_NOT_FIT


@dataclass(frozen=True)
class Forecast:
    """A step at any batch size; methods raise TraceError if the order of allocations depends on the batch size."""

    step: TracedStep
    outside: Sequence[OutsideAllocator]
    set_up: SetUp = NO_SET_UP
    forwards: int = 1  # that the step has, each with its backward; floating-point operations are told of one

    def need(self, batch_size: int) -> MemoryEstimate:
        record = self.step.record_at(batch_size)
        peak, (moment, kinds) = max(record.log), record.at_peak()
        reserved = reserved_for(record, self.set_up)
        if self.set_up.most_bytes > peak:
            resting = zip(record.kinds[: record.num_resting], record.sizes, strict=False)
            weights = sum(size for kind, size in resting if kind == WEIGHTS)
            peak, moment = self.set_up.most_bytes, SET_UP
            kinds = {**dict.fromkeys(MEMORY_KINDS, 0), WEIGHTS: weights, OTHER: peak - weights}
        reserved = Reserved(**{name: max(size, self.set_up.most_bytes) for name, size in asdict(reserved).items()})
        flops = [total // self.forwards for total in (record.flops, record.recomputed_flops, record.attention_flops)]
        return MemoryEstimate(batch_size, peak, record.log[0], moment, kinds, reserved, self.outside, *flops)

    def most_bytes(self, batch_size: int) -> int:
        """Return what a step takes by default settings, with the most outside the allocator."""
        return self._reserved(batch_size) + sum(overhead.most for overhead in self.outside)

    def largest(self, memory_bytes: int) -> int:
        """Return the largest batch size that fits with all that the allocator reserves by default; 0 if none does."""
        budget = memory_bytes - sum(overhead.most for overhead in self.outside)
        if self.set_up.most_bytes > budget:
            return 0
        curve = self.step.curve  # a lower bound of what is reserved
        high = curve.largest_within(budget)
        if not high or self._reserved(high) <= budget:
            return high or 0
        low, above = 0, high
        guess = curve.largest_within(budget * curve.peak_bytes(high) // self._reserved(high)) or 0
        while above - low > 1:
            middle = guess if low < guess < above else (low + above) // 2
            guess = 0 if middle == guess else guess
            if self._reserved(middle) <= budget:
                low, guess = middle, middle + 1
            else:
                above = middle
        # As blocks are rounded, a size can fit where the one below it does not.
        while larger := [n for n in (low + 1, low + 2) if n < high and self._reserved(n) <= budget]:
            low = max(larger)
        return low

    def _reserved(self, batch_size: int) -> int:
        return reserved_by_default(self.step.record_at(batch_size), self.set_up)
