"""What saves memory, in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adaptive_batching._torchtune.stock.less_memory import remedy
from adaptive_batching._torchtune.stock.losses import Distillation
from adaptive_batching._torchtune.stock.objective import StockParts
from tests.support.hosts import host

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "checkpoints", "offloads", "setting"),
    [
        *((device, False, False, "enable_activation_checkpointing=True") for device in ("cpu", "cuda")),
        ("cuda", True, False, "enable_activation_offloading=True"),
        # Elsewhere stock refuses to offload.
        *((device, True, device == "cuda", "a model with quantized weights, as in QLoRA")
          for device in ("cuda", "cpu", "xpu", "mps")),
    ],
)  # fmt: skip
def test_the_remedy_is_one_that_is_not_used_yet(device: str, checkpoints: bool, offloads: bool, setting: str) -> None:
    uses = {"checkpoints_activations": checkpoints, "offloads_activations": offloads}
    found, what_fits = remedy(host(device=torch.device(device), **uses)).split("; ")
    assert found == setting
    assert "'adaptive-batching plan'" in what_fits, "one setting may not be enough"


def test_no_remedy_is_a_key_that_the_recipe_does_not_read() -> None:
    """Distillation does not offload."""
    objective = Distillation(StockParts(None, None, None, 0, frozen=nn.Linear(2, 2), teacher_share=0.5))
    learner = host(objective, device=CUDA, checkpoints_activations=True)
    assert remedy(learner).startswith("a model with quantized weights, as in QLoRA;")
