"""Graphs that are compiled, and their sizes. No code is generated: graphs are captured and run as they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptive_batching._torchtune.train.run import TrainingLoop
from tests.conftest import QUICKSTART, ROOT, Run, TuneRun, assert_close, small_run
from tests.support.records import events

# Samples that each layer was compiled for, in order, as a number or "any".
compiled: list[int | str] = []


def capture(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    values = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    for each in values:
        if isinstance(each, torch.Tensor) and each.dim() == 3 and each.dtype.is_floating_point:  # [b, s, d]
            compiled.append(each.shape[0] if isinstance(each.shape[0], int) else "any")
            break
    return graph.forward


torch._dynamo.register_backend(capture, name="capture")
COMMON = ["compile=True", "epochs=1", "dataset.split=train[:64]", "dataset.packed=True", "tokenizer.max_seq_len=64"]


@pytest.fixture
def in_training(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of graphs that had been compiled when each training began."""
    began: list[int] = []
    run = TrainingLoop.run

    def begin(loop: TrainingLoop) -> None:
        began.append(len(compiled))
        run(loop)

    monkeypatch.setattr(TrainingLoop, "run", begin)
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "capture")
    compiled.clear()
    return began


@pytest.mark.wide
def test_nothing_of_the_probe_remains_in_the_compiled_code(tune_run: TuneRun, in_training: list[int]) -> None:
    """Packs have one length: but for the probe nothing would make a size vary."""
    exact = ["use_maximum_batch_size=True", "adaptive_batching.max_batch_size=6"]
    exact += ["adaptive_batching.search=binary_search", "adaptive_batching.round_to_power_of_two=False"]
    probed = tune_run("full", *COMMON, *exact, name="probed")
    [probe] = events(probed, "probe")
    assert (probe["batch_size"], len(probe["measurements"])) == (6, 5)
    ours, before = compiled[in_training[0] :], compiled[: in_training[0]]
    assert "any" not in before and set(before) == {1, 2, 4, 5, 6}, "each size is measured as it would train"
    compiled.clear()
    tune_run("full", *COMMON, "batch_size=6", name="stock", stock=True)
    assert ours == compiled == [6] * len(ours) and ours


@pytest.mark.wide
def test_where_sizes_vary_one_compilation_serves_them(tune_run: TuneRun, in_training: list[int]) -> None:
    grows = [*GROW, "adaptive_batching.max_batch_size=8"]
    common = [each for each in COMMON if not re.search("packed|epochs|max_seq_len", each)]
    # Of 64 tokens sizes could be taken for that of the model.
    run = tune_run("full", *common, *grows, "tokenizer.max_seq_len=60", "batch_size=2", "epochs=4", name="grows")
    assert sorted({int(step["batch_size"]) for step in run.metrics}) == [2, 3, 4, 5]
    assert compiled[in_training[0] :] == ["any"]


def adds_one() -> Callable[[int, int], int]:
    return lambda epoch, current_batch_size: 1 if epoch else 0


GROW = ["batch_increase_function._component_=tests.integration.test_compile.adds_one", "~batch_increase_function.every"]


def test_a_compiled_run_trains_as_one_that_is_not(tune_run: TuneRun, in_training: list[int]) -> None:
    split = ["micro_batch_size=auto", "batch_size=16", "optimizer._component_=torch.optim.SGD", "optimizer.lr=0.1"]
    common = [each for each in COMMON if "packed" not in each and "compile" not in each]
    eager = tune_run("full", *common, *split, "adaptive_batching.memory_limit=8GiB", name="eager")
    run = tune_run("full", *common, *split, "adaptive_batching.memory_limit=8GiB", "compile=True", name="compiled")
    assert_close(run, eager, epoch=0)
    tokens = {step["padded_tokens"] for step in events(run, "step")}
    assert len(tokens) > 3 >= len(compiled) - in_training[-1], "what is around attention serves rows of any length"


@pytest.mark.slow
def test_packed_data_under_flex_attention_are_traced_and_keep_to_few_sizes(
    inputs: Path, tmp_path: Path, tune_run: TuneRun
) -> None:
    """torchtune takes it for packed data on CUDA alone; without one a process has to be told that it is there."""
    common = [
        "dataset.split=train[:24]", "dataset.packed=True", "optimizer._component_=torch.optim.SGD", "optimizer.lr=0.1",
    ]  # fmt: skip
    ways = {
        "grows": [*common, *GROW, "batch_size=1", "epochs=9"],
        "split": [*common, "micro_batch_size=2", "batch_size=6", "epochs=1"],
    }
    run = ["run", "recipes/full_finetune_single_device.py", "--config", f"{QUICKSTART}/full_single_device.yaml"]
    runs = [[*run, *small_run(inputs, tmp_path / f"{name}_flex", *way)] for name, way in ways.items()]
    done = subprocess.run(
        [sys.executable, "tests/integration/flex_attention.py", json.dumps(runs)], cwd=ROOT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, check=False, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert "cannot be traced" not in done.stdout
    for compiled in json.loads(done.stdout.strip().splitlines()[-1]):
        assert 1 <= compiled <= 7, "of nine sizes, or of the parts of seven packs"
    for name, last in {"grows": 8, "split": 0}.items():
        flex = Run(tmp_path / f"{name}_flex")
        assert len(events(flex, "probe")) == (name == "grows")
        assert_close(flex, tune_run("full", *ways[name], name=f"{name}_dense"), epoch=last)
