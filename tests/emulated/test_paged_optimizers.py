"""Optimizers of bitsandbytes, with its CUDA library: their states in managed memory, probed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._dry_run.device import control
from adaptive_batching._memory.meter import memory_meter
from adaptive_batching._probe.does_not_fit import memory_budget
from adaptive_batching._probe.find import find_largest
from adaptive_batching._probe.probed_step import TrainingStep
from adaptive_batching._probe.sizing import ProbeRequest
from adaptive_batching._probe.trial import Trial
from tests.support.steps import step_of

GIB, MIB = 2**30, 2**20
WIDTH = 4096
CONFIG = AdaptiveBatchingConfig()
pages: list[torch.Tensor] = bitsandbytes.functional.GlobalPageManager.get_instance().paged_tensors


@pytest.fixture(autouse=True)
def no_pages_of_other_tests() -> None:
    """Send those of earlier tests to the host, as bitsandbytes does not free them, and forget them."""
    memory_budget(CONFIG, memory_meter("cuda"))
    pages.clear()


def make_step(make_optimizer: Callable[..., Optimizer], **arguments: Any) -> TrainingStep:
    """Four layers of 64 MiB; a sample is 1,024 tokens."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(4)))
    optimizer = make_optimizer(model.parameters(), lr=1e-3, **arguments)
    return step_of(model, optimizer, torch.sum, lambda size: torch.ones(size, 1024, WIDTH, device="cuda"))


def largest(step: TrainingStep) -> int:
    return find_largest(step, CONFIG, memory_meter("cuda"), ProbeRequest(64, rounds=False)).batch_size


def test_managed_memory_of_our_own_does_not_count_as_taken() -> None:
    control.set_memory(3 * GIB)
    meter = memory_meter("cuda")
    step = make_step(bitsandbytes.optim.PagedAdamW)
    step.run(step.make_batch(1))  # what the first products take
    meter.release()
    before = memory_budget(CONFIG, meter)
    step.run(step.make_batch(1))
    meter.release()
    assert sum(page.nbytes for page in pages) == 512 * MIB
    assert meter.free_bytes() + meter.used_bytes() < before, "the device counts them"
    assert memory_budget(CONFIG, meter) == before


def test_states_that_can_leave_the_device_take_none_of_the_largest_batch() -> None:
    control.set_memory(2 * GIB)
    expected = largest(make_step(torch.optim.SGD, foreach=False))
    step = make_step(bitsandbytes.optim.PagedAdamW)
    assert expected > 1
    assert largest(step) == expected
    assert largest(step) == expected, "they are there from the first probe"
    assert sum(page.nbytes for page in pages) == 512 * MIB


def test_what_a_trial_saves_of_states_that_are_zero_is_nothing(caplog: pytest.LogCaptureFixture) -> None:
    step = make_step(bitsandbytes.optim.PagedAdamW)
    with caplog.at_level(logging.INFO), Trial(step, memory_meter("cuda"), 80 * GIB) as trial:
        assert trial.measure(2).fits
        before = control.counters()
    zeroed = (control.counters() - before).kernels
    assert "saved while probing: 0.0 MiB in a file" in caplog.text and "256 MiB in the host's memory" in caplog.text
    assert len(pages) == 8 and zeroed >= 8, "each is set to zero by the device, which computes nothing here"
    assert all(step.optimizers[0].state[parameter]["step"] == 0 for parameter in step.model.parameters())
