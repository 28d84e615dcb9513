"""What a pass that ran out of memory leaves on a device, where autograd has a thread with a queue of its own."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from adaptive_batching._dry_run.device import control
from adaptive_batching._memory.unused_memory import little_to_collect, release_cached_memory
from adaptive_batching._ranks.agree import ALONE
from tests.step.test_left_behind import WAYS, Branches
from tests.support.toy_work import run_parts

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_of_a_forward_or_backward_whichever_of_its_allocations_fails(way: str) -> None:
    model = Branches("plain" if way == "offloading" else way).to(DEVICE)
    samples = torch.zeros(256, 8, device=DEVICE)
    left: list[int] = []

    def forward_backward() -> None:
        with save_on_cpu(pin_memory=True) if way == "offloading" else contextlib.nullcontext():
            model(samples).backward()

    def discard() -> None:
        model.zero_grad()
        release_cached_memory(DEVICE)
        left.append(torch.cuda.memory_allocated())

    with little_to_collect():
        forward_backward()  # makes workspaces
        discard()
        before = control.counters()
        forward_backward()
        num_allocations = (control.counters() - before).allocations
        discard()
        for number in range(num_allocations):
            control.fail_allocations(number)
            assert run_parts([forward_backward], ALONE, None, discard).failed
            control.end_faults()
    assert len(left) == 2 + num_allocations > 30
    assert set(left) == {left[0]}


class Slow(torch.autograd.Function):
    """Keeps a copy for the backward pass, and takes time to let go of it."""

    alive = 0

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            Slow.alive += 1

        def __del__(self) -> None:
            time.sleep(0.05)
            Slow.alive -= 1

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.kept = Slow.Kept(x.clone())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise torch.OutOfMemoryError("out of memory in backward")


@pytest.mark.parametrize("place", ["on the device", "on the host", "on both"])
def test_the_thread_that_drops_a_failed_backward_is_waited_for(place: str) -> None:
    host = torch.device("cpu")
    waits, fails = {"on the device": (DEVICE, DEVICE), "on the host": (host, host), "on both": (host, DEVICE)}[place]
    weights = [torch.ones(2**20, device=where, requires_grad=True) for where in (waits, fails)]
    alive: list[int] = []

    def forward_backward() -> None:
        waiting, failing = (Slow.apply(weights[0]), Fails.apply(weights[1]))  # the failing one comes first in backward
        (waiting.sum().to(fails) + failing.sum()).backward()

    def discard() -> None:
        for weight in weights:
            weight.grad = None
        release_cached_memory(DEVICE)
        alive.append(Slow.alive)

    assert run_parts([forward_backward], ALONE, None, discard).failed
    assert alive == [0]
