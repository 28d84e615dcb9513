"""Validation as it is set up, and what is shown meanwhile."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.row_size import first_row
from adaptive_batching._torchtune.stock.host import StockRun
from adaptive_batching._torchtune.stock.objective import worst_case_sample
from adaptive_batching._torchtune.train import validating
from adaptive_batching._torchtune.train.recipe_work import SplitPolicy, Splitter
from adaptive_batching._torchtune.train.settings import ValidationSettings
from adaptive_batching._torchtune.train.validating import HeldOut, Validation, hold_out
from tests.support.hosts import ALONE, OTHER_RANK, SAMPLES, host, next_token


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


def test_data_are_read_behind_a_progress_bar_on_the_first_rank_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for ranks, shown in ((ALONE, True), (OTHER_RANK, False)):
        on_rank = host(ranks=ranks)
        hold_out(ValidationSettings({}, every=1), on_rank.loader, on_rank.objective, on_rank.model, ranks)
        limits = dict.fromkeys(("sequence_length", "tokenizer_max", "model_max"))
        worst_case_sample(SAMPLES, next_token(), **limits, ranks=ranks)
        says = capsys.readouterr().err
        assert ("Reading dataset_val" in says, "Looking for the longest" in says) == (shown, shown)
