"""Private names of other packages: all are listed, all are there, and a missing one leaves the rest alone."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.metadata
import logging
import os
import pkgutil
import resource
import subprocess
import sys
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torchtune import _recipe_registry, training

from adaptive_batching._patches import PRIVATE, REPLACED
from tests.conftest import ROOT, TuneRun
from tests.support import house, power_cut
from tests.support.power_cut import FUNCTION

freeze_count = gc.get_freeze_count  # before a fixture replaces it


def test_every_private_name_in_use_is_listed_and_no_other() -> None:
    used = {name for tree in house.trees().values() for name in house.private_names(tree)}
    assert used - {"torch.nn.modules.batchnorm._BatchNorm"} <= {*PRIVATE}
    assert {*PRIVATE} - used <= {"torch.nn.modules.batchnorm._BatchNorm"}, "reached by torch.nn"


@pytest.mark.parametrize("name", PRIVATE)
def test_every_listed_name_is_there(name: str) -> None:
    if name.startswith("torch._C._cuda") and torch.version.cuda is None:
        pytest.skip("in a CUDA build alone")
    try:
        pkgutil.resolve_name(name)
    except AttributeError:  # a module that its package does not import
        importlib.import_module(name)


WITHOUT = """
import importlib, logging, os, sys
import torch, torch._dynamo, torch.distributed.fsdp, torch.nn.utils.stateless  # torch itself has bound its names

def probe():
    from adaptive_batching import AdaptiveBatchingConfig, find_maximum_batch_size
    model = torch.nn.Linear(256, 256)
    config = AdaptiveBatchingConfig(memory_limit="2GiB")
    make_batch = lambda size: torch.randn(size, 256)
    found = find_maximum_batch_size(
        model, torch.optim.SGD(model.parameters()), lambda model, x: model(x).mean(), make_batch, upper=8,
        settings=config,
    )
    assert found.batch_size == 8, found

for name in sys.argv[1:]:
    owner, _, last = name.rpartition(".")
    if os.fork() == 0:
        try:
            where = importlib.import_module(owner) if owner != "torch.autograd.Variable" else torch.autograd.Variable
            getattr(where, last, None)
            if last in vars(where):
                delattr(where, last)
            import adaptive_batching
            step = adaptive_batching.growth.step()
            assert adaptive_batching.plan_batch_sizes(4, step, epochs=2, samples=64, maximum=8) == [4, 8]
            said = []
            logging.getLogger("adaptive_batching").setLevel("INFO")
            logging.getLogger("adaptive_batching").addFilter(lambda record: said.append(record.getMessage()))
            for each in ("find", "search", "trial"):
                logging.getLogger(f"adaptive_batching._probe.{each}").addFilter(lambda r: said.append(r.getMessage()))
            probe()
            said = [line for line in said if last in line]
            print(name, "|", *said, sep="", flush=True)
            os._exit(0)
        except BaseException as error:
            print(name, type(error).__name__, error, flush=True)
            os._exit(1)
    os.wait()
"""


@pytest.mark.wide
def test_without_any_of_torch_s_private_names_the_package_is_imported_and_a_probe_runs() -> None:
    of_autograd = ("_execution_engine", "_engine_run_backward")  # without which it does not work
    names = [name for name in PRIVATE if name.startswith("torch.") and not name.endswith(of_autograd)]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, *names],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True, check=True,
    )  # fmt: skip
    failed = [line for line in run.stdout.splitlines() if "|" not in line]
    assert not failed
    found = dict(line.split("|", 1) for line in run.stdout.splitlines())
    assert [*found] == names


def test_every_function_of_torchtune_that_is_replaced_by_name_is_listed() -> None:
    named = {
        f"torchtune.training.{keyword.arg}"
        for tree in house.trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "replaced_in_torchtune"
        for keyword in node.keywords
        if keyword.arg is not None
    }
    assert named and named <= {*REPLACED}


def process_wide() -> dict[str, Any]:
    """What a run could leave set in its process."""
    hooks = {name: repr(value) for name, value in vars(nn.modules.module).items() if name.startswith("_global_")}
    replaced = [name for name in REPLACED if find_spec(name.partition(".")[0])]  # a CPU build has no Triton
    return {
        **hooks,
        **{name: getattr(training, name) for name in training.__all__},
        **{name: pkgutil.resolve_name(name) for name in replaced},
        "recompile_limit": torch._dynamo.config.recompile_limit,
        "RLIMIT_DATA": resource.getrlimit(resource.RLIMIT_DATA),
        "frozen": gc.get_freeze_count(),
        "threads": torch.get_num_threads(),
        "warnings": [*warnings.filters],
        "disabled": logging.root.manager.disable,
        "recipes": [*_recipe_registry._ALL_RECIPES],
        "argv": [*sys.argv],
        "excepthook": sys.excepthook,
    }


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_what_a_run_sets_is_undone_when_it(fails: bool, tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["optimizer_in_bwd=True", "clip_grad_norm=null", "use_maximum_batch_size=True", *FUNCTION]
    overrides += ["adaptive_batching.memory_limit=4GiB", "adaptive_batching.max_batch_size=8"]
    if fails:
        monkeypatch.setattr(power_cut, "fail_at_epoch", 1)
    tune_run("full", "epochs=1", "micro_batch_size=1", name="first")  # imports what a run needs
    gc.unfreeze()
    monkeypatch.setattr(gc, "get_freeze_count", freeze_count)
    before = process_wide()
    with pytest.raises(SystemExit, match="power went out") if fails else contextlib.nullcontext():
        tune_run("full", *overrides)
    assert process_wide() == before
