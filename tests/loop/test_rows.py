"""Rows that do not depend on each other: each runs once, whatever runs out of memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batching._loop.rows import Rows
from adaptive_batching._micro_batches.cut import Capacity
from adaptive_batching._probe.does_not_fit import DoesNotFitError


class Device:
    """A device with room for so many padded tokens; what ran on it."""

    def __init__(self, lengths: list[int], room: int) -> None:
        self.lengths, self.room = lengths, room
        self.ran: list[range] = []
        self.failed: list[int] = []
        self.released = 0

    def forward(self, part: range) -> list[str]:
        assert len(part) > 0
        tokens = len(part) * self.lengths[part[0]]
        if tokens > self.room:
            self.failed.append(len(part))
            raise torch.OutOfMemoryError(f"CUDA out of memory: {tokens} of {self.room}")
        self.ran.append(part)
        return [f"row {row}" for row in part]

    def release(self) -> None:
        self.released += 1


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60).map(lambda found: sorted(found, reverse=True)),
    capacity=st.integers(1, 2000),
    less_room=st.integers(0, 1950),
    most=st.none() | st.integers(1, 20),
    has_fitted=st.booleans(),
)
def test_each_row_runs_once_and_in_order(
    lengths: list[int], capacity: int, less_room: int, most: int | None, has_fitted: bool
) -> None:
    device = Device(lengths, max(2000 - less_room, lengths[0]))
    rows = Rows(Capacity.of_tokens(capacity), device.release, most=most, has_fitted=has_fitted)
    assert rows.run(lengths, device.forward) == [f"row {row}" for row in range(len(lengths))]
    assert [row for part in device.ran for row in part] == list(range(len(lengths)))
    assert all(len(part) * lengths[part[0]] <= max(capacity, lengths[part[0]]) for part in device.ran)
    assert all(len(part) <= (most or 60) for part in device.ran)
    assert rows.num_recoveries == len(device.failed) == device.released


def test_shorter_rows_fill_the_same_room() -> None:
    device = Device([100] * 4 + [10] * 40, 400)
    Rows(Capacity(((100, 4),)), device.release).run(device.lengths, device.forward)
    assert [len(part) for part in device.ran] == [4, 40]


def test_a_part_that_runs_out_of_memory_runs_again_in_two_and_the_limit_is_learned() -> None:
    device = Device([10] * 32, 80)
    rows = Rows(Capacity(((10, 16),)), device.release)
    rows.run(device.lengths, device.forward)
    assert device.failed == [16]
    assert [len(part) for part in device.ran] == [8] * 4


def test_what_has_fitted_before_runs_again_as_it_was_and_then_with_an_eighth_less(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = Device([10] * 32, 140)
    Rows(Capacity(((10, 16),)), device.release, has_fitted=True).run(device.lengths, device.forward)
    assert device.failed == [16, 16]
    assert [len(part) for part in device.ran] == [14, 14, 4]
    assert "out of memory with 16 rows of up to 10 tokens; running them again as they were" in caplog.text
    assert "with at most 140 padded tokens in a forward (recovery number 2)" in caplog.text


def test_a_row_that_does_not_fit_ends_the_run() -> None:
    device = Device([10] * 4, 9)
    with pytest.raises(DoesNotFitError, match="out of memory with 1 row of up to 10 tokens, which cannot be cut"):
        Rows(Capacity(((10, 4),)), device.release).run(device.lengths, device.forward)
    assert device.failed == [4, 2, 1]


def test_without_recovery_the_first_failure_ends_the_run() -> None:
    device = Device([10] * 4, 20)
    with pytest.raises(DoesNotFitError, match=r"out of memory with 4 rows .*recover_from_oom=True"):
        Rows(Capacity(((10, 4),)), device.release, recovers=False).run(device.lengths, device.forward)


def test_other_errors_are_raised_as_they_are() -> None:
    def forward(part: range) -> list[int]:
        raise ZeroDivisionError(part)

    with pytest.raises(ZeroDivisionError):
        Rows(Capacity(((1, 4),)), lambda: None).run([1] * 4, forward)
