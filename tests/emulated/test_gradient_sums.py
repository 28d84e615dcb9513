"""Gradients that autograd adds up, on a device: its backward pass runs in a thread of autograd's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batching._trace.trace import _device_of_trace, trace_step
from adaptive_batching._trace.training import TrainingStep


class Branches(nn.Module):
    """Uses one result four times, and a weight of its own each time, so that the last sum is made on top of most."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4096)
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(1500, 1024)) for _ in range(4)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(batch)
        return torch.stack([(hidden * 2.0).sum() + (weight * 2.0).sum() for weight in self.weights]).sum()


def test_gradients_that_are_added_in_place_are_traced_as_such() -> None:
    def bind(model: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[torch.Tensor], None]:
        def run(batch: torch.Tensor) -> None:
            model(batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return run

    model = Branches().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    step = TrainingStep(model, [optimizer], lambda size: torch.zeros(size * 256, 64, device="cuda"), bind, on_cuda=True)
    run = bind(model, [optimizer])
    run(step.make_batch(2))  # makes handles and workspaces
    assert _device_of_trace(model).type == "cuda"
    curve = trace_step(step).curve
    for size in (1, 2):
        batch = step.make_batch(size)
        torch.cuda.reset_peak_memory_stats()
        resting = torch.cuda.memory_allocated()
        run(batch)
        real = torch.cuda.max_memory_allocated() - resting
        assert curve.peak_bytes(size) - curve.resting_bytes == pytest.approx(real, rel=0.02)
