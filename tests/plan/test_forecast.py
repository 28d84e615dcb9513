from __future__ import annotations

import pytest
import torch
from torch import nn

from adaptive_batching._plan.devices import outside_of_allocator
from adaptive_batching._plan.forecast import SET_UP, Forecast
from adaptive_batching._probe.trial import TrainingStep
from adaptive_batching._trace.reserved import SetUp
from adaptive_batching._trace.trace import trace_step
from adaptive_batching._trace.traced_step import TracedStep

MIB = 2**20


def linear_step() -> TracedStep:
    model = nn.Linear(1024, 1024)

    def run(batch: torch.Tensor) -> None:
        model(batch)

    return trace_step(TrainingStep(model, [], lambda b: torch.ones(b, 1024), lambda *_: run))


@pytest.mark.parametrize("fits", [0, 1, 2, 5, 11, 30])
def test_a_size_fits_where_the_one_below_it_does_not(fits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserved memory is not quite monotonic, as blocks are rounded."""
    forecast = Forecast(linear_step(), [])
    budget = forecast.step.curve.peak_bytes(40)
    reserved = {size: budget + (1 if size > fits or size == fits - 1 else 0) for size in range(100)}
    monkeypatch.setattr(Forecast, "_reserved", lambda _, size: reserved[size])
    assert forecast.largest(budget) == fits


def test_a_set_up_that_takes_more_than_a_step_is_the_peak() -> None:
    step = linear_step()
    outside = outside_of_allocator(1)
    without, small, large = (Forecast(step, outside, SetUp((0, ~0), (size,))) for size in (0, MIB, 100 * MIB))
    assert without.need(4).kinds == small.need(4).kinds
    need = large.need(4)
    assert need.moment == SET_UP != small.need(4).moment
    assert need.peak_bytes == sum(need.kinds.values()) == 100 * MIB
    assert min(need.reserved.by_default, need.reserved.least, need.reserved.expandable) >= 100 * MIB
    assert need.resting_bytes == without.need(4).resting_bytes
    others = sum(each.most for each in outside)
    assert large.largest(90 * MIB + others) == 0 < without.largest(90 * MIB + others)
