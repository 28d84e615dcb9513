"""Increase functions within a real recipe run through ``tune run``: planned, run and resumed.

One that asks for nothing that only a run knows stands for all such; ``tests/growth`` has the others.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from adaptive_batching._torchtune.stock.data import index_of
from adaptive_batching._torchtune.train.run import TrainingLoop
from tests.conftest import TuneRun, assert_same_weights
from tests.support.lr_schedules import SCHEDULES
from tests.support.overrides import VALIDATE
from tests.support.records import events
from tests.support.wide import few

FUNCTIONS: dict[str, dict[str, Any]] = {
    "step": {"every": 0.5},
    "replace_lr_decay": {},
    "on_plateau of val_loss": {"patience": 1, "min_delta": 0.1, "metric": "val_loss"},
}
COMMON = [
    "adaptive_batching.increase_every=0.5",
    "adaptive_batching.lr_scaling=sqrt",
    "adaptive_batching.max_batch_size=16",
    "dataset.split=train[:72]",
    "epochs=3",
]
# It falls where the run is resumed, after 18 of 54 steps, and is to do so once.
REPLACED = {"lr_scheduler": {**(SCHEDULES["stepwise"] or {}), "steps": 18}}


@pytest.mark.parametrize("name", few(FUNCTIONS, "on_plateau of val_loss"))
def test_a_resumed_run_equals_the_uninterrupted_one(
    name: str, tune_run: TuneRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = {"_component_": f"adaptive_batching.growth.{name.split()[0]}", **FUNCTIONS[name]}
    replaced = {**REPLACED, "batch_increase_function": function}
    common = [*COMMON, *VALIDATE, "run_val_every_n_steps=4"] if "val_loss" in name else COMMON
    run_epoch = TrainingLoop._run_epoch

    def interrupted(self: TrainingLoop, epoch: int) -> None:
        if epoch == 1:  # what is on the disk if the power goes out here
            shutil.copytree(tmp_path / "whole", tmp_path / "part")
        run_epoch(self, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_run_epoch", interrupted)
        whole = tune_run("full", *common, replaced=replaced, name="whole")
    files = "checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.safetensors]"
    part = tune_run("full", *common, "resume_from_checkpoint=True", files, replaced=replaced, name="part")

    assert part.metrics == whole.metrics
    assert_same_weights(part.weights(2), whole.weights(2))
    sizes = [step["batch_size"] for step in whole.metrics if "val_loss" not in step]
    assert sizes[-1] > 4, "the batch has grown"
    plan = events(whole, "plan")[0]
    if plan["decided"]:
        for epoch in plan["epochs"]:
            steps = [step for step in events(whole, "step") if step["epoch"] == epoch["epoch"]]
            assert len(steps) == epoch["steps"]
            assert sum(step["samples"] for step in steps) == epoch["samples"] == 72 - epoch["dropped_samples"]
            assert steps[-1]["lr"] == pytest.approx(epoch["last_lr"])
    else:
        assert name == "on_plateau of val_loss"


def test_growth_within_an_epoch_sees_every_sample_once(tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    run_window = TrainingLoop._run_window

    def noted(self: TrainingLoop, *arguments: Any) -> Any:
        done = run_window(self, *arguments)
        seen.extend(index_of(sample) for batch in self._window for sample in batch)
        return done

    monkeypatch.setattr(TrainingLoop, "_run_window", noted)
    function = {"batch_increase_function": {"_component_": "adaptive_batching.growth.step", "every": 0.5}}
    every = "adaptive_batching.increase_every=0.25"
    run = tune_run("full", *COMMON[1:3], every, "dataset.split=train[:112]", "epochs=2", replaced=function)
    assert [step["batch_size"] for step in run.metrics] == [4] * 14 + [8] * 7 + [16] * 7
    assert [(change["epoch"], change["batch_size"]) for change in events(run, "change")] == [(0.5, 8)]
    assert sorted(seen[:112]) == sorted(seen[112:]) == list(range(112))
