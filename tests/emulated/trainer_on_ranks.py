"""Trains on two devices over NCCL with ``Trainer``, and has allocations of steps fail on the second, one by one.

A run is the devices' strategy and what is trained: ``fsdp bfloat16``. What each step asked of its device is kept.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from adaptive_batching._dry_run.device import control
from adaptive_batching.transformers import AdaptiveArguments
from tests.conftest import without_pages
from tests.transformers.trainers import make_data, make_llama, make_trainer

RANK = int(os.environ.get("RANK", 0))
WARM, FAULTS = 4, 6
# What fails in an audit counts for nothing: one in the first step is enough.
IN_PARTS = AdaptiveArguments(micro_batch_size=4, audit_every=1000)
PATIENCE = 60  # seconds of a step; then the process ends, and says where it was
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "bfloat16": {"bf16": True},
    "checkpointed": {"gradient_checkpointing": True},
}


class Faults(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Has an allocation fail in each second step, evenly from the first of a step to the last of a backward pass."""

    def __init__(self, number: int, *, here: bool = True) -> None:
        self.steps = WARM + 2 * number
        self._number, self._here = number, here
        self.allocations = 0  # of an undisturbed step, up to the end of its last backward pass
        self.products: list[int] = []  # matrices that each step has multiplied
        self._begun = control.counters()

    def on_step_begin(self, args: Any, state: Any, control_: Any, **kwargs: Any) -> None:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        step, self._begun = state.global_step, control.counters()
        if self._here and step >= WARM and step % 2 == 0:
            control.fail_allocations(self.allocations * ((step - WARM) // 2) // self._number)

    def on_step_end(self, args: Any, state: Any, control_: Any, **kwargs: Any) -> None:
        self.products.append((control.counters() - self._begun).products)
        control.end_faults()

    def on_train_end(self, args: Any, state: Any, control_: Any, **kwargs: Any) -> None:
        faulthandler.cancel_dump_traceback_later()

    def trainer(self) -> type[transformers.Trainer]:
        """Return a trainer that counts the allocations of a step."""
        faults = self

        class Counting(transformers.Trainer):
            def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                loss: torch.Tensor = super().training_step(*args, **kwargs)
                if self.state.global_step < WARM:
                    faults.allocations = (control.counters() - faults._begun).allocations
                return loss

        return Counting


def run(name: str, folder: Path) -> dict[str, Any]:
    strategy, model = name.split()
    faults = Faults(FAULTS, here=RANK == 1)
    trainer = make_trainer(
        folder / name.replace(" ", "_"), IN_PARTS, model=make_llama(), kind=faults.trainer(), callbacks=[faults],
        data=make_data(1) * 8 * 2 * faults.steps, use_cpu=False, num_train_epochs=1, logging_steps=10**6,
        fsdp=strategy == "fsdp", **SETTINGS[model],
    )  # fmt: skip
    with without_pages():
        trainer.train()
    return {
        "steps": trainer.state.global_step,
        "recoveries": trainer.adaptive.num_recoveries,
        "products": faults.products,
    }


def run_all(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    found = {name: run(name, folder) for name in names}
    torch.distributed.destroy_process_group()
    return found
