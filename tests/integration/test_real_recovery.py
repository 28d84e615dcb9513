"""A long sample in the middle of the data, under a real memory limit: training goes on, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ARCHITECTURE, ROOT, Run
from tests.support.environment import TAME_MALLOC

pytestmark = pytest.mark.serial


def train(inputs: Path, data: Path, output_dir: Path, extra_mib: int, *more: str) -> tuple[Run, str]:
    command = [
        "run", "tests/integration/limited_training.py",
        "--config", "recipes/configs/quickstart/full_single_device.yaml",
        f"data_dir={inputs}", f"output_dir={output_dir}", f"dataset.data_files={data}", "dataset.split=train",
        "tokenizer.max_seq_len=500", "batch_size=16", "epochs=2", f"extra_mib={extra_mib}",
        "optimizer._component_=torch.optim.SGD", "use_maximum_batch_size=False", "batch_increase_function=null",
        "lr_scheduler.num_warmup_steps=1", "adaptive_batching.memory_limit=null", *more,
        *(f"model.{key}={value}" for key, value in ARCHITECTURE.items()),
    ]  # fmt: skip
    code = "from torchtune._cli.tune import main; main()"
    environment = {**os.environ, **TAME_MALLOC, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return Run(output_dir), done.stdout + done.stderr


@pytest.mark.parametrize("limit", ["of the process", "memory_limit"])
def test_a_long_sample_does_not_end_the_run_and_every_sample_counts_once(
    limit: str, inputs: Path, tmp_path: Path
) -> None:
    pairs = [pair for pair in json.loads((inputs / "train.json").read_text()) if len(pair["output"]) < 150][:96]
    pairs[40] = {**pairs[40], "output": " ".join(pair["output"] for pair in pairs)}  # cut to 500 tokens
    data = tmp_path / "train.json"
    data.write_text(json.dumps(pairs))

    free, _ = train(inputs, data, tmp_path / "free", extra_mib=0)
    through_field = ["through_memory_limit=True"] if limit == "memory_limit" else []
    limited, output = train(inputs, data, tmp_path / "limited", 110, *through_field)

    assert ("LIMIT AFTER -1" in output) == (limit == "memory_limit"), "it holds while training"
    assert output.count("running the step's samples again") >= 1, "the limit was met"
    assert len(limited.metrics) == len(free.metrics) == 12
    for ours, theirs in zip(limited.metrics, free.metrics, strict=True):
        # a sum over the step's tokens: a sample lost or repeated would show
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    for name, weights in free.weights(1).items():
        torch.testing.assert_close(limited.weights(1)[name], weights, rtol=1e-3, atol=1e-5)
