"""Trainer and plain loops on a GPU: what runs out of memory there, and samples end to end, against Trainer's own steps.

``make test-cuda`` runs these. Each stands alone, so that what has run when time is up counts.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra transformers)")

from adaptive_batching.transformers import AdaptiveArguments  # noqa: E402
from tests.conftest import without_pages  # noqa: E402
from tests.transformers.trainers import logged, make_data, make_llama, make_trainer  # noqa: E402

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES: dict[str, Any] = dict(
    vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
    initializer_range=0.05,
)  # fmt: skip
LONGEST = 512
BATCH = 32
ON_DEVICE: dict[str, Any] = dict(
    use_cpu=False, per_device_train_batch_size=BATCH, num_train_epochs=1, optim="sgd", learning_rate=0.03,
    warmup_steps=0, dataloader_pin_memory=False,
)  # fmt: skip
SURVIVES = AdaptiveArguments(micro_batch_size=BATCH)
"""The batch as it is, unless memory runs out"""


@pytest.fixture(autouse=True)
def alone_on_one_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trainer would spread a model over all devices; what an earlier test leaves in the cache is given back."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    tidy()
    with without_pages():
        yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def tidy() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def num_failures() -> int:
    """Return how often the device has been out of memory since the process started."""
    return int(torch.cuda.memory_stats().get("num_ooms", 0))


@contextlib.contextmanager
def at_most(more_bytes: float) -> Iterator[None]:
    """Have the process run out of memory beyond ``more_bytes`` on top of what it holds now."""
    tidy()
    allowed = torch.cuda.memory_allocated() + more_bytes
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@dataclass
class Trained:
    """What a run has logged for each step, where its weights began and ended, on the host, and what it took."""

    steps: list[dict[str, Any]]
    began: dict[str, torch.Tensor]
    ended: dict[str, torch.Tensor]
    peak_bytes: int  # in use, on top of what was there before
    reserved_bytes: int
    num_failures: int  # of allocations


def on_host(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", torch.float64, copy=True) for name, value in values.items()}


def watched(model: torch.nn.Module, run: Callable[[], list[dict[str, Any]]]) -> Trained:
    """Note what comes of a ``run`` that trains ``model``, on the device already, and returns what it has logged."""
    began = on_host(model.state_dict())
    tidy()
    before, reserved, failures = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), num_failures()
    steps = run()
    peaks = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved() - reserved
    return Trained(steps, began, on_host(model.state_dict()), *peaks, num_failures() - failures)


def train(trainer: Any) -> Trained:
    def run() -> list[dict[str, Any]]:
        trainer.train()
        return [each for each in logged(trainer) if "loss" in each]

    return watched(trainer.model, run)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor] | None = None) -> float:
    squares = [(value if other is None else value - other[name]).square().sum() for name, value in one.items()]
    return float(torch.stack(squares).sum().sqrt())


@dataclass(frozen=True)
class Tolerance:
    """How far two runs may be apart, relative to the second."""

    loss: float = 1e-5
    gradient: float = 1e-4  # its norm
    weights: float = 1e-5
    moved: float = 1e-3  # weights, relative to all that they have moved


HALF = Tolerance(loss=2e-3, gradient=2e-2, weights=1e-3, moved=5e-2)


def assert_alike(ours: Trained, theirs: Trained, tolerance: Tolerance) -> None:
    assert len(ours.steps) == len(theirs.steps) > 2
    for one, other in zip(ours.steps, theirs.steps, strict=True):
        for key, relative in (("loss", tolerance.loss), ("grad_norm", tolerance.gradient)):
            assert one[key] == pytest.approx(other[key], rel=relative), (key, one, other)
    off, moved = distance(ours.ended, theirs.ended), distance(theirs.ended, theirs.began)
    assert off <= tolerance.weights * distance(theirs.ended), (off, moved)
    assert 0 < off + moved and off <= tolerance.moved * moved, (off, moved)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({}, Tolerance()),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}, Tolerance()),
        ({"bf16": True}, HALF),
    ],
    ids=["float32", "checkpointed", "bfloat16"],
)
def test_a_trainer_that_runs_out_of_memory_takes_the_steps_of_one_that_does_not(
    settings: dict[str, Any], tolerance: Tolerance, tmp_path: Path
) -> None:
    settings = {**ON_DEVICE, **settings, "data": make_data(5 * BATCH, LONGEST)}
    free = train(make_trainer(tmp_path / "free", model=make_llama(**SIZES), **settings))
    assert free.num_failures == 0
    trainer = make_trainer(tmp_path / "limited", SURVIVES, model=make_llama(**SIZES), **settings)
    with at_most(0.6 * free.peak_bytes):
        limited = train(trainer)
    assert trainer.adaptive.num_recoveries >= 1 and limited.num_failures >= 1
    assert_alike(limited, free, tolerance)
