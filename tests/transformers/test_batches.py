"""Batches that a script makes in its own way train as they are: of one kind each, with samples left out, or unlike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Sampler

from adaptive_batching.transformers import AdaptiveArguments
from tests.transformers import trainers
from tests.transformers.trainers import Features, OutOfMemory, assert_alike, make_trainer, without_probe

Data = list[Features]


class OfTasks(nn.Module):
    """A model with a head for each of two tasks, of which a batch takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = trainers.make_bert("BertForSequenceClassification").bert
        self.heads = nn.ModuleList([nn.Linear(32, 3), nn.Linear(32, 3)])

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any, task: int) -> dict[str, torch.Tensor]:
        logits = self.heads[task](self.body(input_ids=input_ids, attention_mask=attention_mask).pooler_output)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class ByTask(Sampler[int]):
    """Hands out eight samples of one task after the other, in an order that it draws from its own generator."""

    def __init__(self, data: Data) -> None:
        self.data, self.chance = data, random.Random(3)

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        of_tasks = [[index for index, each in enumerate(self.data) if each["task"] == task] for task in (0, 1)]
        batches = [task[start : start + 8] for task in of_tasks for start in range(0, len(task), 8)]
        self.chance.shuffle(batches)
        return iter([index for batch in batches for index in batch])


class TasksTrainer(transformers.Trainer):  # type: ignore[misc, name-defined]
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return ByTask(self.train_dataset)


def of_the_first_task(samples: Data) -> Features:
    labels = torch.tensor([sample["label"] for sample in samples])
    return {**trainers.collate(samples), "labels": labels, "task": samples[0]["task"]}


def of_tasks(folder: Path, ours: AdaptiveArguments | None, accumulated: int, *, alternate: bool) -> Any:
    data = trainers.make_labelled(64)
    torch.manual_seed(0)
    return make_trainer(
        folder, ours, model=OfTasks(), kind=TasksTrainer, collator=of_the_first_task, num_train_epochs=1,
        data=[{**each, "task": number % 2 if alternate else number // 32} for number, each in enumerate(data)],
        remove_unused_columns=False, gradient_accumulation_steps=accumulated, warmup_steps=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("accumulated", "alternate", "size"), [(1, False, 3), (4, False, 3), (4, False, "auto"), (4, True, "auto")]
)
def test_batches_of_one_kind_each_do_not_share_a_forward(
    accumulated: int, alternate: bool, size: Any, tmp_path: Path
) -> None:
    stock = of_tasks(tmp_path / "stock", None, accumulated, alternate=alternate)
    stock.train()
    ours = AdaptiveArguments(micro_batch_size=size)
    split = without_probe(of_tasks(tmp_path / "ours", ours, accumulated, alternate=alternate), 60)
    watched = OutOfMemory(split.model.body, 10**9)
    split.train()
    assert_alike(split, stock)
    assert max(shape[0] for shape in watched.forwards[-4:]) < 8, "a batch is split"
