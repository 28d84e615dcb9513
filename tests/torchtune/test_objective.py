"""An objective of another kind: preferences between two answers, judged against a frozen reference model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torchtune.models.llama2 import llama2

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._report.events import read_events
from adaptive_batching._report.record import Report
from adaptive_batching._torchtune.growing import Increase
from adaptive_batching._torchtune.host import Host, StockRun
from adaptive_batching._torchtune.objective import Batch, Counts, Objective, Sums
from adaptive_batching._torchtune.probing import Circumstances
from adaptive_batching._torchtune.session import Session
from tests.support.hosts import host, loader_of

Sample = dict[str, list[int]]


class Pairs(Objective):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290), its loss a mean over pairs."""

    def __init__(self, reference: nn.Module) -> None:
        self.frozen_models = [reference.requires_grad_(False)]
        self._pairs_of_step = 1

    def tokens(self, sample: Sample) -> Sequence[int]:
        return max(sample.values(), key=len)

    def counts(self, samples: Sequence[Sample]) -> Counts:
        return Counts(len(samples), len(samples))

    def stretch(self, sample: Sample, length: int) -> Sample:
        return {key: (tokens * length)[:length] for key, tokens in sample.items()}

    def collate(self, samples: Sequence[Sample]) -> Batch:
        rows = [torch.tensor(sample[key]) for key in ("chosen", "rejected") for sample in samples]
        return {"tokens": pad_sequence(rows, batch_first=True, padding_value=-1)}  # [2 x pairs, s]

    def begin_step(self, step: int, samples: int) -> None:
        self._pairs_of_step = samples

    def loss(self, model: nn.Module, batch: Batch, weight: float | None) -> tuple[torch.Tensor, Sums]:
        tokens = batch["tokens"]
        mean, chosen = loss_of_pairs(model, self.frozen_models[0], tokens)
        loss = mean * (len(chosen) if weight is None else weight) / self._pairs_of_step
        return loss, Sums(loss.detach(), torch.tensor(tokens.numel()), {"chosen": chosen.detach().sum()})


def loss_of_pairs(model: nn.Module, reference: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss, and by how much the model finds the chosen answers, [pairs], more likely than the reference does."""
    with torch.no_grad():
        before = log_likelihood(reference, tokens)
    chosen, rejected = (log_likelihood(model, tokens) - before).chunk(2)
    return -functional.logsigmoid(0.5 * (chosen - rejected)).mean(), chosen


def log_likelihood(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of each row of ``tokens``, [rows, s], of which -1 is padding."""
    logits = model(tokens=tokens.clamp(min=0))[:, :-1]  # [rows, s - 1, vocabulary]
    targets = tokens[:, 1:]
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (picked * (targets >= 0)).sum(-1)


def a_model() -> nn.Module:
    torch.manual_seed(1)
    return llama2(vocab_size=50, num_layers=2, num_heads=2, num_kv_heads=2, embed_dim=16, max_seq_len=64)


def some_pairs(count: int) -> list[Sample]:
    chance = random.Random(0)
    return [
        {key: [chance.randrange(50) for _ in range(chance.randint(3, 20))] for key in ("chosen", "rejected")}
        for _ in range(count)
    ]


def a_host(batch_size: int) -> Host:
    model = a_model()
    optimizers, loader = [torch.optim.SGD(model.parameters(), lr=0.1)], loader_of(some_pairs(48), batch_size)
    return host(Pairs(a_model()), model=model, optimizers=optimizers, loader=loader, clip_norm=1.0)


def plain_loop(batch_size: int, epochs: int) -> tuple[nn.Module, list[float]]:
    """Train as anyone would in plain torch."""
    host = a_host(batch_size)
    losses = []
    for epoch in range(epochs):
        host.loader.sampler.set_epoch(epoch)
        for window in host.loader:
            tokens = host.objective.collate(window)["tokens"]
            loss, _ = loss_of_pairs(host.model, host.objective.frozen_models[0], tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(host.model.parameters(), 1.0)
            host.optimizers[0].step()
            host.optimizers[0].zero_grad()
            losses.append(float(loss.detach()))
    return host.model, losses


@pytest.mark.parametrize("micro_batch_size", [None, 2, "auto"])
@pytest.mark.parametrize("fails", [False, True], ids=["clean", "out of memory"])
def test_preferences_are_probed_cut_and_recovered_as_a_plain_loop_trains(
    micro_batch_size: Any, fails: bool, tmp_path: Path
) -> None:
    host = a_host(batch_size=2)
    limits = {"memory_limit": "16GiB", "max_batch_size": 8}
    settings = AdaptiveBatchingConfig.from_mapping(
        limits, use_maximum_batch_size=True, micro_batch_size=micro_batch_size
    )
    run = StockRun(batch_size=2, accumulation=2, epochs=2, steps_per_epoch=12)
    circumstances = Circumstances(OmegaConf.create({"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1}}))
    session = Session(host, run, settings, Increase(settings), Report(tmp_path))
    session.settle(circumstances)
    assert session.growth is not None and session.growth.course.controller.maximum == 8, "as many as it may be"
    forwards = 0

    def run_out(*_: Any) -> None:
        nonlocal forwards
        forwards += torch.is_grad_enabled()
        if torch.is_grad_enabled() and fails and forwards in (2, 3):
            raise torch.OutOfMemoryError("out of memory, for the test")

    host.model.register_forward_pre_hook(run_out)
    outlet = mock.Mock(learning_rate=lambda: 0.1)
    session.loop(outlet).run()

    expected, losses = plain_loop(batch_size=16, epochs=2)
    logged = [call.args[0]["loss"] for call in outlet.log_metrics.call_args_list]
    assert logged == pytest.approx(losses, rel=1e-4) and len(losses) == 6
    for name, weights in expected.state_dict().items():
        torch.testing.assert_close(host.model.state_dict()[name], weights, rtol=1e-4, atol=1e-6)
    reference = session.host.objective.frozen_models[0].state_dict()
    assert all(torch.equal(reference[name], weights) for name, weights in a_model().state_dict().items())
    events = read_events(tmp_path / "report.jsonl")
    assert events["probe"][0]["search"] == "predict" and events["probe"][0]["batch_size"] == 8
    assert [event["recoveries"] for event in events["step"]][-1] == (2 if fails else 0)
    assert forwards >= (6 if micro_batch_size == "auto" else 12 if micro_batch_size is None else 48)
