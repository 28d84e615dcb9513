"""Where autograd adds gradients in place, and where kernels of CUDA take memory: a trace against real steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from adaptive_batching._probe.trace import trace_peak_memory
from adaptive_batching._probe.trial import TrainingStep
from tests.support.real_memory import most_in_use

VOCABULARY, WIDTH, LENGTH = 4000, 64, 16


class Tied(nn.Module):
    """Embeds tokens and multiplies by the same weight again, by parts of the text."""

    def __init__(self, parts: int, *, tied: bool) -> None:
        super().__init__()
        self.parts = parts
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.output = self.embedding if tied else nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        hidden = torch.tanh(self.embedding(tokens))
        return [functional.linear(part, self.output.weight) for part in hidden.chunk(self.parts, dim=1)]


def step_of(parts: int, *, tied: bool = True) -> TrainingStep:
    model = Tied(parts, tied=tied)

    def bind(model: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[torch.Tensor], None]:
        def run(tokens: torch.Tensor) -> None:
            sum(part.square().mean() for part in model(tokens)).backward()  # type: ignore[union-attr]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return run

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return TrainingStep(model, [optimizer], lambda b: torch.randint(VOCABULARY, (b, LENGTH)), bind)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_gradients_of_a_weight_that_is_used_often_take_what_a_real_step_takes(parts: int, tied: bool) -> None:
    """The first sum is a new tensor, as the first gradient is a transposed view; the others are made in place."""
    step = step_of(parts, tied=tied)
    curve = trace_peak_memory(step)
    for size in (2, 10):
        batch = step.make_batch(size)
        run = step.bind(step.model, step.optimizers)
        run(batch)
        real = most_in_use(lambda run=run, batch=batch: run(batch))  # type: ignore[misc]
        # the trace holds the batch as well
        assert curve.peak_bytes(size) - curve.resting_bytes - batch.nbytes == pytest.approx(real, rel=0.01)


def test_the_gradient_of_an_embedding_is_summed_by_parts_in_float32_on_cuda() -> None:
    model = nn.Embedding(VOCABULARY, WIDTH)

    def bind(model: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[torch.Tensor], None]:
        def run(tokens: torch.Tensor) -> None:
            model(tokens).square().sum().backward()
            model.zero_grad()

        return run

    length = 20  # whole bytes of each part
    step = TrainingStep(model, [], lambda b: torch.zeros(b, length, dtype=torch.long), bind)
    on_cuda, on_cpu = trace_peak_memory(replace(step, on_cuda=True)), trace_peak_memory(step)
    # At the least, each token is a part; a tenth more are there for tokens that are alike.
    tokens = 10 * length
    takes = [curve.peak_bytes(10) - curve.resting_bytes for curve in (on_cuda, on_cpu)]
    assert takes[0] - takes[1] == 11 * tokens * WIDTH * 4 // 10
