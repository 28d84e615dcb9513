"""Faults in each allocation of a step in turn: training goes on, or ends in one line, and never hangs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from adaptive_batching import AdaptiveStep
from adaptive_batching._dry_run.device import control
from adaptive_batching._torchtune.cli.dry_run import load_zeros
from adaptive_batching._torchtune.stock.data import index_of
from adaptive_batching._torchtune.train.recipe import AdaptiveBatching
from adaptive_batching._torchtune.train.run import TrainingLoop
from tests.conftest import ROOT, TuneRun, _main
from tests.emulated.faults import ON_CUDA, EachAllocationFails, Finished, Reruns, sample_of
from tests.emulated.test_probe import CONFIGS
from tests.support.overrides import DOUBLE, RECOVER
from tests.support.ppo import ppo_run

IN_UPDATE = "error: out of memory in the optimizer's step, which may have updated only some parameters"
OUTSIDE = "error: out of memory outside a forward or backward pass, where nothing can run again"
UPDATED = "error: out of memory in a forward or backward pass of 4 samples of up to 16 tokens, after its backward"
VALIDATE = [
    "dataset_val._component_=tests.emulated.samples.Samples", "dataset_val.samples=4", "run_val_every_n_steps=1",
]  # fmt: skip
CHECKPOINTING = ["enable_activation_checkpointing=True"]
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "checkpointing": ("full", CHECKPOINTING),
    "offloading": ("full", [*CHECKPOINTING, "enable_activation_offloading=True"]),
    "auto": (
        "full",
        ["micro_batch_size=auto", "adaptive_batching.memory_limit=2GiB", "adaptive_batching.audit_every=100000"],
    ),
    "split": ("full", ["micro_batch_size=2"]),
    "accumulation": ("full", ["gradient_accumulation_steps=2"]),
    "validation": ("full", VALIDATE),
    "growth": ("full", [*DOUBLE, "adaptive_batching.max_batch_size=4"]),
    "lora": ("lora", ["model.lora_dropout=0.1"]),
    "dpo": ("lora_dpo", ["dataset._component_=tests.emulated.samples.Preferences"]),
    "kd": ("kd", []),
}


def assert_survived(each: EachAllocationFails) -> None:
    """All of a forward and backward has run again, once, and what came after it has, or would have ended in a line."""
    for fault in each.faults:
        if fault.number < each.before_update or not fault.line:
            assert (fault.recoveries, fault.line) == (1, ""), fault
        else:
            assert fault.line.startswith((IN_UPDATE, OUTSIDE)) and "\n" not in fault.line, fault
    assert any(fault.number < each.before_update for fault in each.faults)


def test_each_allocation_of_a_step_is_survived_or_ends_in_one_line(tune_run: TuneRun) -> None:
    with EachAllocationFails().in_training() as each:
        tune_run("full", *ON_CUDA)
    assert_survived(each)
    assert [fault.number for fault in each.faults] == list(range(len(each.faults)))
    assert len(each.faults) > each.before_update > 300


@pytest.mark.parametrize(
    ("settings", "most"),
    [("offloading", 12), ("auto", 12), *(pytest.param(each, 80, marks=pytest.mark.slow) for each in SETTINGS)],
)
def test_so_it_is_in_other_recipes_and_with_settings(tune_run: TuneRun, settings: str, most: int) -> None:
    recipe, overrides = SETTINGS[settings]
    with EachAllocationFails(sample_of(most)).in_training() as each:
        tune_run(recipe, *ON_CUDA, *overrides)
    assert_survived(each)


@pytest.mark.slow
def test_optimizers_in_the_backward_pass_end_in_a_line_once_they_have_updated_a_parameter(tune_run: TuneRun) -> None:
    with EachAllocationFails(sample_of(80)).in_training() as each:
        tune_run("full", *ON_CUDA, "optimizer_in_bwd=True", "clip_grad_norm=null")
    in_forward = [fault.recoveries == 1 and not fault.line for fault in each.faults]
    first = in_forward.index(False)
    assert first > 10 and not any(in_forward[first:])
    assert all(fault.line.startswith((UPDATED, OUTSIDE)) for fault in each.faults[first:])


@pytest.mark.slow
def test_so_it_is_in_ppo(inputs: Path, tmp_path: Path) -> None:
    few = ["num_steps=4096", "dataset.split=train", "stop_token_ids=[2,3]"]
    with EachAllocationFails(sample_of(80), repeats=False).in_training() as each:
        ppo_run(inputs, tmp_path / "out", "device=cuda", "dtype=bf16", *few, *RECOVER)
    for fault in each.faults:
        in_line = fault.line.startswith((IN_UPDATE, OUTSIDE)) and "\n" not in fault.line
        assert in_line if fault.line else fault.recoveries == 1, fault
    assert sum(not fault.line for fault in each.faults) > 40


def test_so_it_is_in_a_loop_of_ones_own() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch).square().sum(), len(batch)

    optimizer = torch.optim.AdamW(model.parameters())
    step: AdaptiveStep[torch.Tensor] = AdaptiveStep(model, optimizer, loss, max_grad_norm=1.0)
    step._runner._audit._next = 10**9  # type: ignore[union-attr] # which no number shows here
    samples = [torch.ones(64) for _ in range(8)]
    each = EachAllocationFails()
    with each.watched(), contextlib.suppress(Finished):
        while True:
            each.step(lambda: step(samples), lambda: optimizer.zero_grad())
    assert step.num_recoveries == sum(fault.recoveries for fault in each.faults)
    survived = [fault.recoveries == 1 and not fault.line for fault in each.faults]
    first = survived.index(False)
    assert first > 15 and not any(survived[first:]), [fault.line for fault in each.faults]
    assert all(fault.line.startswith((IN_UPDATE, OUTSIDE)) for fault in each.faults[first:])


@pytest.mark.slow
def test_so_it_is_in_a_model_of_a_billion_parameters(inputs: Path, tmp_path: Path) -> None:
    cfg: Any = OmegaConf.load(CONFIGS / "llama3_2" / "1B_full_single_device.yaml")
    cfg.output_dir = str(tmp_path / "out")
    load_zeros(cfg, AdaptiveBatching.loads, tmp_path / "zeros")
    cfg.tokenizer = {"_component_": "torchtune.models.llama2.llama2_tokenizer", "path": f"{inputs}/tokenizer.model"}
    cfg.dataset = {"_component_": "tests.emulated.samples.Samples", "tokens": 512}
    cfg.metric_logger = {"_component_": "torchtune.training.metric_logging.StdoutLogger"}
    cfg.update(optimizer_in_bwd=False, optimizer={"_component_": "torch.optim.AdamW", "lr": 1e-5, "fused": True})
    cfg.update(gradient_accumulation_steps=1, log_every_n_steps=10**6, clip_grad_norm=1.0, max_steps_per_epoch=None)
    cfg.adaptive_batching = {"recover_from_oom": True}
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    with EachAllocationFails(sample_of(200)).in_training() as each:
        _main("run", "recipes/full_finetune_single_device.py", "--config", str(tmp_path / "config.yaml"))
    assert_survived(each)
    assert len(each.faults) == 200


@pytest.mark.parametrize("after", [0, 10])
def test_a_run_whose_update_runs_out_of_memory_ends_in_one_line(tune_run: TuneRun, after: int) -> None:
    with watched(before_update={3: lambda: control.fail_allocations(after)}), pytest.raises(SystemExit) as end:
        tune_run("full", *ON_CUDA)
    assert str(end.value).startswith(IN_UPDATE) and "\n" not in str(end.value)


class Watched:
    """Outcome of a run."""

    def __init__(self) -> None:
        self.samples: list[int | None] = []
        self.tokens: list[float] = []
        self.reruns = Reruns()


Calls = dict[int, Callable[[], None]]


@contextlib.contextmanager
def watched(before: Calls | None = None, before_update: Calls | None = None) -> Iterator[Watched]:
    """Watch a recipe that trains inside, and call functions before steps, or their updates, by number from 0."""
    run_window, finish_step, found = TrainingLoop._run_window, TrainingLoop._finish_step, Watched()
    log = logging.getLogger("adaptive_batching")

    def window_of(loop: TrainingLoop, *arguments: Any) -> Any:
        (before or {}).get(loop.training.global_step, lambda: None)()
        return run_window(loop, *arguments)

    def finish(loop: TrainingLoop, epoch: int, progress: Any, done: Any) -> None:
        found.samples += [index_of(sample) for batch in loop._window for sample in batch]
        found.tokens.append(sum(float(sums.tokens) for _, sums in done))
        (before_update or {}).get(loop.training.global_step, lambda: None)()
        finish_step(loop, epoch, progress, done)

    log.addHandler(found.reruns)
    try:
        with mock.patch.multiple(TrainingLoop, _run_window=window_of, _finish_step=finish):
            yield found
    finally:
        log.removeHandler(found.reruns)
        control.end_faults()


STEPS = ["max_steps_per_epoch=8", "batch_size=16", "dataset.tokens=256"]


@pytest.mark.parametrize(("share", "goes_on"), [(0.6, True), (0.0, False)])
def test_memory_that_a_neighbour_takes_leaves_smaller_parts_or_ends_the_run_in_one_line(
    tune_run: TuneRun, share: float, goes_on: bool
) -> None:
    def measure() -> None:
        torch.cuda.empty_cache()
        measured.append(torch.cuda.memory_reserved())
        torch.cuda.reset_peak_memory_stats()

    def take() -> None:
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        control.set_neighbour(free - int(share * (peak - measured[0])))

    measured: list[int] = []
    ends = contextlib.nullcontext() if goes_on else pytest.raises(SystemExit, match=r"\Aerror: out of memory.*\Z")
    with watched({3: measure, 4: take}) as found, ends:
        tune_run("full", *ON_CUDA, *STEPS)
    if goes_on:
        assert found.reruns.number >= 1 and len(set(found.tokens)) == 1
        assert len(found.tokens) == 8 and len(set(found.samples)) == 8 * 16


@pytest.mark.parametrize("launches", [0, 37, 150, 400, 600])
@pytest.mark.parametrize("error", [control.LAUNCH_FAILURE, control.ILLEGAL_ADDRESS])
def test_a_device_that_is_lost_ends_the_run_and_nothing_runs_again(
    tune_run: TuneRun, launches: int, error: int
) -> None:
    said = {control.LAUNCH_FAILURE: "unspecified launch failure", control.ILLEGAL_ADDRESS: "illegal memory access"}
    ended = {3: lambda: control.end_device(launches, error)}
    with watched(ended) as found, pytest.raises(RuntimeError, match=f"{said[error]}|CUBLAS_STATUS"):
        tune_run("full", *ON_CUDA)
    assert found.reruns.number == 0 and len(found.tokens) <= 4


def on_two_ranks(inputs: Path, directory: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Launch runs of ``faults_on_ranks.py`` on both cards of the device that this process is on."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocess.run(
        [*launch, "tests/emulated/faults_on_ranks.py", str(inputs), str(directory), *names],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1800, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("times", "recovered"), [(1, 0), (2, 1)])
def test_a_device_that_refuses_memory_is_asked_again_before_a_step_runs_again(
    tune_run: TuneRun, times: int, recovered: int
) -> None:
    def refuse(number: int) -> Callable[[], None]:
        def arm() -> None:
            torch.cuda.empty_cache()
            control.fail_device_allocations(number, times)

        return arm

    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    with watched({3 + 2 * number: refuse(number) for number in range(3)}) as found:
        tune_run("full", *ON_CUDA, *STEPS, "max_steps_per_epoch=10")
    assert found.reruns.number == 3 * recovered
    assert torch.cuda.memory_stats()["num_alloc_retries"] - retries == 3
    assert len(set(found.tokens)) == 1 and len(set(found.samples)) == 10 * 16


def assert_survived_on_both(inputs: Path, directory: Path, *names: str) -> int:
    """Every rank has run again what any has run out of memory in; return the number of faults."""
    done = on_two_ranks(inputs, directory, *names)
    assert done.returncode == 0, done.stdout[-6000:]
    number = 0
    for name in names:
        of_ranks = [json.loads((directory / f"{name}_{rank}.json").read_text()) for rank in (0, 1)]
        for fault in [fault for found in of_ranks for fault in found["faults"]]:
            if fault["number"] < of_ranks[0]["before_update"]:
                assert (fault["recoveries"], fault["line"]) == (1, ""), (name, fault)
            else:
                assert fault["line"].startswith((IN_UPDATE, OUTSIDE)) and "\n" not in fault["line"], (name, fault)
        number += len(of_ranks[0]["faults"])
    return number


@pytest.mark.slow
def test_each_allocation_of_a_step_on_one_rank_of_two_is_survived_or_ends_in_one_line(
    inputs: Path, tmp_path: Path
) -> None:
    assert assert_survived_on_both(inputs, tmp_path, "full_on_1") > 400


@pytest.mark.slow
def test_so_it_is_on_the_other_on_both_and_in_other_recipes(inputs: Path, tmp_path: Path) -> None:
    names = ["full_on_0", "full_on_both", "split", "checkpointing", "lora", "lora_dpo", "kd"]
    assert assert_survived_on_both(inputs, tmp_path, *names) > 200


@pytest.mark.wide
def test_an_update_that_runs_out_of_memory_on_one_rank_ends_both_in_one_line(inputs: Path, tmp_path: Path) -> None:
    done = on_two_ranks(inputs, tmp_path, "update_on_1")
    assert done.returncode != 0
    of_ranks, _, of_launcher = done.stdout.partition("torch/distributed/elastic")
    assert (of_ranks.count(IN_UPDATE), of_launcher.count(IN_UPDATE)) == (0, 1), done.stdout[-6000:]
    assert "Traceback" not in of_ranks, done.stdout[-6000:]


@pytest.mark.slow
def test_a_collective_that_never_ends_is_ended_by_the_watchdog(inputs: Path, tmp_path: Path) -> None:
    done = on_two_ranks(inputs, tmp_path, "hang")
    assert done.returncode != 0
    assert "Watchdog caught collective operation timeout" in done.stdout
