"""Rows that do not depend on each other: each runs once, whatever runs out of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batching._loop.auto_batcher import AutoBatcher
from adaptive_batching._probe.does_not_fit import DoesNotFitError


class Device:
    """A device with room for so many padded tokens; what ran on it."""

    def __init__(self, lengths: list[int], room: int) -> None:
        self.lengths, self.room = lengths, room
        self.ran: list[range] = []
        self.failed: list[int] = []
        self.released = 0

    def run(self, max_tokens: int, **settings: Any) -> AutoBatcher:
        rows = AutoBatcher(max_tokens, self.release, **settings)
        assert rows.run(self.lengths, self.forward) == [f"row {row}" for row in range(len(self.lengths))]
        return rows

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
    rows = device.run(capacity, most=most, has_fitted=has_fitted)
    assert [row for part in device.ran for row in part] == list(range(len(lengths)))
    assert all(len(part) * lengths[part[0]] <= max(capacity, lengths[part[0]]) for part in device.ran)
    assert all(len(part) <= (most or 60) for part in device.ran)
    assert rows.limit.num_recoveries == len(device.failed) == device.released


@pytest.mark.parametrize(
    ("lengths", "room", "has_fitted", "failed", "ran"),
    [
        ([100] * 4 + [10] * 40, 400, False, [], [4, 40]),  # shorter rows fill the same room
        ([10] * 32, 80, False, [16], [8] * 4),  # again in two, and the limit is learned
        ([10] * 32, 140, True, [16, 16], [14, 14, 4]),  # again as it was, and then with an eighth less
    ],
)
def test_parts_after_one_that_ran_out_of_memory(
    lengths: list[int], room: int, has_fitted: bool, failed: list[int], ran: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(lengths, room)
    device.run(lengths[0] * (4 if lengths[0] == 100 else 16), has_fitted=has_fitted)
    assert device.failed == failed
    assert [len(part) for part in device.ran] == ran
    if has_fitted:
        assert "out of memory with 16 rows of up to 10 tokens; running them again as they were" in caplog.text
        assert "with at most 140 padded tokens per forward (recovery 2)" in caplog.text


@pytest.mark.parametrize(
    ("recovers", "failed", "message"),
    [
        (True, [4, 2, 1], "out of memory with 1 row of up to 10 tokens, which cannot be split"),
        (False, [4], r"out of memory in a forward or backward of 4 rows .*recover_from_oom=True"),
    ],
)
def test_what_does_not_fit_ends_the_run(recovers: bool, failed: list[int], message: str) -> None:
    device = Device([10] * 4, 9)
    with pytest.raises(DoesNotFitError, match=message):
        device.run(40, recovers=recovers)
    assert device.failed == failed
