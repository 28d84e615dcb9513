"""Kernels of a compiled graph, and memory that kernels of CUDA take for the time of a call, as torch's allocator counts
it. Real compiled kernels: tests/torchtune/test_real_steps.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from adaptive_batching._trace.compiled import Schedule
from adaptive_batching._trace.recorder import scratch_of
from adaptive_batching._trace.traced_step import Scratch

MIB = 2**20
H100, A100 = 132 * 2048, 108 * 2048
_aten = torch.ops.aten
SHAPES = ((4, 3), (4, 3), (3, 2))


def scheduled(function: Callable[..., Any], *shapes: Any) -> tuple[list[str], dict[str, set[str]], Schedule]:
    """Operations in the order in which they run, what each is the last to use, and the whole schedule."""
    plan = Schedule(make_fx(function, tracing_mode="fake")(*(torch.ones(shape) for shape in shapes)).graph)
    uses = {node.name: {each.name for each in used} for node, used in plan.last_uses.items()}
    return [node.name for node in plan.order], uses, plan


@pytest.mark.parametrize(
    ("function", "shapes", "order", "last_uses"),
    [
        # Results that share inputs are made together, and free nothing until all are there.
        (lambda a, b, w: ((a * b) @ w, a + b), SHAPES, ["mul", "add", "mm"], {"add": {"a_1", "b_1"}}),
        # What needs a library call in between is another kernel,
        (
            lambda a, b, w: (a * b) @ w + a, ((3, 3),) * 3, ["mul", "mm", "add"],
            {"mul": {"b_1"}, "add": {"a_1", "mm"}},
        ),
        # and so is what runs over another number of elements.
        (lambda a, b, w: ((a * b) @ w, b + 1), ((4, 3), (1, 3), (3, 2)), ["mul", "mm", "add"], {}),
    ],
)  # fmt: skip
def test_kernels_run_in_inductors_order(
    function: Callable[..., Any], shapes: Any, order: list[str], last_uses: dict[str, set[str]]
) -> None:
    found, uses, _ = scheduled(function, *shapes)
    assert found == order and uses.items() >= last_uses.items()


def chain(a: Any, b: Any, w: Any) -> Any:
    """One kernel may write over what only its parts read."""
    first = a * 2
    second = first.sum(1, keepdim=True) * a
    return first @ w, second @ w


@pytest.mark.parametrize(
    ("function", "in_place"),
    [
        pytest.param(lambda a, b, w: ((a * b) @ w, b + 1, (b + 2) @ w), {"mul": "a_1"}, id="nothing else reads it"),
        pytest.param(chain, {"mul_1": "a_1"}, id="only parts of the kernel read it"),
        pytest.param(lambda a, b, w: ((a * 2) @ w, a), {}, id="it is returned"),
        pytest.param(lambda primals, b, w: (primals * 2) @ w, {}, id="it belongs to the caller"),
    ],
)
def test_a_result_takes_the_place_of_an_input_that_nothing_else_needs(
    function: Callable[..., Any], in_place: dict[str, str]
) -> None:
    _, _, plan = scheduled(function, *SHAPES)
    assert {node.name: term.name for node, term in plan.in_place.items()} == in_place


@pytest.mark.parametrize(
    ("kernel", "numbers", "expected"),
    [
        ("sum of rows", (4096, 2048, H100), 64 * MIB),
        ("sum of rows", (2048, 2048, H100), 32 * MIB),
        ("sum of rows", (16384, 2048, H100), 132 * MIB),  # each of the columns has its share of the device's threads
        ("sum of rows", (16384, 2048, A100), 108 * MIB),
        ("sum of rows", (2**20, 2048, H100), 1024 * MIB),  # no thread adds up more than 256 rows
        ("sum of rows", (1000, 2048, H100), 0),  # too few rows to be shared
        ("sum of rows", (4096, 2**20, H100), 0),  # columns enough for all threads
        ("embedding", (3072, 128256, 2048), 0),  # another kernel for few tokens
        ("embedding", (4096, 128256, 2048), 11 * 4096 * 2048 * 4 // 10),  # a tenth more than its parts
    ],
)
def test_a_kernel_takes_what_torchs_allocator_has_counted(kernel: str, numbers: tuple[int, ...], expected: int) -> None:
    assert Scratch(kernel, numbers).num_bytes == expected


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


def test_between_two_batch_sizes_numbers_are_on_a_line_and_bytes_are_not() -> None:
    two, three = Scratch("sum of rows", (4096, 2048, H100)), Scratch("sum of rows", (6144, 2048, H100))
    assert two.between(three, 6, 1).numbers == (16384, 2048, H100)
    assert two.between(three, 6, 1).num_bytes == 132 * MIB
    assert two.in_line == three.in_line == 0
