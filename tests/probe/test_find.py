"""The probe on a device whose limit counts what its allocator reserves, and not what is allocated of that."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory.meter import memory_meter
from adaptive_batching._probe import find as find_module
from adaptive_batching._probe import trial as trial_module
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._probe.find import find_largest
from adaptive_batching._probe.probed_step import TrainingStep
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._probe.sizing import ProbeRequest
from adaptive_batching._values import MemoryAmount
from tests.support.counting_device import GIB, KIB, MIB, Device, Layer

EXACT = AdaptiveBatchingConfig.from_mapping({"round_to_power_of_two": False, "headroom": 0})


def find(device: Device, upper: int, config: AdaptiveBatchingConfig = EXACT, **how: Any) -> ProbeResult:
    request = ProbeRequest(upper, rounds=config.round_to_power_of_two)
    return find_largest(device.training_step(), config, device, request, **how)


def trains(device: Device, batch_size: int) -> bool:
    """True if training at ``batch_size`` goes on without running out of memory."""
    again = replace(device)
    try:
        for _ in range(3):
            again.step(batch_size * device.length)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("depth", range(4, 24, 6))
def test_a_size_that_is_rounded_down_says_what_fits(depth: int) -> None:
    layers = [Layer(16 * MIB, 24 * KIB, 8 * KIB)] * depth
    total = 4 * depth * 16 * MIB + (6 + depth % 5) * GIB
    exact = find(Device(total, layers), 512)
    rounded = find(Device(total, layers), 512, replace(EXACT, round_to_power_of_two=True))
    assert rounded.batch_size == 1 << (exact.batch_size.bit_length() - 1)
    assert rounded.exact == pytest.approx(exact.batch_size, rel=0.03)
    assert rounded.bound == f"memory: about {rounded.exact} fit, rounded down (round_to_power_of_two)"
    assert exact.exact is None and exact.bound == "memory"


@pytest.mark.parametrize("room_gib", [3, 7, 13, 29, 60])
@pytest.mark.parametrize("overhead", [1.02, 1.06, 1.18, 1.4])
def test_what_is_reserved_beyond_what_is_allocated_costs_few_errors(room_gib: int, overhead: float) -> None:
    layers = [Layer(40 * MIB, 40 * KIB, 20 * KIB)] * 16
    device = Device(3 * GIB + room_gib * GIB, layers, libraries_bytes=300 * MIB, overhead=overhead)
    found = find(device, upper=4096)
    assert trains(device, found.batch_size)
    assert not trains(device, int(1.02 * found.batch_size) + 1)
    assert device.errors <= 2 and found.num_steps <= 10


def test_a_loss_is_enough_to_ask_for_the_largest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run backward by the probe, or by the loss itself, which then returns nothing; the step is the same."""
    asked: list[TrainingStep] = []
    monkeypatch.setattr(find_module, "find_largest", lambda step, *_: asked.append(step))

    def backward(model: nn.Module, batch: torch.Tensor) -> None:
        model(batch).sum().backward()

    weights = []
    for loss in (lambda model, batch: model(batch).sum(), backward):
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        find_module.find_maximum_batch_size(model, optimizer, loss, lambda size: torch.ones(size, 2), upper=3)
        step = asked.pop()
        step.run(step.make_batch(2))
        assert model.weight.grad is None
        weights.append(model.weight.tolist())
    assert weights == [[[0.0, 0.0]]] * 2


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_single_sample_that_does_not_fit_says_what_it_took_or_the_error(is_measured: bool) -> None:
    total = 100 * GIB if is_measured else 2 * GIB
    device = Device(total, [Layer(40 * MIB, 40 * KIB, 20 * KIB)] * 8, length=2048, overhead=1.4)
    if is_measured:  # by a device that cannot be limited
        device.limit = lambda num_bytes: nullcontext()  # type: ignore[assignment, method-assign, return-value]
    config = replace(EXACT, memory_limit=MemoryAmount(num_bytes=2 * GIB))
    with pytest.raises(DoesNotFitError) as error:
        find(device, 8, config, remedy="set half the length")
    why = r"it took 2\.\d+ GiB, \d+ MiB too much" if is_measured else r"it ran out of memory \(CUDA out of memory"
    assert re.search(rf"does not fit in 2.00 GiB: {why}.*; set half the length", str(error.value)), str(error.value)


class Disturbed(Device):
    """Runs out of memory where nothing needs so much, the first few times."""

    def step(self, tokens: int) -> None:
        if self.errors < self.disturbances:
            self.steps.append(tokens)
            self.errors += 1
            raise torch.OutOfMemoryError("CUDA error: out of memory\nsomebody else")
        super().step(tokens)

    disturbances = 0


@pytest.mark.parametrize("search", ["predict", "power_of_two", "binary_search"])
def test_one_error_in_the_smallest_step_changes_nothing_and_two_are_said(search: str) -> None:
    config = replace(EXACT, search=search)
    device = Disturbed(20 * GIB, [Layer(16 * MIB, 24 * KIB, 8 * KIB)] * 4)
    found = [find(device, 2, config).batch_size]
    device.disturbances = device.errors + 1
    found.append(find(device, 2, config).batch_size)
    assert found == [2, 2]
    device.disturbances = 10**6
    with pytest.raises(DoesNotFitError) as error:
        find(device, 2, config, remedy="set half the length")
    assert "it ran out of memory (CUDA error: out of memory); set half the length" in str(error.value)


def test_what_libraries_take_in_the_first_step_does_not_count_as_left() -> None:
    device = Device(8 * GIB, [Layer(MIB, 64 * KIB, 0)], libraries_bytes=2 * GIB)
    found = find(device, upper=4096)
    assert max(found.budget_bytes, found.peak_bytes) <= 6 * GIB and device.errors <= 1


@pytest.mark.parametrize("stops_early", [False, True])
def test_the_host_keeps_freed_memory_again_where_forwards_are_far_from_the_limit(
    stops_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(trial_module, "keep_little_on_the_host", lambda: told.append("little"))
    monkeypatch.setattr(find_module, "keep_freed_memory_on_the_host", lambda: told.append("as usual"))
    model = nn.Linear(2, 1)

    step = TrainingStep(
        model, [torch.optim.SGD(model.parameters())], lambda size: torch.ones(size, 2),
        lambda batch: model(batch).sum().backward(),
    )  # fmt: skip
    times: Any = SimpleNamespace(enough=lambda: 2, is_worth=lambda small, large: True) if stops_early else None
    find_largest(step, EXACT, memory_meter("cpu"), ProbeRequest(4, may_stop_early=True), times=times)
    assert told == (["little", "as usual"] if stops_early else ["little"])
