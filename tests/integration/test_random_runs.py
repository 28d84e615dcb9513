"""Random runs of real recipes: models x settings x faults x limits, each in a process of its own.

Each run has to finish with the invariants held, or to end with a clear error; never with a traceback, a signal or a
hang.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import random
import resource
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from adaptive_batching._memory.host_limits import status
from adaptive_batching._memory.meter import CpuMeter
from adaptive_batching._report.events import read_events
from adaptive_batching._torchtune.stock.data import index_of
from adaptive_batching._torchtune.train import probing
from adaptive_batching._torchtune.train import run as run_of_recipe
from adaptive_batching._torchtune.train.run import TrainingLoop
from tests.conftest import ARCHITECTURE, QUICKSTART, Run, without_pages
from tests.integration import faults
from tests.support.garbage import quicken_collections
from tests.support.processes import FORKED

MIB = 2**20
SECONDS = 150
DEPTH = ARCHITECTURE["num_layers"]


@dataclass(frozen=True)
class Case:
    """One run: ``fault`` is as :data:`tests.integration.faults.plan`, ``after`` forwards of training; ``extra_mib`` is
    by how much the process may grow once the recipe is set up, None for no limit."""

    number: int
    kind: str
    settings: dict[str, str]
    fault: dict[str, Any]
    extra_mib: int | None


def draw(number: int, seed: int) -> Case:
    """The ``number``-th case of a seed."""
    chance = random.Random(f"{seed}-{number}")
    pick = chance.choice
    kind = pick(["full", "lora"])
    limited = chance.random() < 0.5
    settings: dict[str, Any] = {
        "dtype": pick(["fp32", "fp32", "bf16"]),
        "batch_size": pick([1, 2, 3, 4, 8]),
        "gradient_accumulation_steps": pick([1, 1, 2, 3]),
        "tokenizer.max_seq_len": pick([32, 64, 128, 256]),
        "dataset.split": f"train[:{pick([40, 60, 97])}]",
        "epochs": pick([1, 2, 3]),
        "enable_activation_checkpointing": pick([False, False, True]),
        "clip_grad_norm": pick(["null", 1.0]),
        "dataset.train_on_input": pick([False, True]),
        "dataset.packed": pick([False, False, False, True]),
        "loss._component_": pick(["torchtune.modules.loss.CEWithChunkedOutputLoss", "torch.nn.CrossEntropyLoss"]),
        "optimizer._component_": pick(["torch.optim.AdamW", "torch.optim.SGD"]),
        "use_maximum_batch_size": pick([False, True, True]),
        "micro_batch_size": pick(["null", "null", 1, "auto", "auto"]),
        "adaptive_batching.round_to_power_of_two": pick([False, True]),
        "adaptive_batching.search": pick(["predict", "predict", "predict", "binary_search", "power_of_two"]),
    }
    if limited and settings["dtype"] == "bf16" and settings["micro_batch_size"] != "auto":
        settings["use_maximum_batch_size"] = True  # near a limit oneDNN ends a process whose batch is given
    # Stock's mean over a batch that is all prompt is 0/0.
    if settings["dataset.packed"] or settings["tokenizer.max_seq_len"] < 128:
        settings["dataset.train_on_input"] = True
    if chance.random() < 0.5:
        settings["batch_increase_function._component_"] = "adaptive_batching.growth.step"
        settings["adaptive_batching.increase_every"] = pick(["epoch", 0.5])
        settings["adaptive_batching.lr_scaling"] = pick(["none", "sqrt"])
        settings["adaptive_batching.grow_beyond_memory"] = pick([False, False, True])
    if settings["gradient_accumulation_steps"] > 1 and chance.random() < 0.2:
        settings["adaptive_batching.keep_global_batch"] = True
        settings["adaptive_batching.grow_beyond_memory"] = False
    elif kind == "full" and settings["gradient_accumulation_steps"] == 1 and chance.random() < 0.3:
        settings |= {"optimizer_in_bwd": True, "clip_grad_norm": "null"}
    if limited:
        settings["adaptive_batching.memory_limit"] = "null"
        settings["adaptive_batching.headroom"] = pick(["2%", "0", "1MiB", "8MiB"])
    else:
        settings["adaptive_batching.memory_limit"] = "8GiB"
        settings["adaptive_batching.max_batch_size"] = pick([16, 32])
    fault = {}
    if chance.random() < (0.25 if limited else 0.7):
        where = pick(["forward", "backward", "hook"])
        fault = dict(where=where, layer=chance.randrange(DEPTH), after=chance.randint(1, 12), times=pick([1, 1, 2, 5]))
    extra_mib = pick([10, 20, 30, 45, 60, 100, 200]) if limited else None
    return Case(number, kind, {key: str(value) for key, value in settings.items()}, fault, extra_mib)


@contextlib.contextmanager
def watched(case: Case) -> Iterator[list[tuple[int, list[Any]]]]:
    """Note the epoch and the samples of every optimizer step, and set the limit before the first."""
    steps: list[tuple[int, list[Any]]] = []
    find_maximum, run, finish = probing.find_maximum, TrainingLoop.run, TrainingLoop._finish_step
    to_set = [case.extra_mib] if case.extra_mib is not None else []

    def limit() -> None:
        while to_set:
            CpuMeter().release()
            resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + to_set.pop() * MIB, -1))

    def limited_probe(*arguments: Any) -> Any:
        limit()
        return find_maximum(*arguments)

    def limited_run(loop: TrainingLoop) -> None:
        limit()
        if case.fault:
            faults.plan["call"] = faults.plan["calls"] + case.fault["after"]
        run(loop)

    def noted(loop: TrainingLoop, epoch: int, *arguments: Any) -> None:
        steps.append((epoch, [index_of(sample) for batch in loop._window for sample in batch]))
        finish(loop, epoch, *arguments)

    patched = mock.patch.multiple(TrainingLoop, run=limited_run, _finish_step=noted)
    with mock.patch.object(run_of_recipe, "find_maximum", limited_probe), patched, without_pages():
        yield steps
    resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))


def run(case: Case, inputs: Path, output_dir: Path) -> dict[str, Any]:
    """Run a case in this process; what came of it."""
    faults.disarm()
    if case.fault:
        faults.plan.update({k: v for k, v in case.fault.items() if k != "after"}, call=10**9)
    settings = {
        "data_dir": inputs, "output_dir": output_dir, "lr_scheduler.num_warmup_steps": 2,
        "batch_increase_function._component_": "null", "adaptive_batching.recover_from_oom": True,
        "model._component_": f"tests.integration.faults.{case.kind}_model",
        **{f"model.{key}": value for key, value in ARCHITECTURE.items()},
        **case.settings,
    }  # fmt: skip
    config = QUICKSTART / f"{case.kind}_single_device.yaml"
    module = importlib.import_module(f"recipes.{case.kind}_finetune_single_device")
    sys.argv = ["run", "--config", str(config), *(f"{key}={value}" for key, value in settings.items())]
    if case.extra_mib is not None:  # as under ulimit, a process knows from the start that it has a limit
        resource.setrlimit(resource.RLIMIT_DATA, (2**42, -1))
    try:
        with watched(case) as steps:
            module.recipe_main()
    except SystemExit as end:
        if end.code:
            outcome = "clear error" if str(end).startswith("error: ") else "exit"
            return {"outcome": outcome, "message": str(end)}
    except BaseException:
        return {"outcome": "traceback", "message": traceback.format_exc()}
    return {"outcome": "finished", **check(case, steps, output_dir)}


def check(case: Case, ran: list[tuple[int, list[Any]]], output_dir: Path) -> dict[str, Any]:
    """Hold the invariants."""
    losses = [step["loss"] for step in Run(output_dir).metrics]
    assert len(losses) == len(ran) > 0
    assert all(map(math.isfinite, losses)), losses
    for epoch in {epoch for epoch, _ in ran}:
        seen = Counter(sample for e, samples in ran if e == epoch for sample in samples)
        assert max(seen.values()) <= 1, "a sample was repeated"
    events = read_events(output_dir / "adaptive_batching" / "report.jsonl")
    steps = events["step"]
    recoveries = steps[-1]["recoveries"]
    assert [step["samples"] for step in steps] == [len(samples) for _, samples in ran], "the record is what ran"
    for planned in events["epoch"]:
        its = [step for step in steps if step["epoch"] == planned["epoch"]]
        if not any(math.floor(change["epoch"]) == planned["epoch"] for change in events["change"]):
            assert (len(its), sum(step["samples"] for step in its)) == (planned["steps"], planned["samples"])
            assert {step["samples"] for step in its} == {planned["global_batch_size"]}
    bounded = case.settings["micro_batch_size"] == "null"
    bounded = bounded and case.settings.get("adaptive_batching.grow_beyond_memory") != "True"
    for decision in [*events["epoch"], *events["change"]]:
        if events["probe"] and bounded:
            assert decision["batch_size"] <= events["probe"][-1]["batch_size"]
        assert decision["batch_size"] <= int(case.settings.get("adaptive_batching.max_batch_size", 10**9))
    return {"steps": len(losses), "recoveries": recoveries, "losses": losses}


def run_in_process(case: Case, inputs: Path, output_dir: Path) -> None:
    """Run a case, and leave what came of it."""
    quicken_collections()
    with (output_dir / "output.txt").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        found = run(case, inputs, output_dir)
    except BaseException:
        found = {"outcome": "violation", "message": traceback.format_exc()}
    resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
    (output_dir / "outcome.json").write_text(json.dumps(found))


def outcome_of(case: Case, inputs: Path, output_dir: Path) -> dict[str, Any]:
    """Run a case in a process of its own; a signal or a hang is an outcome, too."""
    output_dir.mkdir(parents=True)
    process = FORKED.Process(target=run_in_process, args=(case, inputs, output_dir))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        return {"outcome": "hang"}
    result = output_dir / "outcome.json"
    if process.exitcode < 0 or not result.exists():
        return {"outcome": f"exit code {process.exitcode}"}  # as OpenBLAS does where memory is short
    return dict(json.loads(result.read_text()))


def outcome_beside_twin(case: Case, inputs: Path, directory: Path) -> dict[str, Any]:
    """Run a case; where errors were injected and rounding is small, compare it with the undisturbed run."""
    found = outcome_of(case, inputs, directory / f"{case.number}_run")
    compares = case.fault and case.extra_mib is None and case.settings["dtype"] == "fp32"
    if not compares or found["outcome"] != "finished" or case.settings["optimizer._component_"] != "torch.optim.SGD":
        return found
    twin = outcome_of(dataclasses.replace(case, fault={}), inputs, directory / f"{case.number}_twin")
    if found["losses"] != pytest.approx(twin.get("losses", []), rel=1e-3):
        return {"outcome": "violation", "message": f"losses {found['losses']} and undisturbed {twin}"}
    return found


@pytest.mark.serial
@pytest.mark.parametrize(
    ("seed", "count"),
    [
        pytest.param(0, 8, marks=pytest.mark.wide),
        *(pytest.param(seed, 60, marks=pytest.mark.slow) for seed in range(1, 6)),
    ],
)
def test_every_run_finishes_or_says_what_is_wrong(seed: int, count: int, inputs: Path, tmp_path: Path) -> None:
    outcomes, recoveries = Counter[str](), 0
    for number in range(count):
        case = draw(number, seed)
        found = outcome_beside_twin(case, inputs, tmp_path)
        print(case, found)
        recoveries += found.get("recoveries", 0)
        outcomes[found["outcome"]] += 1
    assert set(outcomes) == {"finished", "clear error"}
    assert outcomes["finished"] >= count / 2
    assert recoveries > 0
