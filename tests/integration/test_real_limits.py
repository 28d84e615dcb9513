"""Under a real memory limit: what the probe answers trains and more does not, and a long sample does not end a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import QUICKSTART, ROOT, Run, small_run
from tests.support.environment import TAME_MALLOC
from tests.support.overrides import RECOVER, WIDE

pytestmark = [pytest.mark.wide, pytest.mark.serial]

PROBE = [
    "only_probes=True", "dataset.split=train[:300]", "extra_mib=150", "batch_size=1", "use_maximum_batch_size=True",
    "adaptive_batching.round_to_power_of_two=False", "adaptive_batching.headroom=2MiB",
]  # fmt: skip
TRAIN = [
    "dataset.split=train", "tokenizer.max_seq_len=500", "batch_size=16", "epochs=1", "lr_scheduler.num_warmup_steps=1",
    "optimizer._component_=torch.optim.SGD", *RECOVER,
]  # fmt: skip
PACKED = [
    "dataset.packed=True", "dataset.split=train[:400]", "tokenizer.max_seq_len=256", "batch_size=8", "epochs=1",
    "max_steps_per_epoch=2", "lr_scheduler.num_warmup_steps=1", "optimizer._component_=torch.optim.SGD", *RECOVER,
]  # fmt: skip
RUNS = {
    "full": [*PROBE, "tokenizer.max_seq_len=128"],
    "free": [*TRAIN, "extra_mib=0"],
    "limited": [*TRAIN, "extra_mib=110"],
}
SLOW = {
    "lora, packed": [
        *PROBE, "tokenizer.max_seq_len=256", "dataset.packed=True", "enable_activation_checkpointing=True"
    ],
    "packs, free": [*PACKED, "extra_mib=0"],
    "packs, limited": [*PACKED, "extra_mib=20"],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the runs that are no slow ones, and of what they have printed."""
    return ran(RUNS, inputs, tmp_path_factory.mktemp("limited"))


@pytest.fixture(scope="module")
def slow_folder(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(SLOW, inputs, tmp_path_factory.mktemp("limited_slow"))


def ran(runs: dict[str, list[str]], inputs: Path, folder: Path) -> Path:
    pairs = [pair for pair in json.loads((inputs / "train.json").read_text()) if len(pair["output"]) < 150][:96]
    pairs[40] = {**pairs[40], "output": " ".join(pair["output"] for pair in pairs)}  # split to 500 tokens
    (folder / "train.json").write_text(json.dumps(pairs))
    arguments = {}
    for name, overrides in runs.items():
        config = f"{QUICKSTART}/{'lora' if 'lora' in name else 'full'}_single_device.yaml"
        data = [f"dataset.data_files={folder}/train.json"] if "dataset.split=train" in overrides else []
        common = [*WIDE, "adaptive_batching.memory_limit=null", *data]
        arguments[name] = ["--config", config, *small_run(inputs, folder / name, *common, *overrides)]
    subprocess.run(
        [sys.executable, "-m", "tests.integration.limited_recipe", folder, json.dumps(arguments)], cwd=ROOT,
        env={**os.environ, **TAME_MALLOC, "PYTHONPATH": str(ROOT)}, timeout=600, check=True,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize(
    ("name", "of"), [("full", "folder"), pytest.param("lora, packed", "slow_folder", marks=pytest.mark.slow)]
)
def test_the_answer_trains_and_a_larger_size_runs_out_of_memory(
    name: str, of: str, request: pytest.FixtureRequest
) -> None:
    printed = (request.getfixturevalue(of) / f"{name}.txt").read_text()
    found = re.search("^OUTCOME (.*)$", printed, flags=re.MULTILINE)
    assert found, printed[-4000:]
    outcome = json.loads(found[1])
    assert outcome["reason"] == "memory"
    assert outcome["unchanged"], "weights, optimizer states and random numbers are as before"
    assert outcome["larger_fails"], "a larger one should have run out of memory"
    # Equal steps differ by half a megabyte, so that a sample more may have run to be sure, against what is predicted.
    peaks = dict(outcome["predicted"]) | {m["batch_size"]: m["peak_bytes"] for m in outcome["measurements"]}
    above = next(peak for size, peak in peaks.items() if size > outcome["batch_size"])
    assert above > outcome["budget_bytes"], "a sample more does not fit beside the headroom"
    assert [m["peak_bytes"] for m in outcome["measurements"] if m["peak_bytes"] is None] == [], "nothing ran out"
    assert len({m["batch_size"] for m in outcome["measurements"]}) <= 6, "sizes"
    assert sum(m["steps"] for m in outcome["measurements"]) <= 9
    # Libraries make what they need once, in the first step of a process; beyond that, memory is back where it was.
    assert outcome["left_bytes"] < 64 * 2**20


def test_a_long_sample_does_not_end_the_run_and_every_sample_counts_once(folder: Path) -> None:
    """The limit is that of our field, which holds while training."""
    free, limited = Run(folder / "free"), Run(folder / "limited")
    printed = (folder / "limited.txt").read_text()
    assert "LIMIT AFTER -1" in printed, printed[-4000:]
    assert printed.count("running the step's samples again") >= 1, "the limit was met"
    assert len(limited.metrics) == len(free.metrics) == 6
    for ours, theirs in zip(limited.metrics, free.metrics, strict=True):
        # a sum over the step's tokens: a sample lost or repeated would show
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    for key, weights in free.weights(0).items():
        torch.testing.assert_close(limited.weights(0)[key], weights, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_packs_of_one_length_of_which_few_fit_train_as_without_a_limit(slow_folder: Path) -> None:
    """As in plain loops and Trainer, in ``loop/test_real_memory.py``."""
    free, limited = Run(slow_folder / "packs, free"), Run(slow_folder / "packs, limited")
    printed = (slow_folder / "packs, limited.txt").read_text()
    assert "out of memory with 8 samples" in printed and "out of memory with 4 samples" in printed, printed[-4000:]
    assert [each["loss"] for each in limited.metrics] == pytest.approx(
        [each["loss"] for each in free.metrics], rel=1e-5
    )
    assert len(limited.metrics) == 2
