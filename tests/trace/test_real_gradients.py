"""Where autograd adds gradients in place, and where kernels of CUDA take memory: a trace against real steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from adaptive_batching._trace.trace import trace_peak_memory
from tests.support.steps import check_against_a_real_step, step_of, sum_of_squares

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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_gradients_of_a_weight_that_is_used_often_take_what_a_real_step_takes(parts: int, tied: bool) -> None:
    """The first sum is a new tensor, as the first gradient is a transposed view; the others are made in place."""
    model = Tied(parts, tied=tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    step = step_of(model, optimizer, sum_of_squares, lambda b: torch.randint(VOCABULARY, (b, LENGTH)))
    check_against_a_real_step(step, (2, 10), rel=0.01)


def test_the_gradient_of_an_embedding_is_summed_by_parts_in_float32_on_cuda() -> None:
    length = 20  # whole bytes of each part
    model = nn.Embedding(VOCABULARY, WIDTH)
    step = step_of(model, None, lambda out: out.square().sum(), lambda b: torch.zeros(b, length, dtype=torch.long))
    curves = trace_peak_memory(replace(step, on_cuda=True)), trace_peak_memory(step)
    # At the least, each token is a part; a tenth more are there for tokens that are alike.
    tokens = 10 * length
    on_cuda, on_cpu = (curve.peak_bytes(10) - curve.resting_bytes for curve in curves)
    assert on_cuda - on_cpu == 11 * tokens * WIDTH * 4 // 10
