"""Configs of torchtune's with a model of a billion parameters, on a card of 24 GB, from the probe to the last save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from adaptive_batching._emulated_device import control
from tests.conftest import Run, _main, assert_same_weights
from tests.emulated.test_probe import CONFIGS
from tests.support.power_cut import FUNCTION, copying
from tests.support.records import events

GIB = 2**30
DATA = {"_component_": "tests.emulated.samples.Samples", "samples": 96}
REPLACED = {
    "tokenizer": {"_component_": "tests.emulated.samples.Tokenizer", "max_seq_len": 512},
    "dataset": DATA,
    "dataset_val": {**DATA, "samples": 8},
    "run_val_every_n_steps": 5,
    "use_maximum_batch_size": True,
    "adaptive_batching": {"increase_every": 0.5},
    "gradient_accumulation_steps": 1,
    "batch_size": 4,
    "epochs": 1,
    "seed": 1,
    "save_every_n_steps": 5,
    "log_peak_memory_stats": False,
}


@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.slow)])  # it writes 30 GB
def test_a_config_probes_grows_validates_saves_and_goes_on_where_it_was_cut_off(
    kind: str, llama_1b: Path, tmp_path: Path
) -> None:
    control.set_memory(24 * GIB)
    file = tmp_path / "config.yaml"
    cfg: Any = OmegaConf.load(CONFIGS / "llama3_2" / f"1B_{kind}_single_device.yaml")
    OmegaConf.save(OmegaConf.merge({each: cfg[each] for each in cfg if each not in REPLACED}, REPLACED), file)

    def run(name: str, *overrides: str) -> Run:
        own = [f"output_dir={tmp_path / name}", f"checkpointer.checkpoint_dir={llama_1b}", *overrides]
        own += ["save_adapter_weights_only=True"] if kind == "lora" else []
        recipe = f"recipes/{kind}_finetune_single_device.py"
        _main("run", recipe, "--config", str(file), *own, *FUNCTION)
        return Run(tmp_path / name)

    with copying(tmp_path / "whole", 0.5):
        whole = run("whole")
    whole.copy_when_cut_off(tmp_path / "cut")
    [probe] = events(whole, "probe")
    assert (probe["search"], probe["reason"]) == ("predict", "memory") and probe["batch_size"] >= 8
    sizes = [step["batch_size"] for step in whole.metrics if "val_loss" not in step]
    assert sizes == [4] * 12 + [8] * 6
    assert [event["step"] for event in events(whole, "validation")] == [5, 10, 15]
    resumed = run("cut", "resume_from_checkpoint=True")
    assert [event["step"] for event in events(resumed, "resume")] == [10]
    assert resumed.by_step == whole.by_step
    assert_same_weights(resumed.weights_in("step_18"), whole.weights_in("step_18"))
