"""Which operations run as one kernel, and what takes whose place; real kernels: tests/torchtune/test_on_paper.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
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


SHAPES = ((4, 3), (4, 3), (3, 2))


def test_results_that_share_inputs_are_made_together_and_free_nothing_until_all_are_there() -> None:
    order, plan = scheduled(lambda a, b, w: ((a * b) @ w, a + b), *SHAPES)
    assert order == ["mul", "add", "mm"]
    assert names(plan.last_uses, "add") == {"a_1", "b_1"}


def test_what_needs_a_library_call_in_between_is_another_kernel() -> None:
    order, plan = scheduled(lambda a, b, w: (a * b) @ w + a, (3, 3), (3, 3), (3, 3))
    assert order == ["mul", "mm", "add"]
    assert names(plan.last_uses, "mul") == {"b_1"}
    assert names(plan.last_uses, "add") == {"a_1", "mm"}


def test_what_runs_over_another_number_of_elements_is_another_kernel() -> None:
    order, _ = scheduled(lambda a, b, w: ((a * b) @ w, b + 1), (4, 3), (1, 3), (3, 2))
    assert order == ["mul", "mm", "add"]


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
    _, plan = scheduled(function, *SHAPES)
    assert {node.name: term.name for node, term in plan.in_place.items()} == in_place
