"""Training steps of small models, and what they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from adaptive_batching._probe.probed_step import TrainingStep


def most_in_use(run: Callable[[], Any]) -> int:
    """Return the most bytes that ``run`` has in use beyond those before it, as torch's profiler counts them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def step_of(
    model: nn.Module, optimizer: Optimizer | None, loss: Callable[[Any], torch.Tensor], make_batch: Callable[[int], Any]
) -> TrainingStep:
    """A step that runs the backward pass of ``loss`` of what the model makes of a batch."""

    def run(batch: Any) -> None:
        loss(model(batch)).backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()

    return TrainingStep(model, [] if optimizer is None else [optimizer], make_batch, run)
