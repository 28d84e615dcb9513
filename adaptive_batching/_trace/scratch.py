"""Memory that kernels of CUDA take from the allocator for the time of a call, which no tensor shows.

It goes at once, but blocks are found and cut for it: what is reserved can be larger by far more.
"""

from __future__ import annotations

from dataclasses import dataclass

_FEW_INDICES = 3072


@dataclass(frozen=True)
class Scratch:
    """Bytes that a call takes, by what they follow from: numbers that are affine in the batch size."""

    kernel: str
    """A key of :data:`KERNELS`."""

    numbers: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return KERNELS[self.kernel](*self.numbers)

    @property
    def in_line(self) -> int:
        """Bytes as far as they are on a line over the batch size, which a curve of memory is made of."""
        return LINES[self.kernel](*self.numbers)

    def between(self, other: Scratch, share: int, of: int) -> Scratch:
        """Return what the call takes where its numbers are ``share / of`` of the way to those of ``other``."""
        numbers = [a + (b - a) * share // of for a, b in zip(self.numbers, other.numbers, strict=True)]
        return Scratch(self.kernel, tuple(max(number, 0) for number in numbers))


def of_embedding(indices: int, vocabulary: int, width: int) -> int:
    """Return what the gradient of an embedding takes. For few tokens another kernel does without.

    It is summed in float32, by parts of at most ten tokens that are alike (``max_partial_segment`` in
    ``aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu``).
    """
    return 0 if indices <= _FEW_INDICES else _sum_by_parts(indices, vocabulary, width)


def _sum_by_parts(indices: int, vocabulary: int, width: int) -> int:
    return (indices + 10 * min(indices, vocabulary)) * width * 4 // 10


def of_attention(heads: int, length: int, width: int) -> int:
    """Return what the backward pass of flash attention takes to add up the gradient of queries, in float32.

    Lengths are rounded to 128 and widths to 32, or 64 from 128 on (``mha_bwd`` in
    ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``).
    """
    return heads * _up(length, 128) * _up(width, 32 if width <= 128 else 64) * 4


def of_sum_of_rows(inputs: int, outputs: int, threads: int) -> int:
    """Return what a sum over the rows of a matrix takes, such as the gradient of a norm's scale or of a bias.

    Where rows (``inputs``) are many and columns (``outputs``) few, several blocks of threads share a column, and each
    leaves its sums in memory (``setReduceConfig`` and ``global_memory_size`` in
    ``aten/src/ATen/native/cuda/Reduce.cuh``). The device runs ``threads`` at once.
    """
    in_one_load = next(n for n in (4, 2, 1) if outputs % n == 0)
    most = 512 // in_one_load
    columns, rows = min(_power_of_two(outputs // in_one_load), most), min(_power_of_two(inputs), most)
    width = min(columns, 32)
    height = min(rows, most // width)
    width = min(columns, most // height)
    if inputs < min(16 * height, 256):
        return 0
    by_each = -(-inputs // height)
    blocks = -(-(outputs // in_one_load) // width)
    at_once = threads // (width * height)
    if by_each < 256 or blocks > at_once:
        return 0
    shares = max(min(-(-at_once // blocks), -(-by_each // 16)), -(-by_each // 256))
    return 4 * outputs * shares * width * in_one_load if shares > 1 else 0


KERNELS = {"embedding": of_embedding, "attention": of_attention, "sum of rows": of_sum_of_rows}
LINES = {"embedding": _sum_by_parts, "attention": of_attention, "sum of rows": lambda *_: 0}


def _up(number: int, to: int) -> int:
    return -(-number // to) * to


def _power_of_two(number: int) -> int:
    return 1 << (number.bit_length() - 1) if number else 1
