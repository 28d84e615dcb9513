"""Training on two ranks over NCCL in which each allocation of a step fails in turn, on one rank or on both.

    torchrun --nproc_per_node 2 --no-python python tests/emulated/faults_on_ranks.py <inputs> <directory> <name>...

Starting two processes takes longer than most of it, so that one launch runs several; a name is a key of :data:`FAULTS`,
or ``hang`` or ``update_on_1``, which end the launch. What became of each fault is in ``<name>_<rank>.json``.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from adaptive_batching._dry_run.device import control
from adaptive_batching._torchtune.stock.loading import load_stock
from adaptive_batching._torchtune.train.run import TrainingLoop
from tests.conftest import QUICKSTART, small_run
from tests.emulated.faults import ON_CUDA, EachAllocationFails, sample_of
from tests.integration.two_ranks import in_the_group_of_this_launch
from tests.support.overrides import TEACHER

RANK = int(os.environ["RANK"])


class OnRanks(EachAllocationFails):
    """Has each allocation before an update fail on the ranks ``on``, and those of the update on all of them.

    What ends the run on one rank leaves the others waiting, until the launcher ends them; where it ends on all at once,
    training can go on here.
    """

    def __init__(self, on: Sequence[int], which: Callable[[int], Sequence[int]] = range) -> None:
        def agreed_on(allocations: int) -> Sequence[int]:
            self.before_update = smallest(self.before_update)
            return which(smallest(allocations))

        super().__init__(agreed_on)
        self._on = on

    def fails_here(self, number: int) -> bool:
        return RANK in self._on or number >= self.before_update


def smallest(value: int) -> int:
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)


def train(inputs: Path, directory: Path, name: str, kind: str) -> None:
    """Train until all has failed that is to fail."""
    recipe, config, overrides = KINDS[kind]
    module = importlib.import_module(f"recipes.{recipe}")
    settings = small_run(inputs, directory / name, "lr_scheduler.num_warmup_steps=2", *ON_CUDA, *overrides)
    sys.argv = [recipe, "--config", f"{QUICKSTART}/{config}_single_device.yaml", *settings]
    with in_the_group_of_this_launch(load_stock(recipe)):
        try:
            module.recipe_main()
        except SystemExit as end:
            if end.code:
                raise


KINDS: dict[str, tuple[str, str, Sequence[str]]] = {
    "full": ("full_finetune_distributed", "full", ()),
    "split": ("full_finetune_distributed", "full", ("micro_batch_size=2",)),
    "checkpointing": ("full_finetune_distributed", "full", ("enable_activation_checkpointing=True",)),
    "lora": ("lora_finetune_distributed", "lora", ()),
    "lora_dpo": ("lora_dpo_distributed", "lora_dpo", ("dataset._component_=tests.emulated.samples.Preferences",)),
    "kd": ("knowledge_distillation_distributed", "lora", TEACHER),
}  # fmt: skip
FAULTS: dict[str, tuple[str, Callable[[], OnRanks]]] = {
    "full_on_1": ("full", lambda: OnRanks([1])),
    "full_on_0": ("full", lambda: OnRanks([0], sample_of(60))),
    "full_on_both": ("full", lambda: OnRanks([0, 1], sample_of(60))),
    **{kind: (kind, lambda: OnRanks([1], sample_of(40))) for kind in KINDS if kind != "full"},
}


def end_on_one_rank(call: Callable[[], None], rank: int, *, in_update: bool) -> None:
    """Train on, and in the fourth step have ``call`` happen on one rank, before the step or before its update."""

    def then(function: Callable[..., None]) -> Callable[..., None]:
        def run(loop: TrainingLoop, *arguments: Any) -> Any:
            if loop.training.global_step == 3 and rank == RANK:
                call()
            return function(loop, *arguments)

        return run

    name = "_finish_step" if in_update else "_run_window"
    with mock.patch.object(TrainingLoop, name, then(getattr(TrainingLoop, name))):
        train(inputs, directory, "out", "full")


if __name__ == "__main__":
    inputs, directory, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.cuda.set_device(RANK)
    hangs = names == ["hang"]
    dist.init_process_group("cuda:nccl,cpu:gloo", timeout=timedelta(seconds=10 if hangs else 120))
    if hangs:
        end_on_one_rank(lambda: control.hang_collective(after=5), 0, in_update=False)
    elif names == ["update_on_1"]:
        end_on_one_rank(lambda: control.fail_allocations(after=5), 1, in_update=True)
    for name in names:
        kind, of = FAULTS[name]
        with of().in_training() as each:
            train(inputs, directory, name, kind)
        found = {"before_update": each.before_update, "faults": [dataclasses.asdict(fault) for fault in each.faults]}
        (directory / f"{name}_{RANK}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
