"""Loops of other libraries train as a plain one: those that the page shows, in two processes, and others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from adaptive_batching import AdaptiveStep
from tests.loop import other_loops
from tests.loop.other_loops import ENVIRONMENTS, NUM_SAMPLES, plain_loop, run_loops, samples_of_loop
from tests.support.ranks import run_ranks
from tests.support.small_model import make_model

pytestmark = pytest.mark.xdist_group("other_loops")


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_loops, folder=tmp_path_factory.mktemp("loops"))


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_loops_of_other_libraries_train_as_a_plain_one(name: str, launched: list[dict[str, Any]]) -> None:
    pytest.importorskip(name.split()[0], reason=f"{name.split()[0]} is not installed")
    ranks = [rank[name] for rank in launched]
    plain, data = plain_loop(1.0), samples_of_loop()
    seen: set[int] = set()
    for steps in zip(*[steps for steps, _ in ranks], strict=True):
        numbers = [number for of_rank, _ in steps for number in of_rank]
        loss = plain.step([data[number] for number in numbers]).item()
        assert [found for _, found in steps] == pytest.approx([loss] * 2, rel=1e-5)
        seen.update(numbers)
    assert seen == set(range(NUM_SAMPLES))
    for _, weights in ranks:
        torch.testing.assert_close(weights, plain.weights(), rtol=1e-3, atol=1e-5)


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> AdaptiveStep[Any]:
    """Return a step that runs in parts."""
    step = AdaptiveStep[Any](
        model, optimizer, other_loops.loss, other_loops.collate, length=lambda sample: len(sample["tokens"])
    )
    step.max_tokens = 60
    return step


def assert_trained_as_a_plain_loop(model: torch.nn.Module, batch_size: int, clip_norm: float = torch.inf) -> None:
    plain = plain_loop(clip_norm)
    for start in range(0, NUM_SAMPLES, batch_size):
        plain.step(samples_of_loop()[start : start + batch_size])
    torch.testing.assert_close([*model.parameters()], [*plain.model.parameters()], rtol=1e-3, atol=1e-5)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from samples_of_loop()


def test_a_stream_of_samples_trains_as_a_plain_loop() -> None:
    model = make_model()
    step = step_of(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for samples in DataLoader(Stream(), 8, collate_fn=list):
        step(samples)
    assert_trained_as_a_plain_loop(model, 8)


def test_manual_optimization_in_lightnings_trainer_trains_as_a_plain_loop() -> None:
    pytorch = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Module(pytorch.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model = make_model()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            self.step = step_of(self.model, optimizer)
            return optimizer

        def training_step(self, samples: Any) -> None:
            optimizer = self.optimizers()
            self.step.gradients(samples, self.manual_backward)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    module = Module()
    shows = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pytorch.Trainer(max_epochs=1, accelerator="cpu", devices=1, **shows)
    trainer.fit(module, DataLoader(samples_of_loop(), 8, collate_fn=list))
    assert trainer.global_step == -(-NUM_SAMPLES // 8)
    assert_trained_as_a_plain_loop(module.model, 8, clip_norm=1.0)
