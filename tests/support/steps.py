"""Training steps of small models, and what a trace of one says against what it really takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_iter

from adaptive_batching._trace.trace import trace_peak_memory
from adaptive_batching._trace.training import TrainingStep


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

    def bind(model: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[Any], None]:
        def run(batch: Any) -> None:
            loss(model(batch)).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()

        return run

    return TrainingStep(model, [] if optimizer is None else [optimizer], make_batch, bind)


def sum_of_squares(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total: Any = sum(part.square().mean() for part in parts)
    return total  # type: ignore[no-any-return]


def predicted_and_real(step: TrainingStep, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return what a trace says of ``step``, and what it takes on the CPU, besides what is in use before it and a batch.

    The first time that each size runs does not count.
    """
    curve = trace_peak_memory(step)
    run = step.bind(step.model, step.optimizers)
    found = []
    for size in sizes:
        batch = step.make_batch(size)
        own = sum(each.nbytes for each in tree_iter(batch) if isinstance(each, torch.Tensor))
        run(batch)
        real = most_in_use(lambda batch=batch: run(batch))  # type: ignore[misc]
        found.append((curve.peak_bytes(size) - curve.resting_bytes - own, real))  # the trace holds the batch as well
    return found


def check_against_a_real_step(step: TrainingStep, sizes: Sequence[int], *, rel: float) -> None:
    """Hold what a trace says of ``step`` to what it takes on the CPU."""
    for size, (predicted, real) in zip(sizes, predicted_and_real(step, sizes), strict=True):
        assert predicted == pytest.approx(real, rel=rel), size
