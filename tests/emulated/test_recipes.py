"""Every recipe on a device, from its probe to its end; memory over many steps, and what they ask of the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import RECIPES, Run, TuneRun, assert_same_weights
from tests.support.device_steps import StepEnd, assert_asks_no_more, in_use, level, noted_steps
from tests.support.overrides import RECOVER, VALIDATE
from tests.support.power_cut import FUNCTION, copying
from tests.support.ppo import ppo_run
from tests.support.records import events
from tests.support.wide import few

ON_DEVICE = ["device=cuda", "dtype=bf16"]
PPO = ["stop_token_ids=[2,3]"]  # with many, torch sorts them, and nothing is sorted here
PROBE = ["use_maximum_batch_size=True", "adaptive_batching.max_batch_size=16"]
# 100 samples: 13 steps of 4 and 6 of 8 in the first epoch, then 6 of 16
GROW = [*ON_DEVICE, *PROBE, *FUNCTION, "adaptive_batching.increase_every=0.5", "dataset.split=train[:100]"]
VALIDATES = {"full", "lora", "kd"}
Start = Callable[..., Run]


@pytest.fixture(params=few([*RECIPES, "ppo"], "full"))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(kind: str, tune_run: TuneRun, inputs: Path, tmp_path: Path) -> Start:
    """``start(*overrides, name=...)``: a run of a recipe of this kind."""
    if kind != "ppo":
        return partial(tune_run, kind)

    def start_ppo(*overrides: str, name: str = "out", cut_off_at: float | None = None) -> Run:
        with copying(tmp_path / name, cut_off_at):
            return ppo_run(inputs, tmp_path / name, *PPO, *overrides)

    return start_ppo


def settings(kind: str) -> list[str]:
    if kind == "ppo":  # 24 prompts: 6 rollouts of 2 and 3 of 4 in the first epoch, 3 of 8 in the second
        few = ["adaptive_batching.max_batch_size=8", "batch_size=2", "num_steps=48", "save_every_n_steps=4"]
        return [*(each for each in GROW if "split" not in each and "max_batch_size" not in each), *few]
    validation = [*VALIDATE, "run_val_every_n_steps=10"] if kind in VALIDATES else []
    return [*GROW, *validation, "save_every_n_steps=4"]


def test_a_recipe_probes_trains_validates_saves_and_goes_on_where_it_was_cut_off(
    kind: str, start: Start, tmp_path: Path
) -> None:
    overrides = settings(kind)
    whole = start(*overrides, name="whole", cut_off_at=1.5)
    whole.copy_when_cut_off(tmp_path / "out")
    [probe] = events(whole, "probe")
    assert probe["search"] == "predict", "the step could be traced"
    sizes = [step["batch_size"] for step in whole.metrics if "val_loss" not in step]
    assert sizes == ([2] * 6 + [4] * 3 + [8] * 3 if kind == "ppo" else [4] * 13 + [8] * 6 + [16] * 6)
    assert [event["step"] for event in events(whole, "validation")] == ([10, 20] if kind in VALIDATES else [])

    resumed = start(*overrides, "resume_from_checkpoint=True")
    [resume] = events(resumed, "resume")
    assert resume["step"] == (8 if kind == "ppo" else 20)
    assert resumed.by_step == whole.by_step
    last = f"step_{12 if kind == 'ppo' else 25}"
    assert_same_weights(resumed.weights_in(last), whole.weights_in(last))


PROBED = ["use_maximum_batch_size=True", "adaptive_batching.max_batch_size=4"]
SPLIT = ["micro_batch_size=2", "adaptive_batching.audit_every=1000"]  # audits wait, and are none of the steps
STEPS = 24


def test_memory_stays_level_and_steps_ask_no_more_of_the_device_than_stocks(kind: str, start: Start) -> None:
    few = [f"dataset.split=train[:{4 * STEPS}]", "epochs=1"] if kind != "ppo" else [f"num_steps={4 * STEPS}"]

    def ends_of(name: str, *fields: str, **options: bool) -> list[StepEnd]:
        before = in_use()
        with noted_steps() as ends:
            start(*ON_DEVICE, *few, "log_peak_memory_stats=False", *fields, name=name, **options)
        assert in_use() == before, "a run in the same process meets the memory that the first one met"
        assert len(ends) == STEPS
        assert level(ends) == (0, 0)
        return ends

    whole, probed = ends_of("whole", *RECOVER), ends_of("probed", *PROBED)
    if kind == "ppo":
        return
    stocks = ends_of("stock", stock=True)
    for ours in (whole, probed, ends_of("in one part", "micro_batch_size=4")):
        assert_asks_no_more(ours, stocks)
    split = ends_of("split", *SPLIT)
    waits = [ends[-1].asked.synchronizations - ends[7].asked.synchronizations for ends in (split, stocks)]
    assert waits[0] <= waits[1]
