"""Evaluation on a device: the largest batch by the real allocator, and parts where a neighbour takes the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaptive_batching._dry_run.device import control
from tests.integration.test_evaluation import Evaluation, evaluation, folder

__all__ = ["evaluation", "folder"]
MIB = 2**20
pytestmark = pytest.mark.xdist_group("harness")
ON_DEVICE: dict[str, Any] = {"device": "cuda", "dtype": "bf16", "tasks": ["small_choices", "small_texts"]}


def test_the_largest_batch_is_found_and_nothing_runs_out(evaluation: Callable[..., Evaluation]) -> None:
    settings = {"memory_limit": "600MiB", "max_batch_size": 16}
    errors = torch.cuda.memory_stats().get("num_ooms", 0)
    largest = evaluation(**ON_DEVICE, use_maximum_batch_size=True, adaptive_batching=settings)
    answers = largest.responses()
    assert all(len(answers[task]) == 9 for task in ON_DEVICE["tasks"])
    assert max(largest.rows) == 16
    assert torch.cuda.memory_stats()["num_ooms"] == errors


def test_a_batch_that_does_not_fit_runs_in_parts(evaluation: Callable[..., Evaluation]) -> None:
    run = evaluation(**ON_DEVICE, batch_size=64)
    free, _ = torch.cuda.mem_get_info()
    control.set_neighbour(free - 24 * MIB)
    errors = torch.cuda.memory_stats()["num_ooms"]
    answers = run.responses()
    assert all(len(answers[task]) == 9 for task in ON_DEVICE["tasks"])
    assert torch.cuda.memory_stats()["num_ooms"] > errors and min(run.rows) < max(run.rows)
