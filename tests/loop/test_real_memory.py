"""A long sample in the middle of the data, under a real memory limit: a plain loop goes on, and learns the same.

As a program it trains twice from the same start, freely and with 40 MiB that the process may still take, and prints the
losses of both runs, and how often each ran out of memory.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from adaptive_batching import AdaptiveStep, memory_meter
from adaptive_batching._memory.host_limits import status
from tests.conftest import ROOT
from tests.support.alike_samples import trained_alike
from tests.support.environment import TAME_MALLOC
from tests.support.garbage import quicken_collections
from tests.support.small_model import VOCABULARY, Sample, make_data, make_model

ALLOWED = 40 * 2**20


@pytest.mark.serial
def test_a_long_sample_does_not_end_a_plain_loop_and_changes_no_loss() -> None:
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=ROOT, env={**os.environ, **TAME_MALLOC}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    free, limited = json.loads(done.stdout)
    assert free["recoveries"] == 0
    assert limited["recoveries"] >= 1, "the limit was met"
    assert limited["losses"] == pytest.approx(free["losses"], rel=1e-4)


@pytest.mark.wide
@pytest.mark.serial
@pytest.mark.parametrize(
    ("host", "cases"),
    [
        ("loop", [(1, None), (2, None), (3, None), (1, 1), (2, 2), (3, 3)]),
        ("trainer", [(1, None), (2, None), (3, 3)]),
    ],
)
def test_samples_of_one_length_of_which_few_fit_train_as_without_a_limit(
    host: str, cases: list[tuple[int, int | None]]
) -> None:
    """Neither is it a reason to stop that those which show if parts add up do not fit together."""
    expected, found = trained_alike(host, cases)
    assert [tuple(each["case"]) for each in found] == cases
    for each in found:
        assert each["fit"] == [True, False], "so many fit by themselves, and no more"
        assert each["losses"] == pytest.approx(expected, rel=1e-5), each["case"]
        assert (each["recoveries"] > 0) == (each["case"][1] is None), each["case"]


def train(data: list[Sample], *, limited: bool) -> dict[str, Any]:
    def collate(samples: list[Sample]) -> dict[str, torch.Tensor]:
        return {key: pad_sequence([sample[key] for sample in samples], batch_first=True) for key in samples[0]}

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
        return cross_entropy(logits, labels, ignore_index=0, reduction="sum"), (labels > 0).sum()

    model = make_model(width=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = AdaptiveStep(model, optimizer, loss, collate, length=lambda sample: len(sample["tokens"]))
    step(data[1:3])  # makes the optimizer's states, and loads libraries
    memory_meter("cpu").release()
    if limited:
        resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + ALLOWED, -1))
    losses = [step(data[start : start + 16]).item() for start in range(0, len(data), 16)]
    return {"losses": losses, "recoveries": step.num_recoveries}


if __name__ == "__main__":
    quicken_collections()
    data = make_data(64)
    text = torch.randint(1, VOCABULARY, (601,), generator=torch.Generator().manual_seed(1))
    data[40] = {"tokens": text[:-1], "labels": text[1:]}
    print(json.dumps([train(data, limited=False), train(data, limited=True)]))
