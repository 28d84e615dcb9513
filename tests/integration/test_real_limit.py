"""The probe's answer under a real out-of-memory limit: it trains, and more does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ARCHITECTURE, ROOT
from tests.support.environment import TAME_MALLOC

pytestmark = pytest.mark.serial

CASES = {
    "full": ("full", "tokenizer.max_seq_len=128"),
    "full-long": ("full", "tokenizer.max_seq_len=400", "loss._component_=torch.nn.CrossEntropyLoss"),
    "full-checkpointing": ("full", "tokenizer.max_seq_len=256", "enable_activation_checkpointing=True"),
    "full-optimizer-in-backward": ("full", "tokenizer.max_seq_len=128", "optimizer_in_bwd=True", "clip_grad_norm=null"),
    "full-packed": ("full", "tokenizer.max_seq_len=256", "dataset.packed=True"),
    "full-accumulation": ("full", "tokenizer.max_seq_len=128", "gradient_accumulation_steps=4"),
    "lora": ("lora", "tokenizer.max_seq_len=256"),
    "qlora": ("lora", "tokenizer.max_seq_len=128", "model.quantize_base=True"),
}


# Longer samples, accumulation and quantised weights change what is probed, and not how: they are left to make test-all.
SLOW = ("full-long", "full-accumulation", "qlora")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES]
)
def test_the_answer_trains_and_a_larger_size_runs_out_of_memory(case: str, inputs: Path, tmp_path: Path) -> None:
    kind, *overrides = CASES[case]
    command = [
        "run", "tests/integration/limited_recipe.py", "--config",
        f"recipes/configs/quickstart/{kind}_single_device.yaml",
        f"data_dir={inputs}", f"output_dir={tmp_path}", "dataset.split=train[:300]", "extra_mib=150", "batch_size=1",
        "use_maximum_batch_size=True", "batch_increase_function=null", "adaptive_batching.round_to_power_of_two=False",
        "adaptive_batching.memory_limit=null", "adaptive_batching.headroom=2MiB",
        *(f"model.{key}={value}" for key, value in ARCHITECTURE.items()), *overrides,
    ]  # fmt: skip
    code = "from torchtune._cli.tune import main; main()"
    environment = {**os.environ, **TAME_MALLOC, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    outcome = json.loads(lines[0].removeprefix("OUTCOME "))

    assert outcome["reason"] == "memory"
    assert outcome["unchanged"], "weights, optimizer states and random numbers are as before"
    assert outcome["larger_fails"], "a larger one should have run out of memory"
    assert outcome["search"] == "predict", "the step could be traced"
    # Equal steps differ by half a megabyte, so that a sample more may have run to be sure, against the prediction.
    peaks = dict(outcome["predicted"]) | {m["batch_size"]: m["peak_bytes"] for m in outcome["measurements"]}
    above = next(peak for size, peak in peaks.items() if size > outcome["batch_size"])
    assert above > outcome["budget_bytes"], "a sample more does not fit beside the headroom"
    assert [m["peak_bytes"] for m in outcome["measurements"] if m["peak_bytes"] is None] == [], "nothing ran out"
    assert len(outcome["measurements"]) <= 4, "sizes"
    # Three as a rule: one that calibrates, and the answer twice. Equal steps differ by half a megabyte, so that its
    # second one may go over, and a sample less is run twice.
    assert sum(m["steps"] for m in outcome["measurements"]) <= 6
    # Libraries make what they need once, in the first step of a process; beyond that, memory is back where it was.
    assert outcome["left_bytes"] < 64 * 2**20
