"""Training on two ranks over NCCL in which each allocation of a step fails in turn, on one rank or on both.

    torchrun --nproc_per_node 2 --no-python python tests/emulated/faults_on_ranks.py <inputs> <directory> <which>

Starting two processes takes longer than most of it, so that one launch runs all; ``which`` is a key of :data:`LAUNCHES`.
What became of each fault is in ``<name>_<rank>.json``.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adaptive_batching._emulated_device import control
from tests.conftest import ARCHITECTURE, ROOT
from tests.emulated.faults import EachAllocationFails
from tests.integration.two_ranks import in_the_group_of_this_launch

RANK = int(os.environ["RANK"])
STRIDE = int(os.environ.get("STRIDE", 1))
ON_CUDA = (
    "device=cuda", "dtype=bf16", "epochs=1", "dataset._component_=tests.emulated.faults.EqualSamples",
    "metric_logger._component_=torchtune.training.metric_logging.StdoutLogger", "~metric_logger.log_dir",
    "log_every_n_steps=1000000", "batch_size=4", "use_maximum_batch_size=False", "batch_increase_function=null",
    "lr_scheduler.num_warmup_steps=2", "tokenizer.max_seq_len=64",
    *(f"model.{key}={value}" for key, value in ARCHITECTURE.items()),
)  # fmt: skip


class OnRanks(EachAllocationFails):
    """Has each allocation before an update fail on the ranks ``on``, and those of the update on all of them.

    What ends the run on one rank leaves the others waiting, until the launcher ends them; where it ends on all at once,
    training can go on here.
    """

    def __init__(self, on: Sequence[int], every: int = 1) -> None:
        def which(allocations: int) -> Sequence[int]:
            self.before_update = agreed(self.before_update)
            return range(0, agreed(allocations), every)

        super().__init__(which)
        self._on = on

    def fails_here(self, number: int) -> bool:
        return RANK in self._on or number >= self.before_update


def agreed(value: int) -> int:
    """Return the smallest value of all ranks."""
    smallest = torch.tensor(value)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return int(smallest)


def train(inputs: Path, directory: Path, name: str, recipe: str, config: str, *overrides: str) -> None:
    """Train until all has failed that is to fail."""
    module = importlib.import_module(f"recipes.{recipe}")
    path = ROOT / "recipes" / "configs" / "quickstart" / f"{config}_single_device.yaml"
    given = [f"data_dir={inputs}", f"output_dir={directory / name}", *ON_CUDA, *overrides]
    keys = {override.split("=")[0]: override for override in given}  # the last one counts
    sys.argv = [recipe, "--config", str(path), *keys.values()]
    with in_the_group_of_this_launch(module, module.stock):
        try:
            module.recipe_main()
        except SystemExit as end:
            if end.code:
                raise


def write(each: EachAllocationFails, to: Path) -> None:
    found = {"before_update": each.before_update, "faults": [dataclasses.asdict(fault) for fault in each.faults]}
    to.write_text(json.dumps(found))


RUNS: dict[str, tuple[OnRanks, str, str, Sequence[str]]] = {
    "full_1": (OnRanks([1], STRIDE), "full_finetune_distributed", "full", ()),
    "full_0": (OnRanks([0], 8 * STRIDE), "full_finetune_distributed", "full", ()),
    "full_both": (OnRanks([0, 1], 8 * STRIDE), "full_finetune_distributed", "full", ()),
}


if __name__ == "__main__":
    torch.cuda.set_device(RANK)
    dist.init_process_group("cuda:nccl,cpu:gloo", timeout=timedelta(seconds=60))
    inputs, directory, *names = sys.argv[1:]
    for name in names:
        each, *run = RUNS[name]
        with each.in_training():
            train(Path(inputs), Path(directory), name, *run[:2], *run[2])
        write(each, Path(directory) / f"{name}_{RANK}.json")
    dist.barrier()
    dist.destroy_process_group()
