"""What a step needs at any batch size, the three answers, and GPUs by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adaptive_batching._plan import GPUS, SET_UP, Answer, Forecast, find_gpu, outside_of_allocator
from adaptive_batching._trace.allocator import MIB
from adaptive_batching._trace.reserved import SetUp
from adaptive_batching._trace.trace import trace_step
from adaptive_batching._trace.traced_step import TracedStep
from adaptive_batching._trace.training import TrainingStep
from adaptive_batching._values import ConfigError


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


def test_exit_codes_are_those_of_the_documentation() -> None:
    codes = {"fits": 0, "does not fit": 1, "tight": 3, "cannot tell": 4}
    assert {str(answer): answer.value for answer in Answer} == codes


def test_several_devices_have_buffers_of_nccl() -> None:
    assert len(outside_of_allocator(2)) == len(outside_of_allocator(1)) + 1
    assert all(0 <= each.least < each.most and each.source for each in outside_of_allocator(2))


def test_gpus_are_found_however_they_are_spelled_and_a_name_that_is_unclear_is_refused() -> None:
    for name in ("RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "H100", "a100-80gb", "A100 80GB PCIe"):
        assert find_gpu(name) in GPUS
    unclear = {"A100": "one of several .*A100-40GB, A100-80GB", "RTX 4091": "mean 'RTX 4090'", "TPU": "known are"}
    for name, message in unclear.items():
        with pytest.raises(ConfigError, match=message):
            find_gpu(name)
