"""Why memory ran out in training, as the warning of a recovery says it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from adaptive_batching import AdaptiveStep, DoesNotFitError
from adaptive_batching._dry_run.device import control
from tests.support.device_steps import in_use

MIB = 2**20


def test_growth_from_step_to_step_is_told_with_the_step_since_which(caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch).flatten(1).sum(1).sum(), len(batch)

    held: list[Any] = []
    model = nn.Linear(1024, 1024, device="cuda")
    step = AdaptiveStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, length=len)
    in_use()
    torch.cuda.empty_cache()
    control.set_memory(torch.cuda.memory_reserved() + 900 * MIB)
    with pytest.raises((DoesNotFitError, torch.OutOfMemoryError)):
        for _ in range(100):
            step([torch.zeros(1024, 1024) for _ in range(8)])
            held.append(torch.empty(24 * MIB, dtype=torch.uint8, device="cuda"))
    assert "more in use than step 3, and each since with more than the one before" in caplog.text
