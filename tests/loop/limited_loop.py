"""A plain loop that trains twice from the same start: freely, and with 40 MiB that the process may still take.

Prints the losses of both runs, and how often each ran out of memory.
"""

from __future__ import annotations

import json
import resource
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from adaptive_batching import AdaptiveStep, memory_meter
from adaptive_batching._memory import _status
from tests.support.small_model import VOCABULARY, Sample, make_data, make_model

ALLOWED = 40 * 2**20
BATCH_SIZE = 16


def collate(samples: list[Sample]) -> dict[str, torch.Tensor]:
    return {key: pad_sequence([sample[key] for sample in samples], batch_first=True) for key in samples[0]}


def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    return cross_entropy(logits, labels, ignore_index=0, reduction="sum"), (labels > 0).sum()


def train(data: list[Sample], *, limited: bool) -> dict[str, Any]:
    model = make_model(width=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = AdaptiveStep(model, optimizer, loss, collate, length=lambda sample: len(sample["tokens"]))
    step(data[1:3])  # makes the optimizer's states, and loads libraries
    memory_meter("cpu").release()
    if limited:
        resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + ALLOWED, -1))
    losses = [step(data[start : start + BATCH_SIZE]).item() for start in range(0, len(data), BATCH_SIZE)]
    return {"losses": losses, "recoveries": step.num_recoveries}


def main() -> None:
    data = make_data(64)
    text = torch.randint(1, VOCABULARY, (601,), generator=torch.Generator().manual_seed(1))
    data[40] = {"tokens": text[:-1], "labels": text[1:]}
    print(json.dumps({"free": train(data, limited=False), "limited": train(data, limited=True)}))


if __name__ == "__main__":
    main()
