"""PPO through ``tune run``: stock's where no field is set, and the same training however it is cut or broken off."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchtune.models.llama2 import llama2_classifier
from torchtune.modules import KVCache

from adaptive_batching._torchtune.ppo.rollouts import Rollout
from adaptive_batching._torchtune.train import probing
from tests.conftest import assert_same_weights, made_once
from tests.integration.faults import arm, disarm, plan
from tests.support.overrides import DOUBLE, RECOVER
from tests.support.power_cut import FUNCTION
from tests.support.ppo import GENERATED, PPORun, ppo_run
from tests.support.records import events, without_sizes
from tests.support.wide import few, wide

PPO = Callable[..., PPORun]
ONE_STEP = ["num_steps=8", "batch_size=8", "ppo_batch_size=8", "ppo_epochs=1", "forward_batch_size=4"]
LIMIT = "adaptive_batching.memory_limit=8GiB"
FAULTY = [
    "policy_model._component_=tests.integration.faults.full_model",
    f"reward_and_value_model._component_={__name__}.faulty_value_model",
]


def faulty_value_model(**arguments: Any) -> nn.Module:
    """The model of rewards and values, which runs out of memory where a test says."""
    model = llama2_classifier(**arguments)
    if plan.get("of_value"):
        arm(next(iter(model.layers)))
    return model


@pytest.fixture
def run(inputs: Path, tmp_path: Path) -> PPO:
    """``run(*overrides, name=..., stock=...)``: a real run of the recipe."""
    disarm()
    return lambda *overrides, name="out", **arguments: ppo_run(inputs, tmp_path / name, *overrides, **arguments)


@pytest.fixture
def undisturbed(inputs: Path, shared: Path) -> PPO:
    """As ``run``, for what several tests compare with."""

    def of(*overrides: str, **arguments: Any) -> PPORun:
        asked = repr((overrides, sorted(arguments.items())))
        directory = shared / f"ppo_{hashlib.sha1(asked.encode()).hexdigest()}"
        with made_once(directory) as missing:
            return ppo_run(inputs, directory, *overrides, **arguments) if missing else PPORun(directory)

    return of


OFF = {
    "plain": [],
    "two-epochs-in-backward": ["optimizer_in_bwd=True", "dataset.split=train[:14]", "optimizer.lr=1e-3"],
}


@pytest.mark.parametrize("case", few(OFF, "plain"))
def test_off_gives_the_bits_of_the_stock_recipe(case: str, run: PPO) -> None:
    stock = run(*OFF[case], stock=True, name="stock")
    ours = run(*OFF[case], name="ours")
    assert len(stock.metrics) >= 3
    assert ours.metrics == stock.metrics
    last = 1 if "two-epochs" in case else 0
    assert_same_weights(ours.weights(last), stock.weights(last))
    assert not (ours.output_dir / "adaptive_batching").exists()


def updates(run: PPORun, inputs: Path) -> dict[str, torch.Tensor]:
    """The change of each model's weights over a run: with one step of SGD, its gradient."""
    before = {"policy": load_file(inputs / "model" / "model.safetensors")}
    before["value"] = load_file(inputs / "reward" / "model.safetensors")
    names = [(*name.partition(".")[::2], weight) for name, weight in sorted(run.weights(0).items())]
    return {
        model: torch.cat([(weight - before[model][key]).flatten().double() for of, key, weight in names if of == model])
        for model in before
    }


@pytest.mark.parametrize(("size", "backwards"), [wide("1", 1), ("2", 2), ("auto", 1)])
def test_parts_have_the_gradient_of_the_whole_for_policy_and_value_each(
    size: str, backwards: int, run: PPO, undisturbed: PPO, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [*ONE_STEP, f"gradient_accumulation_steps={backwards}"]
    whole = undisturbed(*common, stock=True)
    if size == "auto":
        monkeypatch.setattr(probing.Probed, "capacity", 3)
    split = run(*common, LIMIT, f"micro_batch_size={size}", name="split")
    if size == "auto":
        assert events(split, "rollout")[0]["batch_size"] == 8, "of the whole batch, not of a part"
    assert split.metrics[0]["response_lengths"] == whole.metrics[0]["response_lengths"] < GENERATED - 1, (
        "lengths differ"
    )
    ours, theirs = updates(split, inputs), updates(whole, inputs)
    for model in ("policy", "value"):
        assert not torch.equal(ours[model], theirs[model]), "rounding tells that it was split"
        assert (ours[model] - theirs[model]).norm() < 2e-4 * theirs[model].norm(), model
    assert_close_metrics(split.metrics[:1], whole.metrics[:1], rel=1e-4, abs_=1e-6)


def assert_close_metrics(
    ours: list[dict[str, float]], theirs: list[dict[str, float]], rel: float = 2e-4, abs_: float = 1e-5
) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert {name: mine[name] for name in other} == pytest.approx(other, rel=rel, abs=abs_)


FAULTS: dict[str, dict[str, Any]] = {
    "generating": dict(without_gradients=True, call=4, times=1, fits=1),
    "generating, down to one": dict(without_gradients=True, call=2, times=10**6, fits=1),
    "judging": dict(without_gradients=True, call=5, times=1, of_value=True),
    "learning, backward": dict(call=2, times=1, where="backward"),
    "learning, the value model's backward": dict(call=2, times=1, where="backward", of_value=True),
    "making caches": {},  # those of the first layer are there already, and in the way
}


@pytest.mark.parametrize("fault", few(FAULTS, "generating, down to one", "learning, backward"))
def test_a_run_that_runs_out_of_memory_is_the_undisturbed_run(
    fault: str, run: PPO, undisturbed: PPO, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [*FAULTY, "ppo_batch_size=4", "forward_batch_size=4", "num_steps=12"]
    expected = undisturbed(*common)
    disarm()
    if "down to one" in fault:
        without_trying_out(monkeypatch)
    plan.update(FAULTS[fault])
    if fault == "making caches":
        make = KVCache.__init__
        errors = iter([None, torch.OutOfMemoryError("CUDA out of memory")])

        def make_or_fail(self: KVCache, *arguments: Any, **named: Any) -> None:
            if error := next(errors, None):
                raise error
            make(self, *arguments, **named)

        monkeypatch.setattr(KVCache, "__init__", make_or_fail)
    recovered = run(*common, *RECOVER, name="recovered")
    recoveries = caplog.text.count("running the step's samples again")
    assert recoveries == FAULTS[fault].get("times", 1) - plan["times"] > 0
    metrics = recovered.metrics
    assert metrics[-1].pop("oom_retries") == recoveries
    assert [step["response_lengths"] for step in metrics] == [step["response_lengths"] for step in expected.metrics]
    assert_close_metrics(metrics, expected.metrics)
    for name, weight in expected.weights(0).items():
        torch.testing.assert_close(recovered.weights(0)[name], weight, rtol=1e-3, atol=1e-5)


def without_trying_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the forward of a few samples by which recovery knows that a model can be split: it would fail."""
    monkeypatch.setattr("adaptive_batching._torchtune.ppo.ppo_run.batch_dependent_module", lambda host: None)


def test_a_rollout_runs_again_after_optimizers_have_stepped_in_a_backward_pass(
    run: PPO, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_trying_out(monkeypatch)
    rollouts, stock = [], Rollout.run

    def second_runs_out(self: Any, *args: Any) -> Any:
        rollouts.append(1)
        if len(rollouts) == 2:
            plan.update(without_gradients=True, call=plan["calls"] + 2, times=1, fits=1)
        return stock(self, *args)

    monkeypatch.setattr(Rollout, "run", second_runs_out)
    one = ["ppo_batch_size=4", "forward_batch_size=4", "num_steps=12", "gradient_accumulation_steps=1"]
    run(*FAULTY, *RECOVER, *one, "optimizer_in_bwd=True")
    assert len(rollouts) == 3 and caplog.text.count("(recovery 1)") == 1


@pytest.mark.parametrize("phase", ["rollout", "learning"])
def test_a_trajectory_that_does_not_fit_alone_ends_the_run_in_one_line(
    phase: str, run: PPO, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_trying_out(monkeypatch)
    plan.update(without_gradients=phase == "rollout", times=10**6)
    with pytest.raises(SystemExit, match=r"error: out of memory with 1 sample.*number \d+ of the dataset"):
        run(*FAULTY, *RECOVER)


def test_the_batch_grows_with_its_optimizer_steps_until_the_trajectories_are_used_up(run: PPO) -> None:
    """24 prompts, 60 trajectories: two epochs and a half."""
    grown = run(*DOUBLE, "num_steps=60", "adaptive_batching.max_batch_size=16")
    assert [(e["batch_size"], e["steps"], e["samples"]) for e in events(grown, "epoch")] == [
        (4, 6, 24), (8, 3, 24), (8, 1, 8),
    ]  # fmt: skip
    sizes = [(step["batch_size"], step["ppo_batch_size"]) for step in grown.metrics]
    assert sizes == [(4, 2)] * 6 + [(8, 4)] * 4
    rollouts = [int(line.split()[1]) for line in next((grown.output_dir / "logs").glob("*.txt")).open()]
    assert rollouts == [4 * (n + 1) for n in range(10)], "two optimizer steps, twice, of each rollout"


def test_a_batch_that_takes_less_of_each_epoch_trains_for_more_of_them(run: PPO) -> None:
    """24 prompts, of which a batch of 16 takes 16; 48 trajectories are two epochs of batches of 4."""
    maximum = run("num_steps=48", LIMIT, "use_maximum_batch_size=True", "adaptive_batching.max_batch_size=16")
    assert [(e["batch_size"], e["samples"]) for e in events(maximum, "epoch")] == [(16, 16)] * 3
    assert len(maximum.weights(2)) > 0, "the last checkpoint is that of the last epoch"


def test_the_probe_leaves_no_trace_and_finds_what_has_run(run: PPO, undisturbed: PPO) -> None:
    common = ["forward_batch_size=4", "num_steps=12"]
    stock = undisturbed(*common, stock=True)
    ours = run(*common, LIMIT, "use_maximum_batch_size=True", "adaptive_batching.max_batch_size=4", name="ours")
    [probe], [rollout] = events(ours, "probe"), events(ours, "rollout")
    assert probe["search"] == "predict", "the backward passes could be traced"
    for found, size in ((probe, 2), (rollout, 4)):
        assert found["batch_size"] == size
        assert any(m["batch_size"] == size and m["fits"] for m in found["measurements"])
    assert probe["sequence_length"] == 24 + GENERATED
    assert without_sizes(ours.metrics) == stock.metrics
    assert_same_weights(ours.weights(0), stock.weights(0))


def test_the_maximum_trains_as_stock_does_with_that_batch(run: PPO) -> None:
    """However many rollouts fit at once, the samples drawn are those of forward_batch_size."""
    ours = run(LIMIT, "use_maximum_batch_size=True", name="ours")
    assert [(e["batch_size"], e["steps"]) for e in events(ours, "epoch")] == [(16, 1)]
    assert events(ours, "rollout")[0]["batch_size"] == 16
    stock = run("batch_size=16", "ppo_batch_size=8", name="stock", stock=True)
    assert_close_metrics(ours.metrics[:1], stock.metrics[:1])


def test_a_resumed_run_equals_the_uninterrupted_one(run: PPO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, random orders, samples drawn, and the optimizer of each model; more steps are asked for meanwhile.

    The checkpoint is named as stock has it; ``test_ppo_step_checkpoints.py`` has one that is found.
    """
    common = ["dataset.split=train[:12]", "adaptive_batching.max_batch_size=8", *FUNCTION]
    common += ["optimizer_in_bwd=True", "optimizer._component_=torch.optim.AdamW", "optimizer.lr=1e-3"]
    whole = run(*common, "num_steps=48", name="whole")
    monkeypatch.setattr("tests.support.power_cut.fail_at_epoch", 2)
    with pytest.raises(SystemExit, match="the power"):
        run(*common, "num_steps=30", name="broken")
    monkeypatch.setattr("tests.support.power_cut.fail_at_epoch", None)
    folder = whole.output_dir.parent / "broken"
    named = [
        "checkpointer.checkpoint_files=[epoch_1/model-00001-of-00001.safetensors]",
        f"value_checkpointer.checkpoint_dir={folder}/value/epoch_1",
        "value_checkpointer.checkpoint_files=[model-00001-of-00001.safetensors]",
    ]
    resume = ["resume_from_checkpoint=True", *named]
    resumed = run(*common, "num_steps=48", *resume, name="broken")
    assert [step["batch_size"] for step in whole.metrics] == [4] * 3 + [8] * 4
    assert resumed.metrics == whole.metrics
    assert_same_weights(resumed.weights(4), whole.weights(4))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["micro_batch_size=explore"], "micro_batch_size=explore does not work with PPO"),
        (["micro_batch_size=4", "ppo_batch_size=2"], r"micro_batch_size=4 does not divide the 2 .*: \[1, 2\]"),
        (["use_maximum_batch_size=True", "adaptive_batching.keep_global_batch=True", "gradient_accumulation_steps=2"],
         "keep_global_batch=True does not work with PPO"),
        (["save_every_n_steps=4", "value_checkpointer.output_dir=${output_dir}"],
         "save_every_n_steps=4 would save policy and value model to the same folders"),
        (["dataset_val._component_=torchtune.datasets.text_completion_dataset", "dataset_val.source=json",
          "run_val_every_n_steps=5"],
         "run_val_every_n_steps=5 cannot be used with PPOFullFinetune.*; set run_val_every_n_steps=null"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(overrides: list[str], message: str, run: PPO) -> None:
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        run(*overrides)
