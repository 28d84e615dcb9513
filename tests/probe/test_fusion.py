"""Which operations run as one kernel, and what takes whose place; real kernels: tests/torchtune/test_real_steps.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from adaptive_batching._trace.fusion import Schedule


def scheduled(function: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[list[str], Schedule]:
    """Names of operations in the order in which they run, and the whole schedule."""
    graph = make_fx(function, tracing_mode="fake")(*(torch.ones(shape) for shape in shapes)).graph
    plan = Schedule(graph)
    return [node.name for node in plan.order], plan


def names(uses: dict[Node, Any], node: str) -> set[str]:
    [found] = [each for each in uses if each.name == node]
    return {each.name for each in uses[found]}


def test_results_that_share_inputs_are_made_together_and_free_nothing_until_all_are_there() -> None:
    def function(a: Any, b: Any, w: Any) -> Any:
        product = (a * b) @ w
        return product, a + b

    order, plan = scheduled(function, (4, 3), (4, 3), (3, 2))
    assert order == ["mul", "add", "mm"]
    assert names(plan.last_uses, "add") == {"a_1", "b_1"}


def test_what_needs_a_library_call_in_between_is_another_kernel() -> None:
    def function(a: Any, b: Any, w: Any) -> Any:
        product = (a * b) @ w
        return product + a

    order, plan = scheduled(function, (3, 3), (3, 3), (3, 3))
    assert order == ["mul", "mm", "add"]
    assert names(plan.last_uses, "mul") == {"b_1"}
    assert names(plan.last_uses, "add") == {"a_1", "mm"}


def test_what_runs_over_another_number_of_elements_is_another_kernel() -> None:
    def function(a: Any, b: Any, w: Any) -> Any:
        product = (a * b) @ w
        return product, b + 1

    order, _ = scheduled(function, (4, 3), (1, 3), (3, 2))
    assert order == ["mul", "mm", "add"]


def test_a_result_takes_the_place_of_an_input_that_nothing_else_reads() -> None:
    def function(a: Any, b: Any, w: Any) -> Any:
        first = a * b
        return first @ w, b + 1, (b + 2) @ w

    _, plan = scheduled(function, (4, 3), (4, 3), (3, 2))
    assert {node.name: term.name for node, term in plan.in_place.items()} == {"mul": "a_1"}


def test_a_chain_in_one_kernel_may_be_written_over_what_only_its_parts_read() -> None:
    def function(a: Any, w: Any) -> Any:
        first = a * 2
        second = first.sum(1, keepdim=True) * a
        return first @ w, second @ w

    _, plan = scheduled(function, (4, 3), (3, 2))
    assert {node.name: term.name for node, term in plan.in_place.items()} == {"mul_1": "a_1"}


def test_what_is_returned_or_belongs_to_the_caller_is_not_written_over() -> None:
    def returned(a: Any, w: Any) -> Any:
        return (a * 2) @ w, a

    def of_the_caller(primals: Any, w: Any) -> Any:
        return (primals * 2) @ w

    for function in (returned, of_the_caller):
        assert not scheduled(function, (4, 3), (3, 2))[1].in_place
