"""Rows that do not depend on each other: each runs once, whatever runs out of memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batching._loop.auto_batcher import AutoBatcher
from adaptive_batching._probe.does_not_fit import DoesNotFitError

REMEDY = "shorten them"


class Device:
    """A device with room for so many padded tokens; what ran on it."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.ran: list[range] = []
        self.failed: list[int] = []
        self.rows = AutoBatcher(torch.device("cpu"), remedy=REMEDY)

    def run(self, lengths: list[int]) -> None:
        self.lengths = lengths
        assert self.rows.run(lengths, self.forward) == [f"row {row}" for row in range(len(lengths))]

    def forward(self, part: range) -> list[str]:
        assert len(part) > 0
        tokens = len(part) * self.lengths[part[0]]
        if tokens > self.room:
            self.failed.append(len(part))
            raise torch.OutOfMemoryError(f"CUDA out of memory: {tokens} of {self.room}")
        self.ran.append(part)
        return [f"row {row}" for row in part]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60).map(lambda found: sorted(found, reverse=True)),
    room=st.integers(1, 2000),
)
def test_each_row_runs_once_and_in_order(lengths: list[int], room: int) -> None:
    device = Device(max(room, lengths[0]))
    device.run(lengths)
    assert [row for part in device.ran for row in part] == list(range(len(lengths)))
    assert device.rows.limit.num_recoveries == len(device.failed)


def test_shorter_rows_fill_the_same_room() -> None:
    device = Device(275)
    device.run([100] * 4 + [10] * 40)
    assert device.failed == [44, 22, 11, 5]
    assert [len(part) for part in device.ran] == [2, 2, 25, 15]


def test_a_size_that_has_run_before_runs_again_as_it_was_and_then_with_an_eighth_less(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = Device(160)
    device.run([10] * 16)
    device.room = 140
    device.run([10] * 16)
    assert device.failed == [16, 16]
    assert [len(part) for part in device.ran] == [16, 14, 2]
    assert "out of memory with 16 rows of up to 10 tokens; running them again unchanged" in caplog.text
    assert "with at most 140 padded tokens per forward pass (recovery 2)" in caplog.text


def test_a_row_that_does_not_fit_ends_the_run() -> None:
    device = Device(9)
    with pytest.raises(DoesNotFitError, match=f"out of memory with 1 row of up to 10 tokens.*cannot.*; {REMEDY}"):
        device.run([10] * 4)
    assert device.failed == [4, 2, 1]
