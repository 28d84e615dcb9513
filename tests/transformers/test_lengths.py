"""Lengths of samples are found without reading more of the data than that takes, and of text by collating it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from adaptive_batching.transformers import AdaptiveArguments
from tests.transformers import trainers
from tests.transformers.trainers import Features, make_trainer


def auto() -> AdaptiveArguments:
    return AdaptiveArguments(micro_batch_size="auto")


class Counting(list[Features]):
    """Counts how often each row is read; one of them takes ``seconds``."""

    def __init__(self, rows: list[Features], seconds: float = 0.0) -> None:
        super().__init__(rows)
        self.read: Counter[int] = Counter()
        self.seconds = seconds

    def __getitem__(self, index: Any) -> Any:
        time.sleep(self.seconds if index == 4 else 0)
        self.read[index] += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("make", [trainers.make_llama, trainers.make_t5])
def test_before_training_no_row_is_read_twice(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = Counting(trainers.make_data(80))
    trainers.prepared(make_trainer(tmp_path, auto(), model=make(), data=data))
    assert max(data.read.values()) == 1
    assert "to find the longest" not in caplog.text


def test_a_run_that_goes_on_does_not_search_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_steps": 1, "save_strategy": "steps"}
    made = []
    for steps in (1, 2):
        data = Counting(trainers.make_data(80))
        ours = AdaptiveArguments(micro_batch_size=4)
        made.append(make_trainer(tmp_path, ours, model=trainers.make_t5(), data=data, max_steps=steps, **settings))
        made[-1].train(resume_from_checkpoint=steps > 1)
    assert sum(data.read.values()) < 80


def test_a_long_search_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = make_trainer(tmp_path, auto(), data=Counting(trainers.make_data(40), 1.1))
    with caplog.at_level(logging.WARNING, "adaptive_batching"):
        trainers.prepared(ours)
    [line] = [record.getMessage() for record in caplog.records if "to find the longest" in record.getMessage()]
    assert "all 40 samples are read" in line and "a column 'length'" in line


@pytest.mark.parametrize(("off", "reads_all"), [(0, False), (1, True)])
def test_a_column_of_lengths_is_used_if_it_is_right(off: int, reads_all: bool, tmp_path: Path) -> None:
    import datasets

    rows = [{**each, "length": len(each["input_ids"]) + off} for each in trainers.make_data(80)]
    data = datasets.Dataset.from_list(rows)
    read: list[int] = []

    def reading(batch: Features) -> Features:
        read.append(len(batch["input_ids"]))
        return batch

    data.set_transform(reading)
    ours = make_trainer(tmp_path, auto(), data=data, remove_unused_columns=False)
    assert trainers.prepared(ours).longest == 24
    assert (sum(read) >= 80) == reads_all


def tokenizing(samples: list[Features]) -> Features:
    return trainers.collate([{key: list(map(int, each["text"].split())) for key in KEYS} for each in samples])


KEYS = ("input_ids", "labels")


def test_text_that_the_collate_function_tokenizes_runs_without_padding(tmp_path: Path) -> None:
    text = [{"text": " ".join(map(str, each["input_ids"]))} for each in trainers.make_data(40)]
    given: dict[str, Any] = {"data": text, "collator": tokenizing, "remove_unused_columns": False}
    stock = trainers.trained(tmp_path / "stock", num_train_epochs=1, **given)
    ours = trainers.without_probe(make_trainer(tmp_path / "ours", auto(), num_train_epochs=1, **given), 60)
    watched = trainers.OutOfMemory(ours.model, 10**9)
    ours.train()
    trainers.assert_alike(ours, stock)
    assert {each["padding"] for each in trainers.losses(ours)} == {1.0}
    assert max(shape.numel() for shape in watched.forwards[-4:]) <= 60
