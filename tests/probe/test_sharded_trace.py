"""The simulation of FSDP2, against FSDP2 itself on the CPU.

The other ranks are a process group that is none: what is gathered from them is nonsense, but it takes its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from adaptive_batching._probe.trace import trace_peak_memory
from adaptive_batching._probe.trial import TrainingStep
from tests.support.real_memory import most_in_use

RANKS, VOCABULARY, WIDTH, LENGTH, PARTS = 8, 3000, 64, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.adapter(x) + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        blocks = [Block() for _ in range(3)]
        self.layers = nn.ModuleList([checkpoint_wrapper(block) if checkpoints else block for block in blocks])
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return [self.output(part) for part in self.norm(x).chunk(PARTS, dim=1)]


@pytest.fixture(autouse=True)
def one_of_many() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def step_of(*, frozen: bool, ends_apart: bool, checkpoints: bool, root_stays: bool) -> TrainingStep:
    model = Decoder(checkpoints=checkpoints)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "adapter" in name)
    mesh = init_device_mesh("cpu", (RANKS,))
    for unit in [*model.layers, *([model.embedding, model.output] if ends_apart else [])]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=not root_stays)
    assert isinstance(model, FSDPModule)

    def bind(model: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[torch.Tensor], None]:
        def run(tokens: torch.Tensor) -> None:
            loss = sum(part.square().mean() for part in model(tokens))
            loss.backward()  # type: ignore[union-attr]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return run

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False)
    return TrainingStep(model, [optimizer], lambda b: torch.randint(VOCABULARY, (b, LENGTH)), bind)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("ends_apart", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("root_stays", [False, True])
def test_a_sharded_step_takes_what_one_of_fsdp_takes(
    frozen: bool, ends_apart: bool, checkpoints: bool, root_stays: bool
) -> None:
    step = step_of(frozen=frozen, ends_apart=ends_apart, checkpoints=checkpoints, root_stays=root_stays)
    curve = trace_peak_memory(step)
    run = step.bind(step.model, step.optimizers)
    for size in (2, 12):
        batch = step.make_batch(size)
        run(batch)
        real = most_in_use(lambda batch=batch: run(batch))  # type: ignore[misc]
        assert curve.peak_bytes(size) - curve.resting_bytes - batch.nbytes == pytest.approx(real, rel=0.02), size
