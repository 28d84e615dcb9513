"""What recovery decides, where the ranks that it would take are not at hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptive_batching.execution import Outcome
from adaptive_batching.microbatch import TokenLimit
from adaptive_batching.torchtune.micro_batches import MicroBatch
from adaptive_batching.torchtune.recovery import Recovery, remedy

PARTS = [MicroBatch([{"tokens": [1] * 8, "labels": [1] * 8}] * 2)]


class OtherRanks:
    """Two ranks, and how often this one waited for the other."""

    size = 2

    def __init__(self) -> None:
        self.waited = 0

    def largest(self, value: float) -> float:
        self.waited += 1
        return value


@pytest.mark.parametrize("collectives", [None, object()])
def test_ranks_that_cannot_tell_each_other_do_not_shrink_alone(collectives: Any) -> None:
    """A rank whose allocator starts over would wait for the others, which do not know."""
    ranks, limit = OtherRanks(), TokenLimit()
    recipe = SimpleNamespace(
        ranks=ranks,
        collectives=collectives,
        settings=SimpleNamespace(recover_from_oom=True),
        batch_dependent_module=lambda: None,
        _device=torch.device("cuda"),
    )
    recovery = Recovery(recipe, limit)
    for _ in range(4):
        recovery.note(PARTS, Outcome([], failed=False, retried=True))
        recovery.step_done()
    assert (ranks.waited > 0, limit.max_tokens is not None) == ((collectives is not None,) * 2)


def test_the_remedy_is_one_that_is_not_used_yet() -> None:
    def of(device: str, checkpointing: bool, offloading: bool) -> str:
        return remedy(
            SimpleNamespace(
                _device=torch.device(device),
                _enable_activation_checkpointing=checkpointing,
                _enable_activation_offloading=offloading,
            )
        )

    assert of("cpu", False, False) == of("cuda", False, False) == "enable_activation_checkpointing=True"
    assert of("cuda", True, False) == "enable_activation_offloading=True"
    assert of("cuda", True, True) == of("cpu", True, False) == "a model with quantized weights, as in QLoRA"
