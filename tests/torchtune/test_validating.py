"""Validation, as it is set up."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.row_size import first_row
from adaptive_batching._torchtune.stock.host import StockRun
from adaptive_batching._torchtune.train import validating
from adaptive_batching._torchtune.train.recipe_work import SplitPolicy, Splitter
from adaptive_batching._torchtune.train.validating import HeldOut, Validation
from tests.support.hosts import host


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_rows_of_a_validation_are_as_long_as_the_first_of_training_on_that_device(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies: list[SplitPolicy] = []

    def splitter(host: Any, split_policy: SplitPolicy) -> Splitter:
        policies.append(split_policy)
        return Splitter(host, split_policy)

    monkeypatch.setattr(validating, "Splitter", splitter)
    monkeypatch.setattr(validating, "unchanged_random_state", contextlib.nullcontext)
    on_device = host(device=torch.device(kind))
    held_out = HeldOut(on_device.loader, on_device.objective, every=1, batch_size=2, longest=1)
    run = StockRun(batch_size=2, accumulation=1, epochs=1, steps_per_epoch=1)
    Validation(on_device, held_out, run, TokenLimit(), None, recovers=True)
    [policy] = policies
    assert policy.row_size.tokens(10**6, 10**6) == first_row(kind)
