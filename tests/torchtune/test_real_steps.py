"""What a trace says of a step, against what a real step takes on the CPU; and a step of two ranks on paper."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from adaptive_batching.probe.trace import trace_step
from adaptive_batching.torchtune.host import Host
from adaptive_batching.torchtune.on_paper import Data, on_devices, set_up
from adaptive_batching.torchtune.step import training_step
from tests.support.real_memory import most_in_use
from tests.torchtune.test_on_paper import LENGTH, config, real_host, traced

BATCH = 16


def transient_bytes(host: Host) -> int:
    """Most bytes that a real step has in use beyond those between steps, as torch's profiler counts them."""
    sample = {"tokens": [1] * LENGTH, "labels": [1] * LENGTH}
    step = training_step(host, sample, accumulates=False)
    run = step.bind(step.model, step.optimizers)
    run(step.make_batch(BATCH))  # creates the optimizer states
    batch = step.make_batch(BATCH)
    return most_in_use(lambda: run(batch))


def predicted_bytes(host: Host) -> int:
    sample = {"tokens": [1] * LENGTH, "labels": [1] * LENGTH}
    curve = trace_step(training_step(host, sample, accumulates=False)).curve
    return curve.peak_bytes(BATCH) - curve.resting_bytes


@pytest.fixture(scope="module")
def levers(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """Predicted and real transient bytes of each case."""
    cases = {
        "plain": ("full", []),
        "checkpointing": ("full", ["enable_activation_checkpointing=True"]),
        "whole logits": ("full", ["loss._component_=torch.nn.CrossEntropyLoss"]),
        "lora": ("lora", []),
    }
    found = {}
    for name, (kind, overrides) in cases.items():
        host = real_host(kind, config(kind, *overrides, inputs=inputs, out=tmp_path_factory.mktemp("out")))
        found[name] = predicted_bytes(host), transient_bytes(host)
    return found


@pytest.mark.parametrize("case", ["plain", "checkpointing", "whole logits", "lora"])
def test_a_real_step_takes_what_is_predicted(case: str, levers: dict[str, tuple[int, int]]) -> None:
    predicted, real = levers[case]
    assert predicted == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("lever", ["checkpointing", "whole logits", "lora"])
def test_a_lever_moves_the_prediction_as_it_moves_a_real_step(lever: str, levers: dict[str, tuple[int, int]]) -> None:
    moved = [changed - before for changed, before in zip(levers[lever], levers["plain"], strict=True)]
    assert moved[0] == pytest.approx(moved[1], rel=0.05)


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
