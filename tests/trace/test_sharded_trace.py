"""The simulation of FSDP2, against FSDP2 itself on the CPU.

The other ranks are a process group that is none: what is gathered from them is nonsense, but it takes its memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.steps import check_against_a_real_step, step_of, sum_of_squares

RANKS, VOCABULARY, WIDTH, LENGTH, PARTS = 8, 3000, 64, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.adapter(x) + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Has logits in parts, or at once, without running its output layer, as some losses do."""

    def __init__(self, *, checkpoints: bool = False, parts: int = PARTS, output_runs: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        blocks = [Block() for _ in range(3)]
        self.layers = nn.ModuleList([checkpoint_wrapper(block) if checkpoints else block for block in blocks])
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self._parts, self._output_runs = parts, output_runs

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if not self._output_runs:
            return [nn.functional.linear(x, self.output.weight)]
        return [self.output(part) for part in x.chunk(self._parts, dim=1)]


@pytest.fixture(autouse=True)
def one_of_many() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


# Half of all cases, in which three settings meet in each way.
@pytest.mark.parametrize(
    ("frozen", "ends_apart", "checkpoints", "root_stays"),
    [(a, b, c, a ^ b ^ c) for a, b, c in itertools.product([False, True], repeat=3)],
)
def test_a_sharded_step_takes_what_one_of_fsdp_takes(
    frozen: bool, ends_apart: bool, checkpoints: bool, root_stays: bool
) -> None:
    model = Decoder(checkpoints=checkpoints)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "adapter" in name)
    mesh = init_device_mesh("cpu", (RANKS,))
    for unit in [*model.layers, *([model.embedding, model.output] if ends_apart else [])]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=not root_stays)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False)
    step = step_of(model, optimizer, sum_of_squares, lambda b: torch.randint(VOCABULARY, (b, LENGTH)))
    check_against_a_real_step(step, (2, 12), rel=0.02)


POLICIES = {
    "none": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "reduced in float32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}


# Half of all cases, in which two settings meet in each way.
@pytest.mark.parametrize(
    ("tied", "output_runs", "policy"),
    [(tied, tied ^ (policy == "bfloat16"), policy) for tied in (False, True) for policy in POLICIES],
)
def test_modules_that_are_gathered_together_take_what_they_do_in_fsdp(
    tied: bool, output_runs: bool, policy: str
) -> None:
    """Accelerate has one unit of the norm and the output layer, and of the embedding, too, if weights are tied."""
    model = Decoder(checkpoints=True, parts=1, output_runs=output_runs)
    if tied:
        model.output.weight = model.embedding.weight
    how: Any = dict(mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=POLICIES[policy])
    blocks: list[Any] = [layer._checkpoint_wrapped_module for layer in model.layers]  # hooks are checkpointed as well
    for unit in [*blocks, *([] if tied else [model.embedding])]:
        fully_shard(unit, reshard_after_forward=True, **how)
    together: list[nn.Module] = [model.norm, *([model.embedding] if tied else []), model.output]
    fully_shard(together, reshard_after_forward=False, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    step = step_of(model, optimizer, sum_of_squares, lambda b: torch.randint(VOCABULARY, (b, LENGTH)))
    check_against_a_real_step(step, (2, 12), rel=0.02)
