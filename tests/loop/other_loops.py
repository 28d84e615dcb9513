"""Loops of the page, run as one rank, and what each step has seen."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from adaptive_batching import AdaptiveStep
from tests.loop.test_step import PlainLoop
from tests.support.pages import loops
from tests.support.small_model import make_data, make_model

ENVIRONMENTS = {
    "accelerate": {"ACCELERATE_USE_CPU": "true"},
    "accelerate with FSDP2": {
        "ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "100", "FSDP_RESHARD_AFTER_FORWARD": "true",
    },
    "lightning with DDP": {
        "LT_CLI_USED": "1", "LT_ACCELERATOR": "cpu", "LT_STRATEGY": "ddp", "LT_DEVICES": "2",
    },
}  # fmt: skip
"""What ``accelerate launch`` and ``fabric run`` set."""

NUM_SAMPLES = 37  # of which two ranks have unequal numbers in the end


class Recorded(AdaptiveStep[Any]):
    """Probes before the first step, splits each, and keeps the samples and the loss."""

    steps: ClassVar[list[tuple[list[int], float]]] = []

    def gradients(self, samples: Any, backward: Any = torch.Tensor.backward) -> torch.Tensor:
        if not self.steps:
            found = self.find_maximum_batch_size(samples[0], upper=4)
            assert (found.batch_size, found.search) == (4, "predict"), "real steps and a trace both run"
        self.max_tokens = 60
        loss = super().gradients(samples, backward)
        self.steps.append(([int(sample["number"]) for sample in samples], loss.item()))
        return loss


def collate(samples: Any) -> dict[str, torch.Tensor]:
    return {key: pad_sequence([s[key] for s in samples], batch_first=True) for key in ("tokens", "labels")}


def loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch["labels"]
    return cross_entropy(model(batch["tokens"]).mT, labels, ignore_index=0, reduction="sum"), (labels > 0).sum()


def samples_of_loop() -> Any:
    return [{**sample, "number": torch.tensor(n)} for n, sample in enumerate(make_data(NUM_SAMPLES))]


def plain_loop(clip_norm: float) -> PlainLoop:
    return PlainLoop(make_model(), clip_norm, loss, collate)


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def run(name: str) -> Any:
    """Run a loop in the environment that its launcher makes; return what each step has seen, and the weights."""
    library = name.split()[0]
    os.environ.update(ENVIRONMENTS[name])
    [text] = loops(library)
    model = make_model()
    given: dict[str, Any] = {
        "data": samples_of_loop(), "model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "AdaptiveStep": Recorded, "DataLoader": DataLoader, "collate": collate, "loss": loss,
    }  # fmt: skip
    Recorded.steps = []
    exec(compile(text, name, "exec", dont_inherit=True), given)
    if library == "accelerate":
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # which is that of the process
    return Recorded.steps, [whole(parameter) for parameter in given["model"].parameters()]


def run_loops() -> dict[str, Any]:
    """Run those loops whose libraries are there, one after the other."""
    found = {name: run(name) for name in ENVIRONMENTS if find_spec(name.split()[0]) is not None}
    if dist.is_initialized():
        dist.destroy_process_group()
    return found
