"""What a trace says of a step, against what a real step takes on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed._tools.common_utils import get_untyped_storages

from adaptive_batching._torchtune.host import Host
from adaptive_batching._torchtune.on_paper import Data, set_up
from adaptive_batching._torchtune.training_step import training_step
from adaptive_batching._trace.recorder import state_tensors
from adaptive_batching._trace.trace import trace_step
from tests.support.steps import most_in_use
from tests.torchtune.test_on_paper import LENGTH, config, real_host, traced

BATCH = 16
LONG, FEW = (LENGTH, BATCH), (8, 2)


def tokens(length: int) -> dict[str, Any]:
    return {"tokens": [1] * length, "labels": [1] * length}


def transient_bytes(host: Host, sample: Any = None, batch_size: int = BATCH) -> int:
    """Most bytes that a real step has in use beyond those between steps, as torch's profiler counts them."""
    step = training_step(host, sample or tokens(LENGTH), accumulates=False)
    run = step.bind(step.model, step.optimizers)
    run(step.make_batch(batch_size))  # creates the optimizer states
    return most_in_use(lambda: run(step.make_batch(batch_size)))  # the batch is in use, too


def predicted_bytes(host: Host, sample: Any = None, batch_size: int = BATCH) -> int:
    curve = trace_step(training_step(host, sample or tokens(LENGTH), accumulates=False)).curve
    return curve.peak_bytes(batch_size) - curve.resting_bytes


CASES = {
    "plain": ("full", [], LONG),
    "checkpointing": ("full", ["enable_activation_checkpointing=True"], LONG),
    "whole logits": ("full", ["loss._component_=torch.nn.CrossEntropyLoss"], LONG),
    "shorter samples": ("full", [], (LENGTH // 2, BATCH)),
    "lora": ("lora", [], LONG),
    "qlora": ("lora", ["model.quantize_base=True"], LONG),
    "few tokens": ("full", [], FEW),
    "fused optimizer": ("full", ["optimizer.fused=True"], FEW),
    "foreach optimizer": ("full", ["optimizer.foreach=True"], FEW),
    "optimizer in the backward pass": ("full", ["optimizer_in_bwd=True", "clip_grad_norm=null"], FEW),
}  # kind, overrides, and tokens of a sample and samples: of few, the optimizer's step sets the peak
LEVERS = {
    **dict.fromkeys(["checkpointing", "whole logits", "shorter samples", "lora"], "plain"),
    **dict.fromkeys(["fused optimizer", "foreach optimizer", "optimizer in the backward pass"], "few tokens"),
}
"""Each lever, and the case that it is pulled in."""


@pytest.fixture(scope="module")
def levers(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """Predicted and real transient bytes of each case."""
    found = {}
    for name, (kind, overrides, (length, batch_size)) in CASES.items():
        host = real_host(kind, config(kind, *overrides, inputs=inputs, out=tmp_path_factory.mktemp("out")))
        sample = tokens(length)
        found[name] = predicted_bytes(host, sample, batch_size), transient_bytes(host, sample, batch_size)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_real_step_takes_what_is_predicted(case: str, levers: dict[str, tuple[int, int]]) -> None:
    predicted, real = levers[case]
    assert predicted == pytest.approx(real, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "override"),
    [("full", []), ("full", ["enable_activation_checkpointing=True"]), ("full", ["dtype=bf16"]), ("lora", [])],
)
def test_a_real_step_that_inductor_has_compiled_takes_what_is_predicted(
    kind: str, override: list[str], inputs: Path, tmp_path: Path
) -> None:
    host = real_host(kind, config(kind, "compile=True", *override, inputs=inputs, out=tmp_path))
    assert predicted_bytes(host) == pytest.approx(transient_bytes(host), rel=0.002)


@pytest.mark.parametrize("lever", LEVERS)
def test_a_lever_moves_the_prediction_as_it_moves_a_real_step(lever: str, levers: dict[str, tuple[int, int]]) -> None:
    before = levers[LEVERS[lever]]
    moved = [changed - plain for changed, plain in zip(levers[lever], before, strict=True)]
    assert abs(moved[1]) > 0.05 * before[1]
    assert moved[0] == pytest.approx(moved[1], rel=0.05)


@pytest.mark.parametrize("lever", ["lora", "qlora", "optimizer of one state"])
def test_a_lever_moves_what_rests_between_steps_as_it_does_in_a_real_run(
    lever: str, inputs: Path, tmp_path: Path
) -> None:
    momentum = ["optimizer={_component_: torch.optim.SGD, lr: 0.1, momentum: 0.9}"]
    kind, overrides, _ = CASES.get(lever, ("full", momentum, LONG))
    resting = []
    for of_kind, changes in (("full", []), (kind, overrides)):
        host = real_host(of_kind, config(of_kind, *changes, inputs=inputs, out=tmp_path))
        on_paper, _ = set_up(f"{of_kind}_finetune_single_device", config(of_kind, *changes), Data(LENGTH, 50))
        predicted = traced(on_paper, 1).curve.resting_bytes
        transient_bytes(host)  # makes the optimizer states
        tensors = [*host.model.parameters(), *host.model.buffers(), *state_tensors(host.optimizers)]
        storages = {s.data_ptr(): s.nbytes() for tensor in tensors for s in get_untyped_storages(tensor)}
        resting.append((predicted, sum(storages.values())))
    (full, changed), (real_full, real_changed) = zip(*resting, strict=True)
    assert full == real_full
    assert changed == pytest.approx(real_changed, rel=0.01)  # some tensors of NF4 are views of larger ones
    assert changed < 0.8 * full
