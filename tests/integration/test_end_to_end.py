"""Samples that lie end to end in a row train as each of them by itself does, and nothing of a forward is padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.losses import NextToken
from adaptive_batching._torchtune.stock.objective import Batch, Sums
from adaptive_batching._torchtune.train.recipe_work import run_once, runs_of
from adaptive_batching._torchtune.train.rows import lay_end_to_end
from adaptive_batching._torchtune.train.splitting import MicroBatch, SplitPolicy, Splitter
from adaptive_batching._torchtune.train.training_run import TrainingRun
from adaptive_batching._values import ByLength, Fixed
from adaptive_batching.torchtune import AdaptiveBatching
from tests.conftest import TuneRun, assert_close
from tests.integration.faults import disarm, plan
from tests.support.hosts import loader_of
from tests.support.overrides import SGD, WIDE
from tests.support.records import events

AUTO = ["micro_batch_size=auto", "adaptive_batching.memory_limit=8GiB", "epochs=1"]
CHUNKS = "loss._component_=torchtune.modules.loss.CEWithChunkedOutputLoss"
KINDS: dict[str, tuple[str, list[str]]] = {
    "full": ("full", []),
    "full, logits in chunks, checkpointed": (
        "full", [CHUNKS, "enable_activation_checkpointing=True"]
    ),
    "lora": ("lora", ["model.lora_dropout=0.0"]),
    "lora, checkpointed": ("lora", ["model.lora_dropout=0.0", "enable_activation_checkpointing=True"]),
    "preferences": ("lora_dpo", [*WIDE, "loss.beta=2.0", "model.lora_dropout=0.0"]),
    "distillation": ("kd", ["model.lora_dropout=0.0"]),
}  # fmt: skip


def gradient(host: Host, parts: list[MicroBatch]) -> tuple[torch.Tensor, float]:
    for parameter in host.model.parameters():
        parameter.grad = None
    outcome = run_once(host, runs_of(host, parts))
    assert not outcome.failed
    flat = torch.cat([p.grad.flatten() for p in host.model.parameters() if p.grad is not None]).double()
    return flat, sum(float(sums.loss) for sums in outcome.results)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_gradient_of_one_sample_at_a_time(
    kind: str, tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    class Compared:
        """In place of the training loop."""

        def __init__(self, training: TrainingRun, *arguments: Any, **named: Any) -> None:
            self.host = training.host

        def run(self) -> None:
            host = self.host
            assert host.rows is not None
            batch = host.loader.load(range(12))
            host.objective.begin_step(0, len(batch))
            rows = Splitter(host, SplitPolicy(ByLength(), capacity=160)).split(batch)
            assert 1 < len(rows) < 12
            one_row = Splitter(host, SplitPolicy(ByLength(), capacity=10**6)).split(batch)
            assert [len(part.samples) for part in one_row] == [12]
            expected, loss = gradient(host, Splitter(host, SplitPolicy(Fixed(1))).split(batch))
            for parts in (rows, one_row):
                found, found_loss = gradient(host, parts)
                assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())
                assert found_loss == pytest.approx(loss, rel=1e-6)
            compared.append(len(rows))

    monkeypatch.setattr("adaptive_batching._torchtune.train.session.TrainingLoop", Compared)
    recipe, overrides = KINDS[kind]
    tune_run(recipe, *overrides, *AUTO)
    assert compared


RUNS: dict[str, tuple[str, list[str]]] = {
    "full": ("full", []),
    "optimizers in the backward pass": ("full", ["optimizer_in_bwd=True", "clip_grad_norm=null", "optimizer.lr=1e-4"]),
    "preferences": ("lora_dpo", ["loss.beta=2.0"]),
    "distillation": ("kd", []),
}


@pytest.mark.parametrize("kind", RUNS)
def test_rows_train_as_padded_forwards_do_and_are_never_padded(kind: str, tune_run: TuneRun) -> None:
    recipe, overrides = RUNS[kind]
    common = [*SGD, *overrides, *AUTO, "batch_size=12"]
    rows = tune_run(recipe, *common, name="rows")
    padded = tune_run(recipe, *common, "adaptive_batching.padding=True", name="padded")
    assert_close(rows, padded, epoch=0)
    steps = events(rows, "step")
    assert steps and all(step["padded_tokens"] <= step["tokens"] for step in steps)
    assert any(step["padded_tokens"] > step["tokens"] for step in events(padded, "step"))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_row_that_runs_out_of_memory_runs_again_in_smaller_ones(
    where: str, tune_run: TuneRun, caplog: pytest.LogCaptureFixture
) -> None:
    common = [*SGD, *AUTO, "batch_size=12", "model._component_=tests.integration.faults.full_model"]
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

    class Looks:
        """In place of the training loop."""

        def __init__(self, training: TrainingRun, *arguments: Any, **named: Any) -> None:
            self.host = training.host

        def run(self) -> None:
            data = Drawing([self.host.loader.dataset[index] for index in range(8)])
            weights = [parameter.clone() for parameter in self.host.model.parameters()]
            before = torch.get_rng_state()
            found = lay_end_to_end(replace(self.host, rows=None, loader=loader_of(data)))
            assert torch.equal(torch.get_rng_state(), before)
            assert all(map(torch.equal, self.host.model.parameters(), weights))
            assert all(parameter.grad is None for parameter in self.host.model.parameters())
            looked.append(found.rows is not None)

    monkeypatch.setattr("adaptive_batching._torchtune.train.session.TrainingLoop", Looks)
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
    run = tune_run("full", *SGD, *AUTO, "batch_size=12", "adaptive_batching.audit_every=1000")
    assert "samples of similar length are padded, as they cannot lie end to end: NotOfRows has a loss of" in caplog.text
    assert any(step["padded_tokens"] > step["tokens"] for step in events(run, "step"))
