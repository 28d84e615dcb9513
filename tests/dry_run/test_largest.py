"""The search for the largest batch size that fits."""

from __future__ import annotations

import pytest

from adaptive_batching._dry_run.largest import MOST, largest_that_fits


@pytest.mark.parametrize("truth", [0, 1, 2, 3, 7, 8, 100, 4095, MOST - 1, MOST, 10 * MOST])
def test_it_is_the_largest_size_that_fits_and_has_run_once(truth: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= truth

    found = largest_that_fits(fits)
    assert found == min(truth, MOST) and (found in asked or found == 0)
    assert len(set(asked)) == len(asked) <= 2 * MOST.bit_length() and max(asked) <= MOST
    assert asked[:2] == [1, 2][: len(asked)]


def test_no_size_above_the_bound_is_tried() -> None:
    assert largest_that_fits(lambda size: True, most=48) == 48
    assert largest_that_fits(lambda size: size <= 47, most=48) == 47
