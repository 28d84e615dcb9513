"""What a forward or backward that ran out of memory leaves there: nothing, by the time that its samples run again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from adaptive_batching import AdaptiveStep
from adaptive_batching._memory.meter import CpuMeter
from adaptive_batching._probe.trial import Trial
from tests.probe.test_trial import BUDGET, training_step

Call = Callable[[torch.Tensor], torch.Tensor]


# Not attributes of modules, which are put back when a step runs again.
STORAGES: list[StorageWeakRef] = []
"""Of all that went into a block, came out, or was copied."""

FAILS_IN: dict[nn.Module, str] = {}
"""A block that is to run out of memory, and in which pass."""


class Offloaded(nn.Module):
    """Keeps copies of what a backward pass needs."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self._copy, torch.clone):
            return self.block(x)  # type: ignore[no-any-return]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        STORAGES.append(StorageWeakRef(copy.untyped_storage()))
        return copy


WAYS: dict[str, Callable[[nn.Module], Call]] = {
    "plain": lambda block: block,
    "checkpointing": lambda block: partial(checkpoint, block, use_reentrant=False),
    "reentrant checkpointing": lambda block: partial(checkpoint, block, use_reentrant=True),
    "offloading": Offloaded,
    "compile": lambda block: torch.compile(block.forward, backend="aot_eager"),
}


class Block(nn.Module):
    """Runs out of memory once, where :data:`FAILS_IN` says so."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self._run = WAYS[way](self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        where = FAILS_IN.pop(self, "")
        y: torch.Tensor = self._run(x) + x
        STORAGES.extend([StorageWeakRef(each.untyped_storage()) for each in (x, y)])
        if where == "forward":
            raise torch.OutOfMemoryError("out of memory in forward")
        if where == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: torch.Tensor) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


class Branches(nn.Module):
    """Two ways from the input to the loss: when a backward fails in one, the other is still waiting."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.branches = nn.ModuleList([nn.Sequential(Block(way), Block(way)) for _ in range(2)])

    def blocks(self) -> list[Block]:
        return [block for block in self.modules() if isinstance(block, Block)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return torch.stack([branch(x) for branch in self.branches]).square().sum()


def num_alive() -> int:
    return sum(not storage.expired() for storage in STORAGES)


@contextlib.contextmanager
def noted(model: Branches) -> Iterator[list[int]]:
    """Note how many tensors of earlier forwards are alive when one begins of which gradients are wanted."""
    alive: list[int] = []

    def note(module: nn.Module, args: object) -> None:
        if torch.is_grad_enabled():
            alive.append(num_alive())

    with model.register_forward_pre_hook(note):
        yield alive


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_a_failed_forward_or_backward_is_alive_when_its_samples_run_again(way: str) -> None:
    torch.manual_seed(0)
    STORAGES.clear()
    model = Branches(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = AdaptiveStep[torch.Tensor](model, optimizer, lambda model, batch: (model(batch), len(batch)))
    samples = [*torch.randn(4, 8)]
    with Trial(training_step(model, optimizer), CpuMeter(), BUDGET) as trial:  # type: ignore[arg-type]
        for block in model.blocks():
            for where in ("forward", "backward"):
                FAILS_IN[block] = where
                with noted(model) as alive:
                    step(samples)
                assert len(alive) > 1 and not any(alive), f"in training: {where}"
                FAILS_IN[block] = where
                assert not trial.measure(4).fits
                assert num_alive() == 0, f"in a probe: {where}"
    assert step.num_recoveries == 8
    assert len(STORAGES) > 100
