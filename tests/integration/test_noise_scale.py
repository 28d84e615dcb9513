"""The gradient noise scale, measured within real recipes run through ``tune run``."""

from __future__ import annotations

from typing import Any

import pytest

from adaptive_batching._growth.increase import GrowthState
from adaptive_batching._growth.noise_scale import NoiseEstimate, NoiseScale
from adaptive_batching._torchtune.train.loop import TrainingLoop
from tests.conftest import TuneRun
from tests.integration.faults import disarm, plan
from tests.integration.one_target import NOISE, mean_of, truth
from tests.support.overrides import WIDE
from tests.support.records import events

DATA = {"dataset": {"_component_": "tests.integration.one_target.OneTarget"}}
NEVER = {"batch_increase_function": "tests.integration.test_noise_scale.never"}


def never(epoch: float, current_batch_size: int, state: GrowthState) -> int:
    return 0


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[NoiseEstimate]:
    norms: list[NoiseEstimate] = []
    add = NoiseScale.add

    def noted(self: NoiseScale, each: NoiseEstimate) -> None:
        norms.append(each)
        add(self, each)

    monkeypatch.setattr(NoiseScale, "add", noted)
    return norms


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("full", ["micro_batch_size=3"]),
        pytest.param("full", [], marks=pytest.mark.slow),
        ("full", ["micro_batch_size=auto", "adaptive_batching.memory_limit=8GiB"]),
        pytest.param("lora", ["micro_batch_size=3"], marks=pytest.mark.slow),
    ],
    ids=["parts of three and two", "batches of an accumulation", "by length", "lora"],
)
def test_the_estimate_is_right_on_average(
    kind: str, how: list[str], tune_run: TuneRun, measured: list[NoiseEstimate], monkeypatch: pytest.MonkeyPatch
) -> None:
    truths: list[tuple[float, float]] = []
    run = TrainingLoop.run

    def run_after_asking(self: TrainingLoop) -> None:
        truths.append(truth(self._host))
        run(self)

    monkeypatch.setattr(TrainingLoop, "run", run_after_asking)
    finished = tune_run(kind, *NOISE, *how, *WIDE, "batch_size=5", replaced=DATA)
    assert len(measured) == 60
    assert {(each.tokens, each.samples) for each in measured} == {(10, 10)}
    assert mean_of(measured) == pytest.approx(truths[0], rel=0.05)
    assert "gradient_noise_scale" in finished.metrics[-1]
    assert "gradient_noise_scale" not in finished.metrics[0], "not known yet"
    assert len(events(finished, "noise")) == 60


def test_measuring_changes_no_gradient(tune_run: TuneRun) -> None:
    common = ["batch_size=6", "epochs=1", "dataset.split=train[:120]", "adaptive_batching.max_batch_size=6"]
    plain = tune_run("full", *common, replaced=NEVER, name="plain")
    noisy = tune_run("full", *common, "adaptive_batching.noise_scale_every=2", replaced=NEVER, name="noisy")
    assert [step["loss"] for step in noisy.metrics] == pytest.approx([step["loss"] for step in plain.metrics], rel=1e-4)
    assert [event["step"] for event in events(noisy, "noise")] == list(range(1, 21, 2))


def test_a_step_that_runs_out_of_memory_is_not_measured(tune_run: TuneRun) -> None:
    disarm()
    plan.update(where="backward", layer=0, calls=0, call=5, times=1)  # two forwards in a step
    settings = ["adaptive_batching.max_batch_size=4", "adaptive_batching.noise_scale_every=1", "epochs=1"]
    run = tune_run("full", "model._component_=tests.integration.faults.full_model", *settings, replaced=NEVER)
    disarm()
    steps = [event["step"] for event in events(run, "noise")]
    assert run.metrics[-1]["oom_retries"] == 1
    assert steps[:4] == [1, 2, 4, 5], "what runs instead of the third is sorted by length"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "which adaptive_batching.growth.norm_test needs, .*optimizer_in_bwd=True: a step has one gradient"),
        (NEVER, "which adaptive_batching.noise_scale_every needs"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings: dict[str, Any], message: str, tune_run: TuneRun) -> None:
    function = {"batch_increase_function": {"_component_": "adaptive_batching.growth.norm_test"}, **settings}
    in_backward = ["optimizer_in_bwd=True", "clip_grad_norm=null", "adaptive_batching.max_batch_size=8"]
    with pytest.raises(SystemExit, match=message):
        tune_run("full", *in_backward, "adaptive_batching.noise_scale_every=3", replaced=function)
