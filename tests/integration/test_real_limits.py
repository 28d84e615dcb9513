"""Under a real memory limit: what the probe answers trains and more does not, and a long sample does not end a run."""

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

CASES = [
    pytest.param("full", "tokenizer.max_seq_len=128", id="full"),
    pytest.param("full", "tokenizer.max_seq_len=256 enable_activation_checkpointing=True", id="checkpointing"),
    pytest.param("lora", "tokenizer.max_seq_len=256 dataset.packed=True", id="lora, packed"),
]


def tune(kind: str, inputs: Path, output_dir: Path, *overrides: str) -> str:
    """Run the limited recipe, and return what it prints."""
    command = [
        "run", "tests/integration/limited_recipe.py", "--config",
        f"recipes/configs/quickstart/{kind}_single_device.yaml", f"data_dir={inputs}", f"output_dir={output_dir}",
        "batch_increase_function=null", "adaptive_batching.memory_limit=null",
        *(f"model.{key}={value}" for key, value in ARCHITECTURE.items()), *overrides,
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "from torchtune._cli.tune import main; main()", *command],
        cwd=ROOT, env={**os.environ, **TAME_MALLOC, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize(("kind", "overrides"), CASES)
def test_the_answer_trains_and_a_larger_size_runs_out_of_memory(
    kind: str, overrides: str, inputs: Path, tmp_path: Path
) -> None:
    output = tune(
        kind, inputs, tmp_path, "only_probes=True", "dataset.split=train[:300]", "extra_mib=150", "batch_size=1",
        "use_maximum_batch_size=True", "adaptive_batching.round_to_power_of_two=False",
        "adaptive_batching.headroom=2MiB", *overrides.split(),
    )  # fmt: skip
    line = next(line for line in output.splitlines() if line.startswith("OUTCOME "))
    outcome = json.loads(line.removeprefix("OUTCOME "))
    assert outcome["reason"] == "memory"
    assert outcome["unchanged"], "weights, optimizer states and random numbers are as before"
    assert outcome["larger_fails"], "a larger one should have run out of memory"
    assert outcome["search"] == "predict", "the step could be traced"
    # Equal steps differ by half a megabyte, so that a sample more may have run to be sure, against what is predicted.
    peaks = dict(outcome["predicted"]) | {m["batch_size"]: m["peak_bytes"] for m in outcome["measurements"]}
    above = next(peak for size, peak in peaks.items() if size > outcome["batch_size"])
    assert above > outcome["budget_bytes"], "a sample more does not fit beside the headroom"
    assert [m["peak_bytes"] for m in outcome["measurements"] if m["peak_bytes"] is None] == [], "nothing ran out"
    assert len(outcome["measurements"]) <= 4, "sizes"
    # Three as a rule: one that calibrates, and the answer twice. The second of these may go over by half a megabyte,
    # and then a sample less is run twice.
    assert sum(m["steps"] for m in outcome["measurements"]) <= 6
    # Libraries make what they need once, in the first step of a process; beyond that, memory is back where it was.
    assert outcome["left_bytes"] < 64 * 2**20


def test_a_long_sample_does_not_end_the_run_and_every_sample_counts_once(inputs: Path, tmp_path: Path) -> None:
    """Under a limit of the process, and under that of our field."""
    pairs = [pair for pair in json.loads((inputs / "train.json").read_text()) if len(pair["output"]) < 150][:96]
    pairs[40] = {**pairs[40], "output": " ".join(pair["output"] for pair in pairs)}  # split to 500 tokens
    data = tmp_path / "train.json"
    data.write_text(json.dumps(pairs))
    common = [
        f"dataset.data_files={data}", "dataset.split=train", "tokenizer.max_seq_len=500", "batch_size=16", "epochs=2",
        "optimizer._component_=torch.optim.SGD", "use_maximum_batch_size=False", "lr_scheduler.num_warmup_steps=1",
    ]  # fmt: skip
    tune("full", inputs, tmp_path / "free", *common, "extra_mib=0")
    free = Run(tmp_path / "free")
    for through_field in (False, True):
        folder = tmp_path / f"limited_{through_field}"
        output = tune("full", inputs, folder, *common, "extra_mib=110", f"through_memory_limit={through_field}")
        limited = Run(folder)
        assert ("LIMIT AFTER -1" in output) == through_field, "it holds while training"
        assert output.count("running the step's samples again") >= 1, "the limit was met"
        assert len(limited.metrics) == len(free.metrics) == 12
        for ours, theirs in zip(limited.metrics, free.metrics, strict=True):
            # a sum over the step's tokens: a sample lost or repeated would show
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        for name, weights in free.weights(1).items():
            torch.testing.assert_close(limited.weights(1)[name], weights, rtol=1e-3, atol=1e-5)
