"""Micro-batches and recovery within real recipes: the same samples, the same gradients, nothing lost or repeated."""

from __future__ import annotations

import re
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torchtune.modules import RMSNorm

from adaptive_batching._step.limits import TokenLimit
from tests.conftest import Run, TuneRun, assert_close, assert_same_weights
from tests.integration.faults import disarm, full_model, plan, shapes_of_forwards
from tests.support.overrides import DOUBLE, RECOVER, SGD
from tests.support.records import events, without_sizes
from tests.support.wide import few, wide

FAULTY = "model._component_=tests.integration.faults.full_model"
COUNTING = "model._component_=tests.integration.faults.counting_model"
# Stock does not divide the gradient there: the rate is for sums over some 400 targets.
IN_BACKWARD = [
    "optimizer_in_bwd=True", "clip_grad_norm=null", "optimizer._component_=torch.optim.SGD", "optimizer.lr=2.5e-4",
    "epochs=1",
]  # fmt: skip
DROPOUT = [
    "model._component_=tests.integration.faults.lora_model", "model.lora_dropout=0.2", "dataset.packed=True",
    "epochs=1", "gradient_accumulation_steps=2", "dataset.split=train[:100]",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_plan() -> None:
    disarm()


@pytest.mark.parametrize("packed", few([False, True], False))
def test_cutting_by_length_trains_as_the_whole_batch_with_less_padding(packed: bool, tune_run: TuneRun) -> None:
    common = [
        *SGD, COUNTING, "gradient_accumulation_steps=2", "dataset.split=train[:200]", "epochs=1",
        "tokenizer.max_seq_len=256", f"dataset.packed={packed}", f"batch_size={4 if packed else 16}",
    ]  # fmt: skip
    shapes_of_forwards.clear()
    whole = tune_run("full", *common, name="whole")
    whole_shapes = [*shapes_of_forwards]
    limit = ["adaptive_batching.memory_limit=8GiB", "adaptive_batching.max_batch_size=16"]
    shapes_of_forwards.clear()
    split = tune_run("full", *common, *limit, "micro_batch_size=auto", name="split")
    probe = events(split, "probe")[0]
    trial_steps = sum(measurement["steps"] for measurement in probe["measurements"])
    shapes = shapes_of_forwards[2 * trial_steps :]  # a trial accumulates: two forwards
    assert_close(split, whole, epoch=0)
    budget = (probe["enough"] or probe["batch_size"]) * probe["sequence_length"]
    assert all(rows * length <= budget for rows, length in shapes)
    if packed:
        assert {length for _, length in shapes} == {256}
    else:
        assert sum(length for _, length in shapes) == sum(step["tokens"] for step in events(split, "step"))
        padded = [sum(rows * length for rows, length in each) for each in (whole_shapes, shapes)]
        assert padded[1] < 0.7 * padded[0]


@pytest.mark.parametrize(
    ("setting", "where", "layer", "call", "times"),
    [
        ("gradient_accumulation_steps=2", "hook", 0, 4, 2),
        wide("enable_activation_checkpointing=True", "backward", 0, 3, 1),
    ],
)
def test_a_step_that_runs_out_of_memory_is_run_again_in_smaller_parts(
    setting: str, where: str, layer: int, call: int, times: int, tune_run: TuneRun, baseline: TuneRun,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    common = [*SGD, FAULTY, setting, "epochs=1"]
    undisturbed = baseline("full", *common)
    plan.update(where=where, layer=layer, call=call, calls=0, times=times)
    recovered = tune_run("full", *common, *RECOVER, name="recovered")
    assert plan["times"] == 0
    assert caplog.text.count("running the step's samples again") == times
    assert_close(recovered, undisturbed, epoch=0)


def test_a_recovered_step_equals_the_step_run_at_once_in_the_final_cut(
    tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with dropout: the random state goes back to the beginning of the step."""
    plan.update(where="backward", call=1, times=1)
    recovered = tune_run("lora", *DROPOUT, *RECOVER, name="recovered")
    plan.update(times=0)
    unlimited = TokenLimit.__init__

    def limited(self: TokenLimit, bound: int | None = None) -> None:
        unlimited(self)
        self.learned = 2 * 64

    monkeypatch.setattr(TokenLimit, "__init__", limited)
    at_once = tune_run("lora", *DROPOUT, *RECOVER, name="at_once")
    assert [step["oom_retries"] for step in recovered.metrics] == [1.0] * len(at_once.metrics)
    assert without_sizes(recovered.metrics) == without_sizes(at_once.metrics)
    assert_same_weights(recovered.weights(0), at_once.weights(0))


def test_what_has_fitted_before_runs_again_as_it_was(
    tune_run: TuneRun, baseline: TuneRun, caplog: pytest.LogCaptureFixture
) -> None:
    """Bit for bit stock's run without the error, with dropout; memory was only scattered."""
    undisturbed = baseline("lora", *DROPOUT)
    disarm()
    plan.update(where="backward", call=5, times=1)
    recovered = tune_run("lora", *DROPOUT, *RECOVER, name="recovered")
    assert plan["times"] == 0
    assert recovered.metrics[-1]["oom_retries"] == 1
    assert without_sizes(recovered.metrics)[-1] == undisturbed.metrics[-1]
    assert_same_weights(recovered.weights(0), undisturbed.weights(0))
    assert "running the step's samples again unchanged (recovery 1)" in caplog.text


def test_a_loss_is_as_before_where_samples_run_again(tune_run: TuneRun, baseline: TuneRun) -> None:
    common = [*SGD, FAULTY, "epochs=1", "loss._component_=tests.integration.faults.Counts"]
    undisturbed = baseline("full", *common)
    disarm()
    plan.update(where="backward", call=3, times=1)
    recovered = tune_run("full", *common, *RECOVER, name="recovered")
    assert recovered.metrics[-1]["oom_retries"] == 1
    assert without_sizes(recovered.metrics)[-1] == undisturbed.metrics[-1]


def weights_are_close(ours: Run, theirs: Run) -> None:
    for name, weights in theirs.weights(0).items():
        torch.testing.assert_close(ours.weights(0)[name], weights, rtol=1e-3, atol=1e-5)
    assert [m["loss"] for m in ours.metrics] == pytest.approx([m["loss"] for m in theirs.metrics], rel=1e-4)


@pytest.mark.parametrize("micro_batch_size", few(["3", "auto", "explore"], "3", "auto"))
def test_optimizers_in_backward_step_once_however_a_batch_is_cut(
    micro_batch_size: str, tune_run: TuneRun, baseline: TuneRun
) -> None:
    whole = baseline("full", *IN_BACKWARD, "batch_size=12")
    limit = ["adaptive_batching.memory_limit=8GiB", "tokenizer.max_seq_len=64", "batch_size=12"]
    split = tune_run("full", *IN_BACKWARD, *limit, f"micro_batch_size={micro_batch_size}", name="split")
    weights_are_close(split, whole)
    assert len(split.metrics) == 4, "12 samples in each step"


@pytest.mark.parametrize(
    ("fault", "fields", "recoverable"),
    [
        (dict(where="forward", layer=0, call=2, times=2), RECOVER, True),
        (dict(where="backward", layer=1, call=2), RECOVER, False),  # after the output layer's update
        (dict(where="backward", layer=1, call=3), ["micro_batch_size=2"], True),  # in the first part of two
        (dict(where="hook", layer=0, call=4), ["micro_batch_size=2"], False),
        (dict(where="forward", layer=0, call=4, fits=1), ["micro_batch_size=2"], True),
    ],
)
def test_with_optimizers_in_backward_a_step_runs_again_until_a_parameter_is_updated(
    fault: dict[str, Any], fields: list[str], recoverable: bool, tune_run: TuneRun, baseline: TuneRun,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    common = [*IN_BACKWARD, FAULTY]
    whole = baseline("full", *common)
    disarm()
    plan.update({"times": 1, **fault})
    if not recoverable:
        with pytest.raises(SystemExit, match=r"had updated parameters.*resume from the last checkpoint"):
            tune_run("full", *common, *fields)
        return
    weights_are_close(tune_run("full", *common, *fields), whole)
    assert plan["times"] == 0
    assert re.search(r"unchanged|which holds \d+ MiB of gradients until the last", caplog.text)


class OptimizerWithoutMemory(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("fault", "settings", "message"),
    [
        ({"times": 10**6}, [FAULTY, *RECOVER],
         r"1 sample of up to \d+ tokens, which cannot be split: number \d+ .*max_seq_len below"),
        ({"times": 1}, [FAULTY, "save_every_n_steps=5", "adaptive_batching.recover_from_oom=False"],
         r"in a forward or backward pass of 4 samples of up to .*set adaptive_batching.recover_from_oom=True"),
        ({}, [f"optimizer._component_={__name__}.OptimizerWithoutMemory", *RECOVER],
         r"in the optimizer's step.*resume from the last checkpoint"),
    ],
)  # fmt: skip
def test_where_smaller_parts_are_no_way_out_the_error_says_what_to_do(
    fault: dict[str, Any], settings: list[str], message: str, tune_run: TuneRun
) -> None:
    plan.update(fault)
    with pytest.raises(SystemExit, match=message):
        tune_run("full", *settings)


class NormalisedOverTheBatch(RMSNorm):
    """A norm that takes its mean over samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = super().forward(x)
        return normed - normed.mean(dim=0)


def batch_dependent_model(**arguments: Any) -> nn.Module:
    model = full_model(**arguments)
    assert isinstance(model.layers, nn.ModuleList)
    model.layers[1].mlp_norm = NormalisedOverTheBatch(arguments["embed_dim"])
    return model


DEPENDENT = f"model._component_={__name__}.batch_dependent_model"


def test_a_model_that_computes_over_the_batch_is_not_cut(tune_run: TuneRun) -> None:
    with pytest.raises(SystemExit, match="the gradient of a batch in two parts is "):
        tune_run("full", DEPENDENT, "epochs=1", "micro_batch_size=auto", "adaptive_batching.memory_limit=8GiB")


def test_a_model_that_computes_over_the_batch_trains_whole_and_is_not_recovered(tune_run: TuneRun) -> None:
    common = [DEPENDENT, "epochs=1", *RECOVER]
    assert len(tune_run("full", *common, name="whole").metrics) == 12
    plan.update(times=2, call=plan["calls"] + 3)
    with pytest.raises(SystemExit, match="the gradient of a batch in two parts is "):
        tune_run("full", *common, name="broken")


def test_an_allocator_that_starts_over_in_every_step_makes_micro_batches_smaller(
    tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the step, which stands."""
    retries = count(1)
    common = [*SGD, COUNTING, "epochs=1", "dataset.packed=True"]
    undisturbed = tune_run("full", *common, name="undisturbed")
    rising = "adaptive_batching._torchtune.train.recipe_work.counted"
    monkeypatch.setattr(rising, lambda device, name: next(retries))
    shapes_of_forwards.clear()
    shrunk = tune_run("full", *common, *DOUBLE, "adaptive_batching.max_batch_size=4", name="shrunk")
    # An eighth less than 4 packs is 3, of which a batch of 4 needs two forwards, and these are even.
    assert [rows for rows, _ in shapes_of_forwards[:12]] == [4, 4, 4, 2, 2, 2, 2, 2, 2, 1, 1, 1]
    assert "num_alloc_retries" in caplog.text
    assert_close(shrunk, undisturbed, epoch=0)
    assert {step["oom_retries"] for step in shrunk.metrics} == {0.0}
