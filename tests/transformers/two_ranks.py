"""Trains on two processes with DDP, with Trainer and with ours, and writes down what each has logged.

RANK=0 WORLD_SIZE=2 ... python -m tests.transformers.two_ranks FOLDER
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from adaptive_batching.transformers import AdaptiveArguments, adaptive
from tests.transformers import trainers

RANK = int(os.environ.get("RANK", 0))


class ShortOnOneRank(trainers.OutOfMemory):
    """Memory is short on the second rank alone."""

    def _check(self, model: Any, args: Any, kwargs: Any) -> None:
        if RANK == 1:
            super()._check(model, args, kwargs)


def run(name: str, folder: Path) -> dict[str, Any]:
    ours, _, model = name.partition(" ")
    arguments = {
        "stock": None,
        "parts": AdaptiveArguments(micro_batch_size=3),
        "short": AdaptiveArguments(micro_batch_size=8),
        "probed": AdaptiveArguments(micro_batch_size="auto"),
    }[ours]
    torch.manual_seed(0)
    if model == "sft":
        trainer = sft(folder / name.replace(" ", "_"), arguments)
        if ours == "short":
            ShortOnOneRank(trainer.model, 60)
        return trained(trainer, arguments)
    trainer = trainers.make_trainer(
        folder / name.replace(" ", "_"), arguments, gradient_accumulation_steps=2, ddp_backend="gloo",
        model=trainers.make_bert() if model == "bert" else trainers.make_llama(), data=trainers.make_data(45),
    )  # fmt: skip
    if ours == "short":
        ShortOnOneRank(trainer.model, 60)
    return trained(trainer, arguments)


def sft(folder: Path, ours: AdaptiveArguments | None) -> Any:
    import trl
    from datasets import Dataset

    from tests.transformers.test_trl import make_tokenizer

    args = trainers.arguments(folder, trl.SFTConfig, bf16=False, gradient_checkpointing=False, ddp_backend="gloo")
    made = trl.SFTTrainer if ours is None else adaptive(trl.SFTTrainer)
    given = {} if ours is None else {"adaptive": ours}
    data = Dataset.from_list([{"input_ids": each["input_ids"]} for each in trainers.make_data(45)])
    return made(model=trainers.make_llama(), args=args, train_dataset=data, processing_class=make_tokenizer(), **given)


def trained(trainer: Any, arguments: AdaptiveArguments | None) -> dict[str, Any]:
    trainer.train()
    total = sum(float(value.double().abs().sum()) for value in trainers.weights(trainer).values())
    recoveries = 0 if arguments is None else trainer.adaptive.num_recoveries
    return {"logged": trainers.logged(trainer), "weights": total, "recoveries": recoveries}


RUNS = ["stock", "parts", "short", "probed", "parts bert", "short bert"]

if importlib.util.find_spec("trl") is not None:
    RUNS += ["stock sft", "parts sft", "short sft", "probed sft"]

if __name__ == "__main__":
    found = {name: run(name, Path(sys.argv[1])) for name in RUNS}
    Path(sys.argv[1], f"rank_{RANK}.json").write_text(json.dumps(found))
