"""Faults in each allocation of a step in turn: training goes on, or ends in one line, and never hangs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from adaptive_batching import AdaptiveStep
from adaptive_batching._emulated_device import control
from adaptive_batching._torchtune.stock.data import index_of
from adaptive_batching._torchtune.train.loop import TrainingLoop
from tests.conftest import TuneRun
from tests.emulated.faults import ON_CUDA, EachAllocationFails, Finished, Reruns, sample_of
from tests.support.overrides import DOUBLE

IN_UPDATE = "error: out of memory in the optimizer's step, which may have updated only some parameters"
OUTSIDE = "error: out of memory outside a forward or backward, where nothing can run again"
VALIDATE = [
    "dataset_val._component_=tests.emulated.samples.Samples", "dataset_val.samples=4", "run_val_every_n_steps=1",
]  # fmt: skip
CHECKPOINTING = ["enable_activation_checkpointing=True"]
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "checkpointing": ("full", CHECKPOINTING),
    "offloading": ("full", [*CHECKPOINTING, "enable_activation_offloading=True"]),
    "auto": ("full", ["micro_batch_size=auto", "adaptive_batching.memory_limit=2GiB"]),
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
    ("settings", "most"), [("offloading", 12), *(pytest.param(each, 80, marks=pytest.mark.slow) for each in SETTINGS)]
)
def test_so_it_is_in_other_recipes_and_with_settings(tune_run: TuneRun, settings: str, most: int) -> None:
    recipe, overrides = SETTINGS[settings]
    with EachAllocationFails(sample_of(most)).in_training() as each:
        tune_run(recipe, *ON_CUDA, *overrides)
    assert_survived(each)


def test_so_it_is_in_a_loop_of_ones_own() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch).square().sum(), len(batch)

    optimizer = torch.optim.AdamW(model.parameters())
    step: AdaptiveStep[torch.Tensor] = AdaptiveStep(model, optimizer, loss, clip_norm=1.0)
    step._work._parts_add_up, step._runner._audit._next = True, 10**9  # type: ignore[union-attr] # which no number shows here
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


@pytest.mark.parametrize("after", [0, 10])
def test_a_run_whose_update_runs_out_of_memory_ends_in_one_line(tune_run: TuneRun, after: int) -> None:
    with watched(before_update={3: lambda: control.fail_allocations(after)}), pytest.raises(SystemExit) as end:
        tune_run("full", *ON_CUDA)
    assert str(end.value.code).startswith(IN_UPDATE) and "\n" not in str(end.value.code)


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
    run_batch, finish_step, found = TrainingLoop._run_batch, TrainingLoop._finish_step, Watched()
    log = logging.getLogger("adaptive_batching")

    def batch_of(loop: TrainingLoop, batch: Any, **named: Any) -> None:
        (before or {}).get(loop.global_step, lambda: None)()
        run_batch(loop, batch, **named)

    def finish(loop: TrainingLoop, *arguments: Any) -> None:
        found.samples += [index_of(sample) for batch in loop._window for sample in batch]
        found.tokens.append(sum(float(sums.tokens) for _, sums in loop._runner.done))
        (before_update or {}).get(loop.global_step, lambda: None)()
        finish_step(loop, *arguments)

    log.addHandler(found.reruns)
    try:
        with mock.patch.multiple(TrainingLoop, _run_batch=batch_of, _finish_step=finish):
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
