"""Hosts without a recipe, for tests of what works on one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._torchtune.stock.data import SampleLoader
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.losses import NextToken
from adaptive_batching._torchtune.stock.objective import Objective

ALONE = Ranks(alone=True)
OTHER_RANK = Ranks(alone=True)
OTHER_RANK.rank = 1
SAMPLES = [{"tokens": [1] * n, "labels": [1] * n} for n in (5, 9, 3, 7, 4, 8, 6)]


def next_token(**arguments: Any) -> NextToken:
    """Return an objective of plain samples, for whatever does not run a model."""
    defaults: dict[str, Any] = {
        "collate": list, "loss": SimpleNamespace(ignore_index=-100), "activations": torch.no_grad(),
    }  # fmt: skip
    return NextToken(**{**defaults, **arguments})


def loader_of(samples: list[Any], batch_size: int = 2) -> SampleLoader:
    """Return a loader of ``samples`` in random order, as stock's set-up makes it."""
    sampler = StatefulDistributedSampler(samples, num_replicas=1, rank=0, shuffle=True, seed=0)  # type: ignore[arg-type]
    stock = StatefulDataLoader(samples, batch_size=batch_size, sampler=sampler, collate_fn=list, drop_last=True)
    return SampleLoader(stock)


def host(objective: Objective | None = None, samples: list[Any] = SAMPLES, **changes: Any) -> Host:
    """Return a host of a tiny model, with ``changes`` to its fields."""
    model = nn.Linear(2, 2)
    defaults: dict[str, Any] = {
        "name": "Test", "objective": objective or next_token(), "model": model,
        "optimizers": [torch.optim.SGD(model.parameters(), lr=0.1)], "loader": loader_of(samples),
        "device": torch.device("cpu"), "ranks": ALONE,
    }  # fmt: skip
    return Host(**{**defaults, **changes})
