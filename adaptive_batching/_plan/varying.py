"""Memory that an allocator reserves where samples have many lengths, each forward of a step its own shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from typing import Any

from adaptive_batching._trace.allocator import AllocatorFullError, CachingAllocator, ExpandableAllocator
from adaptive_batching._trace.traced_step import BETWEEN, OPTIMIZER, StepRecord, TracedStep, TraceError

Shape = tuple[int, int]
"""Samples of a forward, and the tokens that each is padded to."""


class TracedLengths:
    """A training step traced at two lengths of samples, and what follows for every shape of a forward.

    Sizes of storages are affine in the number of samples at one length, and in the length at one number, since fused
    attention keeps nothing that grows with the square of the length. A loss in chunks rounds the length up: its chunks
    are exact where the traced lengths and that of the shape are multiples of their number, else to a row.
    """

    def __init__(self, at_length: tuple[int, TracedStep], at_another: tuple[int, TracedStep]) -> None:
        self._lengths = (at_length[0], at_another[0])
        self._steps = (at_length[1], at_another[1])
        assert self._lengths[0] != self._lengths[1], self._lengths

    def at(self, shape: Shape) -> StepRecord:
        """Return the record of a step whose forward has ``shape``; TraceError if it does not follow from the two."""
        samples, length = shape
        one, other = (step.at(samples) for step in self._steps)
        if one.kept_bytes:
            raise TraceError("a step keeps tensors of its samples for the next one, whose samples have other lengths")
        if one.events != other.events or one.kinds != other.kinds:
            raise TraceError("the order in which memory is allocated and freed depends on the length of samples")
        start, end = self._lengths
        sizes = [a + (b - a) * (length - start) // (end - start) for a, b in zip(one.sizes, other.sizes, strict=True)]
        for number, (_, scratch) in one.scratch.items():
            sizes[number] = scratch.between(other.scratch[number][1], length - start, end - start).num_bytes
        return replace(one, sizes=[max(size, 0) for size in sizes])


@dataclass(frozen=True)
class Varying:
    """Bytes that are reserved while optimizer steps run as they come."""

    steps: int
    forwards: int
    longest: int
    """Tokens of the longest sample met."""

    by_default: int
    expandable: int
    """With ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``."""

    retries: int | None
    """Times that the cache is emptied within a limit, by default; None without a limit, or if it does not run in it."""

    runs: bool | None
    """True if all steps run within the limit by default; None without one."""


def replay_shapes(traced: TracedLengths, steps: Sequence[Sequence[Shape]], limit: int | None = None) -> Varying:
    """Replay optimizer steps, the shapes of the forwards of each, through models of the caching allocator.

    ``traced`` holds the gradients of earlier forwards; ``limit`` is in bytes. TraceError as from ``traced.at``.
    """
    record = cache(traced.at)

    def run(allocator: Any) -> Any:
        _replay(allocator, record, steps)
        return allocator

    retries = runs = None
    if limit is not None:
        try:
            retries, runs = int(run(CachingAllocator(limit)).retries), True
        except AllocatorFullError:
            runs = False
    shapes = [shape for step in steps for shape in step]
    return Varying(
        len(steps), len(shapes), max(length for _, length in shapes), run(CachingAllocator()).peak_reserved,
        run(ExpandableAllocator()).peak_reserved, retries, runs,
    )  # fmt: skip


def _replay(allocator: Any, record: Callable[[Shape], StepRecord], steps: Sequence[Sequence[Shape]]) -> None:
    first = record(steps[0][0])
    begin, end = _parts(first)
    is_late = [first.made.get(number, -1) >= end for number in range(first.num_resting)]
    for number in range(first.num_resting):
        if first.sizes[number] and not is_late[number]:
            allocator.take(first.sizes[number], first.streams.get(number, 0))
    for index, step in enumerate(steps):
        held: dict[int, Any] = {}
        _run(allocator, first, range(begin), held)  # the gradients that forwards add to
        kept = set(held)
        for part, shape in enumerate(step):
            _run(allocator, record(shape), range(begin, end), held)
            if part + 1 < len(step):  # what the optimizer step frees in the trace, a forward frees on its own
                for storage in [storage for storage in held if storage not in kept]:
                    allocator.give_back(held.pop(storage))
        if index == 0:
            for number in range(first.num_resting):
                if first.sizes[number] and is_late[number]:
                    allocator.take(first.sizes[number], first.streams.get(number, 0))
        last = record(step[-1])
        _run(allocator, last, range(end, len(last.events)), held)
        for block in held.values():
            allocator.give_back(block)


def _run(allocator: Any, record: StepRecord, events: range, held: dict[int, Any]) -> None:
    for event in (record.events[index] for index in events):
        if event >= 0:
            held[event] = allocator.take(record.sizes[event], record.streams.get(event, 0))
        elif ~event in held:
            allocator.give_back(held.pop(~event))


def _parts(record: StepRecord) -> tuple[int, int]:
    """Return the number of events before the forward, and before the optimizer step."""
    marks = list(zip(record.moments, record.marks, strict=True))
    begin = max((mark for _, mark in takewhile(lambda each: each[0] == BETWEEN, marks)), default=0)
    end = next((mark for moment, mark in marks if moment == OPTIMIZER), len(record.events))
    return begin, end
