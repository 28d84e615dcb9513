"""Why memory ran out in training, as the warning of a recovery says it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from adaptive_batching import AdaptiveStep, DoesNotFitError
from adaptive_batching._emulated_device import control
from tests.support.device_steps import in_use

MIB = 2**20


def step_on_device() -> AdaptiveStep[torch.Tensor]:
    model = nn.Linear(1024, 1024, device="cuda")

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch).flatten(1).sum(1).sum(), len(batch)

    return AdaptiveStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, length=len)


def train(step: AdaptiveStep[torch.Tensor], steps: int, kept: int) -> None:
    held: list[Any] = []
    for _ in range(steps):
        step([torch.zeros(1024, 1024) for _ in range(8)])
        held.append(torch.empty(kept * MIB, dtype=torch.uint8, device="cuda"))


def test_growth_from_step_to_step_is_told_with_the_step_since_which(caplog: pytest.LogCaptureFixture) -> None:
    step = step_on_device()
    in_use()
    torch.cuda.empty_cache()
    control.set_memory(torch.cuda.memory_reserved() + 900 * MIB)
    with pytest.raises((DoesNotFitError, torch.OutOfMemoryError)):
        train(step, steps=100, kept=24)
    assert "more in use than step 3, and each since with more than the one before" in caplog.text


def test_steps_that_begin_alike_have_no_such_cause(caplog: pytest.LogCaptureFixture) -> None:
    step = step_on_device()
    in_use()
    torch.cuda.empty_cache()
    train(step, steps=6, kept=0)
    control.set_memory(torch.cuda.memory_reserved() + 500 * MIB)  # as if another process had taken the rest
    torch.cuda.empty_cache()
    with pytest.raises(DoesNotFitError, match="has 200000 tokens, and none before had more than 1024"):
        step([torch.zeros(200_000, 1024)])
    assert "more in use than" not in caplog.text
