from __future__ import annotations

import torch
from torch import nn

from adaptive_batching.plan.devices import outside_of_allocator
from adaptive_batching.plan.forecast import SET_UP, Forecast
from adaptive_batching.probe.trace import trace_step
from adaptive_batching.probe.trial import TrainingStep

MIB = 2**20


def test_a_set_up_that_takes_more_than_a_step_is_the_peak() -> None:
    model = nn.Linear(1024, 1024)

    def run(batch: torch.Tensor) -> None:
        model(batch)

    step = trace_step(TrainingStep(model, [], lambda b: torch.ones(b, 1024), lambda *_: run))
    outside = outside_of_allocator(1)
    without, small, large = (Forecast(step, outside, size) for size in (0, MIB, 100 * MIB))
    assert without.need(4) == small.need(4)
    need = large.need(4)
    assert need.moment == SET_UP != small.need(4).moment
    assert need.peak_bytes == sum(need.kinds.values()) == 100 * MIB
    assert min(need.reserved.by_default, need.reserved.least, need.reserved.expandable) >= 100 * MIB
    assert need.resting_bytes == without.need(4).resting_bytes
    others = sum(each.most for each in outside)
    assert large.largest(90 * MIB + others) == 0 < without.largest(90 * MIB + others)
