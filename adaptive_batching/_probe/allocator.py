"""A model of PyTorch's caching allocator on CUDA, one stream: how much it reserves for what is allocated.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``. Sizes are rounded up to 512 bytes. Up to 1 MiB is small,
and comes from segments of 2 MiB; below 10 MiB comes from segments of 20 MiB, and more from a segment of its own in
steps of 2 MiB. The smallest free block that is large enough is taken, and split where enough would be left over; free
neighbours merge. Where the limit is reached, segments that are wholly free are given back, and the allocation is tried
once more, which is a retry. What counts against a limit is what is reserved.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

KIB, MIB, GIB = 2**10, 2**20, 2**30


class AllocatorFullError(RuntimeError):
    """Raised if an allocation does not fit within the limit."""


@dataclass
class Block:
    """A piece of a segment."""

    size: int
    small: bool
    before: Block | None = None
    after: Block | None = None
    key: tuple[int, int] = (0, 0)
    """Its place among the free blocks."""
    free: bool = False


class CachingAllocator:
    """Bytes reserved and allocated, with default settings.

    Args:
        limit: Bound of what is reserved.
    """

    full: type[Exception] = AllocatorFullError

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = self.retries = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[tuple[int, int], Block] = {}
        self._count = 0

    def take(self, num_bytes: int) -> Block:
        """Allocate.

        Raises:
            AllocatorFullError: If there is no room, even with the cache emptied; or what ``full`` names.
        """
        size = max(-(-num_bytes // 512), 1) * 512
        small = size <= MIB
        keys = self._free[small]
        at = bisect_left(keys, (size, 0))
        block = self._blocks.pop(keys.pop(at)) if at < len(keys) else self._new_segment(size, small)
        left = block.size - size
        if left >= 512 if small else left > MIB:
            rest = Block(left, small, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._offer(rest)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give_back(self, block: Block) -> None:
        """Free a block into the cache."""
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
        """Count peaks from here."""
        self.peak_reserved, self.peak_allocated = self.reserved, self.allocated

    def _new_segment(self, size: int, small: bool) -> Block:
        segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + segment > self.limit:
            self.retries += 1
            self.empty_cache()
            if self.reserved + segment > self.limit:
                raise self.full(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return Block(segment, small)

    def _offer(self, block: Block) -> None:
        self._count += 1
        block.free, block.key = True, (block.size, self._count)
        self._blocks[block.key] = block
        insort(self._free[block.small], block.key)

    def _withdraw(self, block: Block) -> None:
        keys = self._free[block.small]
        keys.pop(bisect_left(keys, block.key))
        del self._blocks[block.key]


class ExpandableAllocator:
    """The same with ``expandable_segments:True``: one segment for each pool, of which pieces are backed by memory.

    A segment grows by pieces of 2 MiB (small) or 20 MiB; under pressure, pieces that are wholly free are unmapped.

    Args:
        limit: Bound of what is reserved.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = self.retries = 0
        self._piece = {True: 2 * MIB, False: 20 * MIB}
        self._gaps: dict[bool, list[list[float]]] = {True: [[0, float("inf")]], False: [[0, float("inf")]]}
        self._mapped: dict[bool, set[int]] = {True: set(), False: set()}

    def take(self, num_bytes: int) -> Any:
        """Allocate, and return a handle.

        Raises:
            AllocatorFullError: If there is no room, even with free pieces unmapped.
        """
        size = max(-(-num_bytes // 512), 1) * 512
        small = size <= MIB
        at = self._place(size, small)
        start = int(self._gaps[small][at][0])
        if self.reserved + self._missing(start, size, small) * self._piece[small] > self.limit:
            self.retries += 1
            self._unmap_free_pieces()
            if self.reserved + self._missing(start, size, small) * self._piece[small] > self.limit:
                raise AllocatorFullError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.reserved += self._missing(start, size, small) * self._piece[small]
        self._mapped[small].update(self._pieces(start, size, small))
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        gap = self._gaps[small][at]
        gap[0] += size
        if gap[0] == gap[1]:
            self._gaps[small].pop(at)
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return small, start, size

    def give_back(self, handle: Any) -> None:
        """Free what :meth:`take` gave."""
        small, start, size = handle
        self.allocated -= size
        gaps = self._gaps[small]
        at = bisect_left(gaps, [start, start + size])
        gaps.insert(at, [start, start + size])
        if at + 1 < len(gaps) and gaps[at][1] == gaps[at + 1][0]:
            gaps[at][1] = gaps.pop(at + 1)[1]
        if at and gaps[at - 1][1] == gaps[at][0]:
            gaps[at - 1][1] = gaps.pop(at)[1]

    def _place(self, size: int, small: bool) -> int:
        """Return the smallest gap that is backed by memory and has room, else the first that has room."""
        ready, first = [], None
        for index, (start, end) in enumerate(self._gaps[small]):
            if end - start < size:
                continue
            first = index if first is None else first
            if end != float("inf") and not self._missing(int(start), size, small):
                ready.append((end - start, index))
        assert first is not None
        return min(ready)[1] if ready else first

    def _pieces(self, start: int, size: int, small: bool) -> range:
        piece = self._piece[small]
        return range(start // piece, -(-(start + size) // piece))

    def _missing(self, start: int, size: int, small: bool) -> int:
        return sum(number not in self._mapped[small] for number in self._pieces(start, size, small))

    def _unmap_free_pieces(self) -> None:
        for small, gaps in self._gaps.items():
            piece = self._piece[small]
            free = {n for n in self._mapped[small] if any(a <= n * piece and (n + 1) * piece <= b for a, b in gaps)}
            self._mapped[small] -= free
            self.reserved -= len(free) * piece
