"""The size of rows that is fastest, by what steps have taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adaptive_batching._step.forward_cost import RowSize

CAPACITY = 6400


def settled(seconds_of: Callable[[int], float], *, first_takes: float = 1.0) -> tuple[int, list[int]]:
    """The size of a row in the end, and those of all steps, each of which has ``CAPACITY`` tokens."""
    size, sizes = RowSize(), []
    for step in range(12):
        size.begin_step()
        tokens = size.tokens(CAPACITY)
        sizes.append(tokens)
        for _ in range(-(-CAPACITY // tokens)):
            size.observe(tokens, seconds_of(tokens) * (first_takes if step == 0 else 1))
        if step == 6:  # as in a run that is resumed
            state, size = size.state_dict(), RowSize()
            size.load_state_dict(state)
    return sizes[-1], sizes


@pytest.mark.parametrize(
    ("fixed", "slower_from", "expected"),
    [(0.0, None, 800), (1e9, None, 6400), (100.0, None, 6400), (10.0, None, 800), (200.0, 1600, 1600)],
)
def test_rows_grow_while_that_is_faster(fixed: float, slower_from: int | None, expected: int) -> None:
    def seconds(tokens: int) -> float:
        return fixed + tokens * (1.0 if slower_from is None or tokens <= slower_from else 1.5)

    assert settled(seconds)[0] == expected
    assert settled(seconds, first_takes=50)[0] == expected, "what is set up in the first step does not count"


def test_few_steps_try_what_is_not_faster() -> None:
    _, sizes = settled(lambda tokens: float(tokens))
    assert sizes == [800] * 3 + [1600] * 2 + [800] * 7


def test_a_step_of_fewer_tokens_is_one_row() -> None:
    size = RowSize()
    assert size.tokens(800) == 100
    assert size.tokens(60) == 60
