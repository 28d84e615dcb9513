"""The model that plans rest on, against PyTorch's own caching allocator."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from adaptive_batching._trace.allocator import KIB, MIB, CachingAllocator

SEEDS = range(4)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_model_of_the_allocator_reserves_what_the_allocator_does_on_several_streams(seed: int) -> None:
    torch.cuda.empty_cache()
    draw, model = random.Random(seed), CachingAllocator()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    held: list[tuple[torch.Tensor, Any]] = []
    sizes = [
        *(512 * n for n in (1, 2, 3)),
        64 * KIB,
        900 * KIB,
        2 * MIB,
        9 * MIB,
        16 * MIB,
        16 * MIB,
        60 * MIB,
        501 * MIB,
    ]
    for _ in range(600):
        if held and draw.random() < 0.48:
            tensor, block = held.pop(draw.randrange(len(held)))
            model.give_back(block)
            del tensor
        else:
            number, size = draw.randrange(3), draw.choice(sizes)
            with torch.cuda.stream(streams[number]):
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            held.append((tensor, model.take(size, number)))
        found = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        assert (model.reserved, model.allocated) == (found[0] - before[0], found[1] - before[1])
