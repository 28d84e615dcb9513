"""Memory that kernels of CUDA take for the time of a call. The figures are those that torch's allocator counts."""

from __future__ import annotations

import pytest
import torch

from adaptive_batching._trace.recorder import scratch_of
from adaptive_batching._trace.traced_step import Scratch, _of_sum_of_rows

MIB = 2**20
H100, A100 = 132 * 2048, 108 * 2048
_aten = torch.ops.aten


@pytest.mark.parametrize(
    ("rows", "columns", "threads", "expected"),
    [
        (4096, 2048, H100, 64 * MIB),
        (2048, 2048, H100, 32 * MIB),
        (16384, 2048, H100, 132 * MIB),  # each of the columns has its share of the device's threads
        (16384, 2048, A100, 108 * MIB),
        (2**20, 2048, H100, 1024 * MIB),  # no thread adds up more than 256 rows
        (1000, 2048, H100, 0),  # too few rows to be shared
        (4096, 2**20, H100, 0),  # columns enough for all threads
    ],
)
def test_a_sum_of_rows_is_shared_by_as_many_blocks_as_run_at_once(
    rows: int, columns: int, threads: int, expected: int
) -> None:
    assert _of_sum_of_rows(rows, columns, threads) == expected


def test_the_gradient_of_a_norm_s_scale_is_a_sum_of_rows_and_a_mean_over_columns_is_none() -> None:
    gradient = torch.empty(2, 2048, 64, device="meta")
    found = scratch_of(_aten.sum.dim_IntList, (gradient, [0, 1], True))
    assert found is not None and found.numbers[:2] == (4096, 64)
    assert scratch_of(_aten.sum.dim_IntList, (gradient, [-1], True)) is None
    assert scratch_of(_aten.sum.dim_IntList, (gradient.transpose(0, 2), [0, 1], True)) is None


def test_the_backward_pass_of_attention_adds_up_the_gradient_of_queries_in_float32() -> None:
    query = torch.empty(2, 32, 1000, 72, device="meta")
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    found = scratch_of(backward, (query, query, query, query))
    assert found is not None and found.num_bytes == 2 * 32 * 1024 * 96 * 4


def test_the_gradient_of_an_embedding_takes_nothing_for_few_tokens_and_else_a_tenth_more_than_its_parts() -> None:
    assert Scratch("embedding", (3072, 128256, 2048)).num_bytes == 0
    assert Scratch("embedding", (4096, 128256, 2048)).num_bytes == 11 * 4096 * 2048 * 4 // 10


def test_between_two_batch_sizes_numbers_are_on_a_line_and_bytes_are_not() -> None:
    two, three = Scratch("sum of rows", (4096, 2048, H100)), Scratch("sum of rows", (6144, 2048, H100))
    assert two.between(three, 6, 1).numbers == (16384, 2048, H100)
    assert two.between(three, 6, 1).num_bytes == 132 * MIB
    assert two.in_line == three.in_line == 0
