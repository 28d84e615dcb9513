"""A model of PyTorch's caching allocator on CUDA: how much it reserves for what is allocated.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``. Sizes are rounded up to 512 bytes. Up to 1 MiB is small,
and comes from segments of 2 MiB; below 10 MiB comes from segments of 20 MiB, and more from a segment of its own in
steps of 2 MiB. The smallest free block that is large enough is taken, of several the one in the oldest segment, there
at the lowest address, and split where enough would be left over; free neighbours merge. Each stream has segments of its
own: what one frees, another does not get. Where the limit is reached, segments that are wholly free are given back, and
the allocation is tried once more, which is a retry. What counts against a limit is what is reserved.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

KIB, MIB, GIB = 2**10, 2**20, 2**30
_PIECE = {True: 2 * MIB, False: 20 * MIB}  # of an expandable segment, small or not
Pool = tuple[bool, int]
"""Blocks that can take each other's place: True for small ones, and the stream."""


class AllocatorFullError(RuntimeError):
    """Raised if an allocation does not fit within the limit."""


@dataclass
class Block:
    """A piece of a segment."""

    size: int
    pool: Pool
    address: int  # as if segments lay one after the other
    before: Block | None = None
    after: Block | None = None
    free: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """By which free blocks are sorted: of two that are as large, the older segment's or the lower one is taken."""
        return self.size, self.address


class _Allocator:
    """Bytes reserved and allocated; ``limit`` bounds what is reserved."""

    full: type[Exception] = AllocatorFullError

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = self.retries = 0

    def reset_peak(self) -> None:
        self.peak_reserved, self.peak_allocated = self.reserved, self.allocated

    def empty_cache(self) -> None:
        """Give back memory that no block is in."""

    def _reserve(self, size: int, missing_bytes: Callable[[], int]) -> None:
        """Reserve what is missing for ``size`` bytes, if need be with the cache emptied, after which more can be."""
        if self.reserved + missing_bytes() > self.limit:
            self.retries += 1
            self.empty_cache()
            if self.reserved + missing_bytes() > self.limit:
                raise self.full(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.reserved += missing_bytes()
        self.peak_reserved = max(self.peak_reserved, self.reserved)


class CachingAllocator(_Allocator):
    """With default settings."""

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__(limit)
        self._free: defaultdict[Pool, list[tuple[int, int]]] = defaultdict(list)
        self._blocks: dict[tuple[int, int], Block] = {}
        self._mapped = 0

    def take(self, num_bytes: int, stream: int = 0) -> Block:
        """Allocate for use on a stream; raise ``full`` if there is no room, even with the cache emptied."""
        size = max(-(-num_bytes // 512), 1) * 512
        small = size <= MIB
        keys = self._free[small, stream]
        at = bisect_left(keys, (size,))
        if at < len(keys):
            block = self._blocks.pop(keys.pop(at))
        else:
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self._reserve(size, lambda: segment)
            block = Block(segment, (small, stream), self._mapped)
            self._mapped += segment
        left = block.size - size
        if left >= 512 if small else left > MIB:
            rest = Block(left, block.pool, block.address + size, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._offer(rest)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give_back(self, block: Block) -> None:
        self.allocated -= block.size
        if block.after is not None and block.after.free:
            self._withdraw(block.after)
            _merge(block, block.after)
        if block.before is not None and block.before.free:
            self._withdraw(block.before)
            block = _merge(block.before, block)
        self._offer(block)

    def empty_cache(self) -> None:
        for block in [b for b in self._blocks.values() if b.before is None and b.after is None]:
            self._withdraw(block)
            self.reserved -= block.size

    def copy(self, used: Sequence[Block], limit: float) -> tuple[CachingAllocator, list[Block]]:
        """Return an allocator in the same state with another limit, and its blocks for all those in use."""
        twin = type(self)(limit)
        twin.reserved, twin.allocated, twin._mapped = self.reserved, self.allocated, self._mapped
        twin.reset_peak()
        blocks = [*used, *self._blocks.values()]
        copies = {id(block): Block(block.size, block.pool, block.address) for block in blocks}
        for block in blocks:
            copy = copies[id(block)]
            copy.before = None if block.before is None else copies[id(block.before)]
            copy.after = None if block.after is None else copies[id(block.after)]
            if block.free:
                twin._offer(copy)
        return twin, [copies[id(block)] for block in used]

    def _offer(self, block: Block) -> None:
        block.free = True
        self._blocks[block.key] = block
        insort(self._free[block.pool], block.key)

    def _withdraw(self, block: Block) -> None:
        keys = self._free[block.pool]
        keys.pop(bisect_left(keys, block.key))
        del self._blocks[block.key]


class ExpandableAllocator(_Allocator):
    """With ``expandable_segments:True``: a segment for each pool of a stream, partly backed by memory.

    A segment grows by pieces of 2 MiB (small) or 20 MiB; under pressure, pieces that are wholly free are unmapped.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__(limit)
        self._gaps: defaultdict[Pool, list[list[float]]] = defaultdict(lambda: [[0, float("inf")]])
        self._mapped: defaultdict[Pool, set[int]] = defaultdict(set)

    def take(self, num_bytes: int, stream: int = 0) -> Any:
        size = max(-(-num_bytes // 512), 1) * 512
        pool = size <= MIB, stream
        at = self._place(size, pool)
        gap = self._gaps[pool][at]
        start = int(gap[0])
        self._reserve(size, lambda: self._missing_bytes(start, size, pool))
        self._mapped[pool].update(_pieces(start, size, pool))
        gap[0] += size
        if gap[0] == gap[1]:
            self._gaps[pool].pop(at)
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return pool, start, size

    def give_back(self, handle: Any) -> None:
        pool, start, size = handle
        self.allocated -= size
        gaps = self._gaps[pool]
        at = bisect_left(gaps, [start, start + size])
        gaps.insert(at, [start, start + size])
        if at + 1 < len(gaps) and gaps[at][1] == gaps[at + 1][0]:
            gaps[at][1] = gaps.pop(at + 1)[1]
        if at and gaps[at - 1][1] == gaps[at][0]:
            gaps[at - 1][1] = gaps.pop(at)[1]

    def empty_cache(self) -> None:
        for pool, gaps in self._gaps.items():
            piece = _PIECE[pool[0]]
            free = {n for n in self._mapped[pool] if any(a <= n * piece and (n + 1) * piece <= b for a, b in gaps)}
            self._mapped[pool] -= free
            self.reserved -= len(free) * piece

    def copy(self, used: Sequence[Any], limit: float) -> tuple[ExpandableAllocator, list[Any]]:
        twin = type(self)(limit)
        twin.reserved = twin.peak_reserved = self.reserved
        twin.allocated = twin.peak_allocated = self.allocated
        twin._gaps.update({pool: [list(gap) for gap in gaps] for pool, gaps in self._gaps.items()})
        twin._mapped.update({pool: set(pieces) for pool, pieces in self._mapped.items()})
        return twin, list(used)

    def _place(self, size: int, pool: Pool) -> int:
        """Return the smallest gap that is backed by memory and has room, else the first that has room."""
        fitting = [(end - start, at, start) for at, (start, end) in enumerate(self._gaps[pool]) if end - start >= size]
        finite = (gap for gap in fitting if gap[0] != float("inf"))
        ready = (gap for gap in finite if not self._missing_bytes(int(gap[2]), size, pool))
        return min(ready, default=fitting[0])[1]

    def _missing_bytes(self, start: int, size: int, pool: Pool) -> int:
        mapped = self._mapped[pool]
        return _PIECE[pool[0]] * sum(number not in mapped for number in _pieces(start, size, pool))


def _merge(block: Block, after: Block) -> Block:
    """Return ``block``, with the one after it made part of it."""
    block.size += after.size
    block.after = after.after
    if block.after is not None:
        block.after.before = block
    return block


def _pieces(start: int, size: int, pool: Pool) -> range:
    return range(start // _PIECE[pool[0]], -(-(start + size) // _PIECE[pool[0]]))
