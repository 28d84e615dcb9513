"""The size of rows that is worth it, by what steps have taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adaptive_batching._step.row_size import RowSize, first_row

CAPACITY = 16_384


def sizes_of(
    seconds_of: Callable[[int], float],
    *,
    first_takes: float = 1.0,
    tokens: Callable[[int], int] = lambda step: CAPACITY,
) -> list[int]:
    """The size of a row in all steps, each of which has ``tokens``."""
    size, sizes = RowSize(), []
    for step in range(18):
        size.begin_step()
        row = size.tokens(tokens(step), tokens(step))
        sizes.append(row)
        for _ in range(-(-tokens(step) // row)):
            size.observe(row, seconds_of(row) * (first_takes if step == 0 else 1))
        if step == 11:  # as in a run that is resumed
            state, size = size.state_dict(), RowSize()
            size.load_state_dict(state)
    return sizes


@pytest.mark.parametrize(
    ("fixed", "slower_from", "expected"),
    [
        (0.0, None, [2048] * 4 + [4096] * 3 + [2048] * 11),  # nothing is gained
        (160.0, None, [2048] * 4 + [4096] * 14),  # 3.6 %, and the next would gain half of it
        (1e9, None, [2048] * 4 + [4096] * 3 + [8192] * 3 + [16_384] * 8),
        (500.0, 4096, [2048] * 4 + [4096] * 3 + [8192] * 3 + [4096] * 8),
    ],
)
def test_rows_grow_while_that_is_faster(fixed: float, slower_from: int | None, expected: list[int]) -> None:
    def seconds(tokens: int) -> float:
        return fixed + tokens * (1.0 if slower_from is None or tokens <= slower_from else 1.5)

    assert sizes_of(seconds) == expected
    assert sizes_of(seconds, first_takes=50) == expected, "what is set up in the first step does not count"


def test_a_step_of_few_tokens_is_one_row_and_rows_grow_with_the_batch() -> None:
    sizes = sizes_of(lambda tokens: 1e6, tokens=lambda step: 60 if step < 5 else 3000)
    assert sizes == [60] * 5 + [1024] * 2 + [2048] * 3 + [3000] * 8


def test_a_gpu_begins_with_longer_rows() -> None:
    assert first_row("cuda") > first_row("cpu")


def test_ranks_go_up_together_by_the_slowest() -> None:
    def gather(value: tuple[float, bool]) -> list[tuple[float, bool]]:  # of two, of which this is the fast one
        return [value, (slow.pop(0), True)]

    slow, size, sizes = [1.0, 0.5, 0.5], RowSize(), []
    for _ in range(11):
        size.begin_step(gather)
        sizes.append(size.tokens(100, CAPACITY))
        size.observe(100, 1e-3)
    assert not slow
    assert size.state_dict() == {"size": 2048, "rate": 0.5, "is_settled": True}
