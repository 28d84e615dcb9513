"""The loops that the page shows for Accelerate and Lightning Fabric train as a plain one, in one process and in two."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.loop import other_loops
from tests.loop.other_loops import NUM_SAMPLES, run_loops, samples_of_loop
from tests.support.ranks import run_ranks
from tests.support.small_model import make_model

pytestmark = pytest.mark.xdist_group("other_loops")

NAMES = {1: ["accelerate", "lightning"], 2: ["accelerate", "lightning with DDP", "accelerate with FSDP2"]}
"""Number of ranks -> loops that they run, one after the other."""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    return cache(lambda size: run_ranks(run_loops, NAMES[size], folder=tmp_path_factory.mktemp("loops"), size=size))


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, names in NAMES.items() for name in names])
def test_the_loops_of_other_libraries_train_as_a_plain_one(
    size: int, name: str, launched: Callable[[int], list[dict[str, Any]]]
) -> None:
    pytest.importorskip(name.split()[0], reason=f"{name.split()[0]} is not installed")
    ranks = [rank[name] for rank in launched(size)]
    data, model = samples_of_loop(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen: set[int] = set()
    for steps in zip(*[steps for steps, _ in ranks], strict=True):
        numbers = [number for of_rank, _ in steps for number in of_rank]
        total, count = other_loops.loss(model, other_loops.collate([data[number] for number in numbers]))
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert [loss for _, loss in steps] == pytest.approx([(total / count).item()] * size, rel=1e-5)
        seen.update(numbers)
    assert seen == set(range(NUM_SAMPLES))
    for _, weights in ranks:
        torch.testing.assert_close(weights, [each.detach() for each in model.parameters()], rtol=1e-3, atol=1e-5)
