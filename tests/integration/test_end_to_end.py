"""Samples that lie end to end in a row train as padded ones do, and nothing of a forward is padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._torchtune.stock.losses import NextToken
from adaptive_batching._torchtune.stock.objective import Batch, Sums
from adaptive_batching._torchtune.train.rows import lay_end_to_end
from adaptive_batching._torchtune.train.run import TrainingLoop
from adaptive_batching.torchtune import AdaptiveBatching
from tests.conftest import Run, TuneRun, assert_close
from tests.integration.faults import disarm, plan
from tests.support.hosts import loader_of
from tests.support.overrides import SGD
from tests.support.records import events

AUTO = [*SGD, "micro_batch_size=auto", "adaptive_batching.memory_limit=8GiB", "epochs=1", "batch_size=12"]


def is_padded(run: Run) -> bool:
    return any(step["padded_tokens"] > step["tokens"] for step in events(run, "step"))


def test_rows_train_as_padded_forwards_do_and_are_never_padded(tune_run: TuneRun) -> None:
    rows = tune_run("full", *AUTO, name="rows")
    padded = tune_run("full", *AUTO, "adaptive_batching.padding=True", name="padded")
    assert_close(rows, padded, epoch=0)
    assert is_padded(padded) and not is_padded(rows)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_row_that_runs_out_of_memory_runs_again_in_smaller_ones(
    where: str, tune_run: TuneRun, caplog: pytest.LogCaptureFixture
) -> None:
    common = [*AUTO, "model._component_=tests.integration.faults.full_model"]
    plan.update(where=where, layer=1, call=1, calls=0, times=0)
    undisturbed = tune_run("full", *common, name="undisturbed")
    plan.update(call=plan["calls"] - 2, calls=0, times=2, fits=3)  # in training: a probe has calls of its own
    recovered = tune_run("full", *common, name="recovered")
    disarm()
    assert "running the step's samples again" in caplog.text
    assert_close(recovered, undisturbed, epoch=0)


class Drawing(list[Sample]):
    """Data that draw random numbers, as augmentation does."""

    def __getitem__(self, index: Any) -> Any:
        torch.rand(1)
        return super().__getitem__(index)


def test_finding_out_about_rows_leaves_random_numbers_gradients_and_weights_alone(
    tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bool] = []

    def look_again(loop: TrainingLoop) -> None:
        host = loop._host
        data = Drawing([host.loader.dataset[index] for index in range(8)])
        weights = [parameter.clone() for parameter in host.model.parameters()]
        before = torch.get_rng_state()
        found = lay_end_to_end(replace(host, rows=None, loader=loader_of(data)))
        assert torch.equal(torch.get_rng_state(), before)
        assert all(map(torch.equal, host.model.parameters(), weights))
        assert all(parameter.grad is None for parameter in host.model.parameters())
        looked.append(found.rows is not None)

    monkeypatch.setattr(TrainingLoop, "run", look_again)
    tune_run("full", *AUTO)
    assert looked == [True]


class NotOfRows(NextToken):
    """Takes its labels apart as those of a padded batch."""

    def loss(self, model: nn.Module, batch: Batch, weight: float | None) -> tuple[torch.Tensor, Sums]:
        batch["labels"][:, : batch["labels"].shape[1] // 2] = self._loss.ignore_index
        return super().loss(model, batch, weight)


def test_a_loss_that_is_another_in_a_row_gets_padded_samples(
    tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    make = staticmethod(lambda parts: NotOfRows(parts.collate, parts.loss, parts.activations, parts.num_chunks))
    monkeypatch.setattr(AdaptiveBatching, "make_objective", make)
    run = tune_run("full", *AUTO, "adaptive_batching.audit_every=1000")
    assert (
        "samples of similar length are padded, as they cannot be packed without padding: NotOfRows has a loss of"
        in caplog.text
    )
    assert is_padded(run)
