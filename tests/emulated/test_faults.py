"""Each allocation of a step runs out of memory in turn: training goes on, or ends in one line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import TuneRun
from tests.emulated.faults import EachAllocationFails, sample_of
from tests.support.overrides import DOUBLE
from tests.support.ppo import ppo_run

ON_CUDA = (
    "device=cuda", "dtype=bf16", "epochs=1", "dataset._component_=tests.emulated.faults.EqualSamples",
    "metric_logger._component_=torchtune.training.metric_logging.StdoutLogger", "~metric_logger.log_dir",
    "log_every_n_steps=1000000",
)  # fmt: skip
VALIDATE = (
    "dataset_val._component_=tests.emulated.faults.EqualSamples", "dataset_val.samples=4", "run_val_every_n_steps=1",
)  # fmt: skip
PREFERENCES = ("dataset._component_=tests.emulated.faults.EqualPreferences",)
SETTINGS = {
    "checkpointing": ("full", ["enable_activation_checkpointing=True"]),
    "offloading": ("full", ["enable_activation_checkpointing=True", "enable_activation_offloading=True"]),
    "auto": ("full", ["micro_batch_size=auto", "adaptive_batching.memory_limit=2GiB"]),
    "cut": ("full", ["micro_batch_size=2", "gradient_accumulation_steps=2"]),
    "accumulation": ("full", ["gradient_accumulation_steps=2"]),
    "validation": ("full", VALIDATE),
    "growth": ("full", [*DOUBLE, "adaptive_batching.max_batch_size=4"]),
    "in_backward": ("full", ["optimizer_in_bwd=True", "clip_grad_norm=null"]),
    "lora": ("lora", ["model.lora_dropout=0.1"]),
    "dpo": ("lora_dpo", PREFERENCES),
    "kd": ("kd", []),
}
import os
STRIDE = int(os.environ.get("STRIDE", 16))

def show(each, out=None):
    with open("/tmp/faults_found.txt", "a") as f:
        print(os.environ["PYTEST_CURRENT_TEST"], len(each.faults), each._reference.allocations, each.before_update, file=f)
        for k, v in Counter((x.recoveries, x.number < each.before_update, x.line) for x in each.faults).items(): print("   ", v, k, file=f)
        seen = set()
        for x in each.faults:
            if x.line and (x.place[-300:]) not in seen:
                seen.add(x.place[-300:])
                print("   at", x.number, x.place[-900:], file=f)


def test_each_allocation_of_a_step_is_survived_or_ends_in_one_line(tune_run: TuneRun) -> None:
    with EachAllocationFails(sample_of(STRIDE)).in_training() as each:
        tune_run("full", *ON_CUDA)
    show(each)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_each_with(tune_run: TuneRun, settings: str) -> None:
    recipe, overrides = SETTINGS[settings]
    with EachAllocationFails(sample_of(STRIDE)).in_training() as each:
        tune_run(recipe, *ON_CUDA, *overrides)
    show(each)


@pytest.mark.slow
def test_ppo(inputs: Path, tmp_path: Path) -> None:
    with EachAllocationFails(sample_of(STRIDE)).in_training() as each:
        ppo_run(inputs, tmp_path / "out", "device=cuda", "dtype=bf16", "num_steps=10000")
    show(each)
