"""Micro-batches and recovery within real recipes: the same samples, the same gradients, nothing lost or repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchtune.models.llama2 import llama2, lora_llama2

from adaptive_batching.microbatch import TokenLimit
from tests.conftest import Run, TuneRun

# What the next models do: where they run out of memory, and how often.
plan: dict[str, Any] = {}


def run_out(error: str = "can't allocate memory") -> None:
    plan["times"] -= 1
    raise RuntimeError(f"[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: {error}")


def arm(layer: nn.Module) -> None:
    """Make ``layer`` run out of memory as ``plan`` says: from the ``call``-th forward on, ``times`` times."""

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        plan["calls"] += 1
        plan["now"] = plan["calls"] >= plan["call"] and plan["times"] > 0 and args[0].shape[0] > plan.get("fits", 0)
        if plan["now"] and plan["where"] == "forward":
            run_out()

    def after_forward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if plan["now"] and plan["where"] == "backward":
            output.register_hook(lambda gradient: run_out())

    layer.register_forward_pre_hook(before_forward, with_kwargs=True)
    layer.register_forward_hook(after_forward)


def full_model(**arguments: Any) -> nn.Module:
    model = llama2(**arguments)
    arm(list(model.layers)[plan["layer"]])
    return model


def lora_model(**arguments: Any) -> nn.Module:
    model = lora_llama2(**arguments)
    arm(list(model.layers)[plan["layer"]])
    return model


@pytest.fixture(autouse=True)
def no_plan() -> None:
    plan.clear()
    plan.update(layer=0, call=1, times=0, calls=0, now=False, where="forward")


def assert_close(ours: Run, theirs: Run, epoch: int = 1) -> None:
    """Equal to float rounding: losses, learning rates and weights."""
    assert len(ours.metrics) == len(theirs.metrics)
    for a, b in zip(ours.metrics, theirs.metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-4)
        assert a["lr"] == b["lr"]
    for name, weights in theirs.weights(epoch).items():
        torch.testing.assert_close(ours.weights(epoch)[name], weights, rtol=1e-2, atol=2e-4)


SGD = ["optimizer._component_=torch.optim.SGD", "optimizer.lr=0.1"]  # Adam makes rounding as large as its step


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_micro_batches_train_as_the_whole_batch(kind: str, micro_batch_size: int, tune_run: TuneRun) -> None:
    common = [*SGD, "batch_size=6", "gradient_accumulation_steps=2"]
    whole = tune_run(kind, *common, name="whole")
    cut = tune_run(kind, *common, f"micro_batch_size={micro_batch_size}", name="cut")
    assert cut.metrics != whole.metrics, "rounding tells that the batch was cut"
    assert_close(cut, whole)


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("call", [1, 4])
def test_a_step_that_runs_out_of_memory_is_run_again_in_smaller_parts(
    kind: str, where: str, layer: int, call: int, tune_run: TuneRun, caplog: pytest.LogCaptureFixture
) -> None:
    model = f"model._component_={__name__}.{kind}_model"
    common = [*SGD, model, "gradient_accumulation_steps=2", "epochs=1"]
    plan["layer"] = layer
    undisturbed = tune_run(kind, *common, name="undisturbed")
    plan.update(where=where, call=call, calls=0, times=2)
    recovered = tune_run(kind, *common, name="recovered")
    assert plan["times"] == 0
    assert caplog.text.count("running the step's samples again") == 2
    assert_close(recovered, undisturbed, epoch=0)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_recovery_with_activation_checkpointing(where: str, tune_run: TuneRun) -> None:
    common = [*SGD, f"model._component_={__name__}.full_model", "enable_activation_checkpointing=True", "epochs=1"]
    undisturbed = tune_run("full", *common, name="undisturbed")
    plan.update(where=where, call=3, calls=0, times=1)
    assert_close(tune_run("full", *common, name="recovered"), undisturbed, epoch=0)
    assert plan["times"] == 0


def test_a_recovered_step_equals_the_step_run_at_once_in_the_final_cut(
    tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with dropout: the random state goes back to the beginning of the step."""
    common = [f"model._component_={__name__}.lora_model", "model.lora_dropout=0.2", "dataset.packed=True", "epochs=1"]
    common += ["gradient_accumulation_steps=2", "dataset.split=train[:100]"]
    plan.update(where="backward", call=2, times=1)
    recovered = tune_run("lora", *common, name="recovered")

    class Limited(TokenLimit):
        def __init__(self) -> None:
            super().__init__()
            self.max_tokens = 2 * 64

    plan.update(times=0)
    monkeypatch.setattr("adaptive_batching.torchtune.recovery.TokenLimit", Limited)
    at_once = tune_run("lora", *common, name="at_once")
    assert recovered.metrics == at_once.metrics
    for name, weights in at_once.weights(0).items():
        assert torch.equal(recovered.weights(0)[name], weights), name


def test_every_sample_is_seen_once_though_every_step_runs_out_of_memory(
    tune_run: TuneRun, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is cut, the tokens behind each step's loss are the same."""
    common = [*SGD, f"model._component_={__name__}.full_model", "batch_size=8", "epochs=1"]
    undisturbed = tune_run("full", *common, name="undisturbed")
    plan.update(where="forward", call=1, calls=0, times=10**6, fits=2)
    recovered = tune_run("full", *common, name="recovered")
    assert_close(recovered, undisturbed, epoch=0)
    assert 10**6 - plan["times"] < 20, "the limit is kept from step to step"


def test_a_single_sample_that_does_not_fit_is_named(tune_run: TuneRun) -> None:
    plan.update(times=10**6)
    with pytest.raises(SystemExit, match=r"single sample of \d+ tokens .*tokenizer.max_seq_len below"):
        tune_run("full", f"model._component_={__name__}.full_model")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("adaptive_batching.recover_from_oom=False", "set adaptive_batching.recover_from_oom=True"),
        ("optimizer_in_bwd=True", "Set optimizer_in_bwd=False to recover"),
    ],
)
def test_where_recovery_is_off_the_error_says_what_to_set(setting: str, message: str, tune_run: TuneRun) -> None:
    plan.update(times=1, where="backward")
    with pytest.raises(SystemExit, match=message):
        tune_run("full", f"model._component_={__name__}.full_model", setting, "clip_grad_norm=null")


def test_other_errors_are_not_recovered_from(tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.run_out", lambda: 1 / 0)
    plan.update(times=1)
    with pytest.raises(ZeroDivisionError):
        tune_run("full", f"model._component_={__name__}.full_model")


class OptimizerWithoutMemory(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_out_of_memory_in_the_optimizer_is_fatal_and_says_so(tune_run: TuneRun) -> None:
    with pytest.raises(SystemExit, match=r"in the optimizer's step.*resume from the last checkpoint"):
        tune_run("full", f"optimizer._component_={__name__}.OptimizerWithoutMemory")
