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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KIB, MIB, GIB = 2**10, 2**20, 2**30
Pool = tuple[bool, int]
"""Blocks that can take each other's place: True for small ones, and the stream."""


class AllocatorFullError(RuntimeError):
    """Raised if an allocation does not fit within the limit."""


@dataclass
class Block:
    """A piece of a segment."""

    size: int
    pool: Pool
    address: int
    """As if segments lay one after the other."""

    before: Block | None = None
    after: Block | None = None
    free: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Its place among the free blocks: of two that are as large, the older segment's is taken, or the lower one."""
        return self.size, self.address


class CachingAllocator:
    """Bytes reserved and allocated, with default settings; ``limit`` bounds what is reserved."""

    full: type[Exception] = AllocatorFullError

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = self.retries = 0
        self._free: defaultdict[Pool, list[tuple[int, int]]] = defaultdict(list)
        self._blocks: dict[tuple[int, int], Block] = {}
        self._mapped = 0

    def take(self, num_bytes: int, stream: int = 0) -> Block:
        """Allocate for use on a stream; raise ``full`` if there is no room, even with the cache emptied."""
        size = max(-(-num_bytes // 512), 1) * 512
        small = size <= MIB
        keys = self._free[small, stream]
        at = bisect_left(keys, (size,))
        block = self._blocks.pop(keys.pop(at)) if at < len(keys) else self._new_segment(size, (small, stream))
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

    def copy(self, used: Sequence[Block], limit: float) -> tuple[CachingAllocator, list[Block]]:
        """Return an allocator in the same state with another limit, and its blocks for all those in use."""
        made = type(self)(limit)
        made.reserved, made.allocated, made._mapped = self.reserved, self.allocated, self._mapped
        made.reset_peak()
        blocks = [*used, *self._blocks.values()]
        copies = {id(block): Block(block.size, block.pool, block.address) for block in blocks}
        for block in blocks:
            copy = copies[id(block)]
            copy.before = None if block.before is None else copies[id(block.before)]
            copy.after = None if block.after is None else copies[id(block.after)]
            if block.free:
                made._offer(copy)
        return made, [copies[id(block)] for block in used]

    def _new_segment(self, size: int, pool: Pool) -> Block:
        segment = 2 * MIB if pool[0] else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + segment > self.limit:
            self.retries += 1
            self.empty_cache()
            if self.reserved + segment > self.limit:
                raise self.full(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._mapped += segment
        return Block(segment, pool, self._mapped - segment)

    def _offer(self, block: Block) -> None:
        block.free = True
        self._blocks[block.key] = block
        insort(self._free[block.pool], block.key)

    def _withdraw(self, block: Block) -> None:
        keys = self._free[block.pool]
        keys.pop(bisect_left(keys, block.key))
        del self._blocks[block.key]


class ExpandableAllocator:
    """The same with ``expandable_segments:True``: a segment for each pool of a stream, partly backed by memory.

    A segment grows by pieces of 2 MiB (small) or 20 MiB; under pressure, pieces that are wholly free are unmapped.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = self.retries = 0
        self._piece = {True: 2 * MIB, False: 20 * MIB}
        self._gaps: defaultdict[Pool, list[list[float]]] = defaultdict(lambda: [[0, float("inf")]])
        self._mapped: defaultdict[Pool, set[int]] = defaultdict(set)

    def take(self, num_bytes: int, stream: int = 0) -> Any:
        size = max(-(-num_bytes // 512), 1) * 512
        pool = size <= MIB, stream
        at = self._place(size, pool)
        start = int(self._gaps[pool][at][0])
        if self.reserved + self._missing_bytes(start, size, pool) > self.limit:
            self.retries += 1
            self.empty_cache()
            if self.reserved + self._missing_bytes(start, size, pool) > self.limit:
                raise AllocatorFullError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.reserved += self._missing_bytes(start, size, pool)
        self._mapped[pool].update(self._pieces(start, size, pool))
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        gap = self._gaps[pool][at]
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
            piece = self._piece[pool[0]]
            free = {n for n in self._mapped[pool] if any(a <= n * piece and (n + 1) * piece <= b for a, b in gaps)}
            self._mapped[pool] -= free
            self.reserved -= len(free) * piece

    def copy(self, used: Sequence[Any], limit: float) -> tuple[ExpandableAllocator, list[Any]]:
        made = type(self)(limit)
        made.reserved = made.peak_reserved = self.reserved
        made.allocated = made.peak_allocated = self.allocated
        made._gaps.update({pool: [list(gap) for gap in gaps] for pool, gaps in self._gaps.items()})
        made._mapped.update({pool: set(pieces) for pool, pieces in self._mapped.items()})
        return made, list(used)

    def _place(self, size: int, pool: Pool) -> int:
        """Return the smallest gap that is backed by memory and has room, else the first that has room."""
        ready, first = [], None
        for index, (start, end) in enumerate(self._gaps[pool]):
            if end - start < size:
                continue
            first = index if first is None else first
            if end != float("inf") and not self._missing_bytes(int(start), size, pool):
                ready.append((end - start, index))
        assert first is not None
        return min(ready)[1] if ready else first

    def _pieces(self, start: int, size: int, pool: Pool) -> range:
        piece = self._piece[pool[0]]
        return range(start // piece, -(-(start + size) // piece))

    def _missing_bytes(self, start: int, size: int, pool: Pool) -> int:
        mapped = self._mapped[pool]
        return self._piece[pool[0]] * sum(number not in mapped for number in self._pieces(start, size, pool))
