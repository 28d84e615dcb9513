"""What a device has been asked for, and what it holds, at the end of each step of a run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torchtune.training.metric_logging import DiskLogger

from adaptive_batching._dry_run.device import control


@dataclass(frozen=True)
class StepEnd:
    """A moment at which the metrics of a step are logged."""

    asked: control.Counters
    allocated_bytes: int
    reserved_bytes: int


def in_use() -> int:
    """Return the bytes that are allocated once garbage is collected, workspaces of cuBLAS aside."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def level(ends: Sequence[StepEnd]) -> tuple[int, int]:
    """Return the bytes by which what is allocated and reserved has grown at the most, from the tenth step on."""
    allocated = {end.allocated_bytes for end in ends[9:]}
    return max(allocated) - min(allocated), ends[-1].reserved_bytes - ends[9].reserved_bytes


def assert_asks_no_more(ours: Sequence[StepEnd], stocks: Sequence[StepEnd]) -> None:
    """Compare what the steps of two runs asked of the device, the first ones aside, which make what later ones keep."""
    asked, by_stock = (ends[-1].asked - ends[7].asked for ends in (ours, stocks))
    assert asked.products == by_stock.products
    assert asked.collectives == by_stock.collectives
    # a fill is a kernel
    assert asked.kernels + asked.copies_to_device <= by_stock.kernels + by_stock.copies_to_device
    assert asked.synchronizations <= by_stock.synchronizations
    assert asked.copies_to_device <= by_stock.copies_to_device
    assert asked.copies_within <= by_stock.copies_within
    assert asked.device_allocations == asked.device_frees == 0


@contextlib.contextmanager
def noted_steps() -> Iterator[list[StepEnd]]:
    """Note the end of every step that a recipe logs, stock's or ours; what is logged of a validation is no step."""
    ends: list[StepEnd] = []
    log_dict = DiskLogger.log_dict

    def noted(self: DiskLogger, payload: Any, step: int) -> None:
        if "val_loss" not in payload:
            ends.append(StepEnd(control.counters(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        log_dict(self, payload, step)

    with mock.patch.object(DiskLogger, "log_dict", noted):
        yield ends
