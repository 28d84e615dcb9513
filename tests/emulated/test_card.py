"""A card's memory: what a limit and a budget say of it, against PyTorch's own allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._dry_run.device import control
from adaptive_batching._memory.meter import memory_meter
from adaptive_batching._probe.does_not_fit import memory_budget, within_memory_limit

MIB, GIB = 2**20, 2**30


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
