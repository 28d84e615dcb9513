"""The loop that the page shows, where torch is installed and nothing else that the recipes need."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.conftest import ROOT
from tests.loop.other_loops import plain_loop
from tests.support.environment import OF_THE_RECIPES
from tests.support.pages import loops
from tests.support.small_model import make_data

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
assert step.max_tokens == 70 * 31, step.max_tokens
sys.stdout.write(json.dumps({"losses": losses, "weights": model.out.weight.flatten().tolist()}))
"""


def test_the_loop_of_the_page_runs_with_torch_alone_and_trains_as_a_plain_one() -> None:
    _, whole, in_parts = loops()  # the README's, which has its own data, is run with its other Python
    assert len([line for line in whole.splitlines() if line.strip()]) <= 15, "the loop is short"
    code = "\n".join([PRELUDE, whole, in_parts, EPILOGUE])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)

    data: Any = make_data()
    plain = plain_loop(torch.inf)
    torch.manual_seed(1)
    losses = [
        plain.step(samples).item()
        for batch_size in (4, 8, 16)
        for samples in DataLoader(data, batch_size, shuffle=True, collate_fn=list)
    ]
    plain.step(data[:40])
    assert found["losses"] == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(
        torch.tensor(found["weights"]), plain.model.state_dict()["out.weight"].flatten(), rtol=1e-3, atol=1e-5
    )
