"""A card's memory: what the model of its allocator, a limit and a trace say of it, against PyTorch's own allocator."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import triton
import triton.language as tl
from torch import nn

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._emulated_device import control
from adaptive_batching._memory import memory_meter
from adaptive_batching._probe.does_not_fit import memory_budget, within_memory_limit
from adaptive_batching._trace.allocator import GIB, KIB, MIB, CachingAllocator
from adaptive_batching._trace.trace import _device_of_trace, trace_step
from adaptive_batching._trace.traced_step import TraceError
from tests.support.steps import step_of

SIZES = [
    *(512 * n for n in (1, 2, 3)), 64 * KIB, 900 * KIB, MIB, MIB + 512, 2 * MIB, 9 * MIB, 10 * MIB - 512, 10 * MIB,
    11 * MIB, 16 * MIB, 60 * MIB, 299 * MIB + 512 * KIB, 300 * MIB, 501 * MIB,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_the_model_of_the_allocator_reserves_what_the_allocator_does_on_several_streams(seed: int) -> None:
    torch.cuda.empty_cache()
    draw, model = random.Random(seed), CachingAllocator()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    held: list[tuple[torch.Tensor, Any]] = []
    for _ in range(600):
        if held and draw.random() < 0.48:
            tensor, block = held.pop(draw.randrange(len(held)))
            model.give_back(block)
            del tensor
        else:
            number, size = draw.randrange(3), draw.choice(SIZES)
            with torch.cuda.stream(streams[number]):
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            held.append((tensor, model.take(size, number)))
        found = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        assert (model.reserved, model.allocated) == (found[0] - before[0], found[1] - before[1])


def settings(limit: str) -> AdaptiveBatchingConfig:
    return AdaptiveBatchingConfig.from_mapping({"memory_limit": limit})


def fill(device: torch.device, limit: str) -> int:
    """Fill the card until the limit stops this process, and return what is taken of it."""
    held: list[Any] = []
    with within_memory_limit(settings(limit), device), pytest.raises(torch.OutOfMemoryError):
        while True:
            held.append(torch.empty(128 * MIB, dtype=torch.uint8, device=device))
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("limit", ["40GiB", "50%"])
def test_two_processes_at_half_of_a_card_do_not_exceed_it(limit: str) -> None:
    device = torch.device("cuda", 0)
    torch.ones(1, device=device)
    alone = fill(device, limit)
    assert 40 * GIB - 256 * MIB < alone <= 40 * GIB
    torch.cuda.empty_cache()
    control.set_neighbour(alone)
    beside = fill(device, limit) - alone
    assert 39.5 * GIB < beside <= 40 * GIB, "its context cannot be told from the neighbour's: it is taken to be large"


def test_the_budget_of_a_probe_is_what_the_limit_leaves_to_the_allocator() -> None:
    meter = memory_meter("cuda")
    torch.ones(1, device="cuda")
    meter.release()
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    assert context > 100 * MIB
    assert memory_budget(settings("4GiB"), meter) == 4 * GIB - context


class Branches(nn.Module):
    """Uses one result four times, and a weight of its own each time, so that the last sum is made on top of most."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4096)
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(1500, 1024)) for _ in range(4)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(batch)
        return torch.stack([(hidden * 2.0).sum() + (weight * 2.0).sum() for weight in self.weights]).sum()


@triton.jit
def _double_kernel(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


class Doubled(torch.autograd.Function):
    """Launches a kernel of Triton's itself, as losses of TRL and Liger do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        _double_kernel[(triton.cdiv(x.numel(), 128),)](x, y, x.numel(), BLOCK=128)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return cast(torch.Tensor, Doubled.apply(gradient))  # type: ignore[no-untyped-call]


class AsksForPointer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(x.data_ptr() >= 0)


def test_a_trace_launches_no_kernel_and_hands_out_no_pointer(monkeypatch: pytest.MonkeyPatch) -> None:
    launched_on: list[type[Any]] = []
    launch = triton.runtime.jit.JITFunction.run

    def launch_and_note(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launched_on.append(type(args[0]))
        return launch(kernel, *args, **kwargs)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", launch_and_note)
    model = nn.Linear(256, 8192).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    step = step_of(model, optimizer, lambda out: Doubled.apply(out).sum(), lambda n: torch.zeros(n * 64, 256).cuda())  # type: ignore[no-untyped-call]
    step = replace(step, on_cuda=True)
    curve = trace_step(step).curve
    assert launched_on == []
    run = step.bind(model, [optimizer])
    run(step.make_batch(2))  # makes handles and workspaces
    batch = step.make_batch(2)
    torch.cuda.reset_peak_memory_stats()
    resting = torch.cuda.memory_allocated()
    run(batch)
    assert set(launched_on) == {torch.Tensor}
    real = torch.cuda.max_memory_allocated() - resting
    assert curve.peak_bytes(2) - curve.resting_bytes == pytest.approx(real, rel=0.02)
    with pytest.raises(TraceError, match="pointer"):
        trace_step(replace(step, model=AsksForPointer(256, 256).cuda(), optimizers=[]))


def test_gradients_that_are_added_in_place_in_a_thread_of_autograds_own_are_traced_as_such() -> None:
    model = Branches().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    step = step_of(model, optimizer, lambda out: out, lambda size: torch.zeros(size * 256, 64, device="cuda"))
    step = replace(step, on_cuda=True)
    run = step.bind(model, [optimizer])
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
