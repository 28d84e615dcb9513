"""The loop that the page shows, where torch is installed and nothing else that the recipes need."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.conftest import ROOT
from tests.support.environment import OF_THE_RECIPES
from tests.support.pages import loops
from tests.support.small_model import make_data, make_model

PRELUDE = f"""
import json, sys
sys.modules.update(dict.fromkeys({OF_THE_RECIPES}))  # as if they were not installed

import torch
from tests.support.small_model import make_data, make_model

data = make_data()
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
print = lambda loss: losses.append(float(loss))
torch.manual_seed(1)
"""
EPILOGUE = """
step(data[:40])
assert step.max_tokens == 64 * 31, step.max_tokens
sys.stdout.write(json.dumps({"losses": losses, "weights": model.out.weight.flatten().tolist()}))
"""


def test_the_loop_of_the_page_runs_with_torch_alone_and_trains_as_a_plain_one() -> None:
    _, whole, in_parts = loops()  # the README's, which has its own data, is run with its other Python
    assert len([line for line in whole.splitlines() if line.strip()]) <= 15, "the loop is short"
    code = "\n".join([PRELUDE, whole, in_parts, EPILOGUE])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)

    data, model = make_data(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []

    def train(samples: list[dict[str, torch.Tensor]]) -> float:
        tokens, labels = (pad_sequence([s[key] for s in samples], batch_first=True) for key in ("tokens", "labels"))
        loss = cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=0)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    dataset: Any = data
    torch.manual_seed(1)
    for batch_size in (4, 8, 16):
        losses += [train(samples) for samples in DataLoader(dataset, batch_size, shuffle=True, collate_fn=list)]
    train(data[:40])
    assert found["losses"] == pytest.approx(losses, rel=1e-4)
    assert isinstance(model.out, nn.Linear)
    torch.testing.assert_close(
        torch.tensor(found["weights"]), model.out.weight.detach().flatten(), rtol=1e-3, atol=1e-5
    )
