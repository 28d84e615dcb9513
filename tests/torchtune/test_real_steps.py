"""What a trace says of a step, against what a real step takes on the CPU; and a step of two ranks on paper."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed._tools.common_utils import get_untyped_storages

from adaptive_batching._torchtune.host import Host
from adaptive_batching._torchtune.on_paper import Data, on_devices, set_up
from adaptive_batching._torchtune.step import training_step
from adaptive_batching._trace.trace import trace_step
from tests.support.real_memory import most_in_use
from tests.torchtune.test_on_paper import LENGTH, config, real_host, traced

BATCH = 16
LONG, FEW = (LENGTH, BATCH), (8, 2)


def transient_bytes(host: Host, sample: Any = None, batch_size: int = BATCH) -> int:
    """Most bytes that a real step has in use beyond those between steps, as torch's profiler counts them."""
    sample = sample or {"tokens": [1] * LENGTH, "labels": [1] * LENGTH}
    step = training_step(host, sample, accumulates=False)
    run = step.bind(step.model, step.optimizers)
    run(step.make_batch(batch_size))  # creates the optimizer states
    return most_in_use(lambda: run(step.make_batch(batch_size)))  # the batch is in use, too


def predicted_bytes(host: Host, sample: Any = None, batch_size: int = BATCH) -> int:
    sample = sample or {"tokens": [1] * LENGTH, "labels": [1] * LENGTH}
    curve = trace_step(training_step(host, sample, accumulates=False)).curve
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
        sample: dict[str, Any] = {"tokens": [1] * length, "labels": [1] * length}
        found[name] = predicted_bytes(host, sample, batch_size), transient_bytes(host, sample, batch_size)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_real_step_takes_what_is_predicted(case: str, levers: dict[str, tuple[int, int]]) -> None:
    predicted, real = levers[case]
    assert predicted == pytest.approx(real, rel=0.01)


COMPILED = {
    "plain": ("full", [], 0.002),
    "checkpointing": ("full", ["enable_activation_checkpointing=True"], 0.002),
    "bf16": ("full", ["dtype=bf16"], 0.002),
    "lora": ("lora", [], 0.002),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_a_real_step_that_inductor_has_compiled_takes_what_is_predicted(
    case: str, inputs: Path, tmp_path: Path
) -> None:
    kind, overrides, error = COMPILED[case]
    host = real_host(kind, config(kind, "compile=True", *overrides, inputs=inputs, out=tmp_path))
    assert predicted_bytes(host) == pytest.approx(transient_bytes(host), rel=error)


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
        states = [value for o in host.optimizers for state in o.state.values() for value in state.values()]
        tensors = [*host.model.parameters(), *host.model.buffers(), *states]
        storages = {s.data_ptr(): s.nbytes() for tensor in tensors for s in get_untyped_storages(tensor)}
        resting.append((predicted, sum(storages.values())))
    (full, changed), (real_full, real_changed) = zip(*resting, strict=True)
    assert full == real_full
    assert changed == pytest.approx(real_changed, rel=0.01)  # some tensors of NF4 are views of larger ones
    assert changed < 0.8 * full


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for key, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(key, value)
    with on_devices(2):
        yield


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_sharded_step_on_paper_is_that_of_a_rank_to_the_byte(
    kind: str, inputs: Path, tmp_path: Path, one_of_two: None
) -> None:
    """The rank's peer is a process group that is none, so that its numbers are nonsense; its memory is not."""
    overrides = ["adaptive_batching.recover_from_oom=False", "clip_grad_norm=null"]
    module: Any = importlib.import_module(f"recipes.{kind}_finetune_distributed")
    [recipe] = [c for name, c in vars(module).items() if name.endswith("RecipeDistributed")]
    cfg = config(kind, *overrides, inputs=inputs, out=tmp_path)
    with mock.patch.object(module.stock, "init_process_group", lambda *args, **kwargs: None):
        made = recipe(cfg)
        made.setup(cfg)
    on_paper, _ = set_up(f"{kind}_finetune_distributed", config(kind, *overrides), Data(LENGTH, 50), 2)
    ours, real = (traced(each, 1) for each in (on_paper, made._session.host))
    for size in (2, 30):
        assert ours.curve.peak_bytes(size) == real.curve.peak_bytes(size)
        assert ours.at(size).at_peak() == real.at(size).at_peak()
    assert ours.curve.resting_bytes == real.curve.resting_bytes
    assert not torch.distributed.get_rank()
