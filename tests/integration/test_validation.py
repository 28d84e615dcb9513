"""Validation while training: its loss is exact, and training is as it would be without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchtune.datasets import SFTDataset, instruct_dataset
from torchtune.modules.attention_utils import packed_block_causal_mask

from adaptive_batching._torchtune.stock.objective import Sums
from adaptive_batching._torchtune.train import validating
from adaptive_batching._torchtune.train.validating import Validation
from tests.conftest import Run, TuneRun, assert_same_weights
from tests.integration.faults import disarm, plan
from tests.support.overrides import RECOVER, VALIDATE
from tests.support.records import events, without_sizes
from tests.support.wide import few

COMMON = ["tokenizer.max_seq_len=96", "dataset.split=train[:48]", "epochs=1", "gradient_accumulation_steps=2"]
EVERY_THIRD = [*VALIDATE, "run_val_every_n_steps=3"]


@pytest.fixture(autouse=True)
def no_plan() -> None:
    disarm()


@pytest.fixture
def truths(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The loss of each validation, computed sample by sample with nothing but torch."""
    found: list[float] = []
    run = Validation._sum_over_samples

    def noted(self: Validation) -> Sums:
        found.append(truth(self._host.model, self._loader.dataset, *self._models[1:]))
        return run(self)

    monkeypatch.setattr(Validation, "_sum_over_samples", noted)
    return found


def truth(model: nn.Module, dataset: Any, teacher: nn.Module | None = None) -> float:
    """The mean over all targets of the cross entropy; with a teacher, of half of that and half of its divergence."""
    total, count = 0.0, 0
    for index in range(len(dataset)):
        sample = dataset[index]
        targets = torch.as_tensor(sample["labels"][1:])
        counted = targets != -100
        logits = logits_of(model, sample)[counted]
        loss = cross_entropy(logits, targets[counted], reduction="sum").item()
        if teacher is not None:
            wanted = logits_of(teacher, sample)[counted].softmax(-1)
            loss = (loss + cross_entropy(logits, wanted, reduction="sum").item()) / 2
        total, count = total + loss, count + int(counted.sum())
    return total / count


def logits_of(model: nn.Module, sample: Any) -> torch.Tensor:
    places = {}
    if "seq_lens" in sample:  # a pack
        mask = packed_block_causal_mask([sample["seq_lens"]])
        places = {"mask": mask, "input_pos": sample["input_pos"][None]}
    logits = model(torch.as_tensor(sample["tokens"])[None], **places)
    return (torch.cat(logits, 1) if isinstance(logits, list) else logits)[0, :-1].float()  # [s - 1, vocabulary]


def losses_of(run: Run) -> list[float]:
    return [step["val_loss"] for step in run.metrics if "val_loss" in step]


def assert_trained_alike(run: Run, without: Run) -> None:
    """Bit for bit."""
    logged = without_sizes([step for step in run.metrics if "val_loss" not in step])
    assert logged == without_sizes(without.metrics)
    assert_same_weights(run.weights(0), without.weights(0))


class Drawing(SFTDataset):
    """Takes random numbers for each sample."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        random.random(), np.random.rand(), torch.rand(1)
        return super().__getitem__(index)


def drawing_dataset(*arguments: Any, **named: Any) -> Any:
    dataset = instruct_dataset(*arguments, **named)
    dataset.__class__ = Drawing
    return dataset


@pytest.mark.parametrize("kind", few(["full", "kd"], "full"))
def test_the_loss_is_that_of_each_sample_alone_and_training_that_without(
    kind: str, tune_run: TuneRun, baseline: TuneRun, truths: list[float]
) -> None:
    """With dropout, whose random numbers validation does not take."""
    dropout = ["model.lora_dropout=0.2"] if kind == "kd" else ["model.attn_dropout=0.2"]
    drawing = "dataset_val._component_=tests.integration.test_validation.drawing_dataset"
    run = tune_run(kind, *COMMON, *dropout, *EVERY_THIRD, drawing, "batch_size_val=4")
    losses = losses_of(run)
    assert losses == pytest.approx(truths, rel=1e-6)
    assert len(losses) == 2, "once for each optimizer step, not for each of its batches"
    assert_trained_alike(run, baseline(kind, *COMMON, *dropout, *(RECOVER if kind == "kd" else [])))


def test_forwards_are_as_large_as_the_probe_has_found_to_fit(
    tune_run: TuneRun, baseline: TuneRun, truths: list[float]
) -> None:
    """Of packs, where training has none."""
    probe = ["use_maximum_batch_size=True", "adaptive_batching.memory_limit=8GiB", "adaptive_batching.max_batch_size=4"]
    run = tune_run("full", *COMMON, *EVERY_THIRD, *probe, "dataset_val.packed=True")
    losses = losses_of(run)
    assert losses == pytest.approx(truths, rel=1e-6) and len(losses) == 2
    assert_trained_alike(run, baseline("full", *COMMON))
    assert [(event["step"], event["loss"]) for event in events(run, "validation")] == [
        (step, pytest.approx(loss)) for step, loss in zip((3, 6), losses, strict=True)
    ]


@pytest.mark.parametrize("kind", few(["full", "kd"], "full"))
def test_a_validation_that_runs_out_of_memory_has_the_same_loss_and_leaves_training_alone(
    kind: str, tune_run: TuneRun, baseline: TuneRun, truths: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """It has no limit of training's to shrink, and its own is remembered."""
    fails = "teacher_model" if kind == "kd" else "model"
    common = [*COMMON, f"{fails}._component_=tests.integration.faults.full_model"]
    without = baseline(kind, *common, *(RECOVER if kind == "kd" else []))  # stock's gradient is another
    caplog.set_level("INFO", "adaptive_batching")
    caplog.clear()
    plan.update(where="forward", layer=1, without_gradients=True, times=10**6, fits=4)  # of training all fits
    run = tune_run(kind, *common, *EVERY_THIRD, "batch_size_val=8")
    shown = [each for each in caplog.messages if "samples of dataset_val again" in each or each.startswith("val_loss")]
    assert ["val_loss" in each for each in shown[-3:]] == [False, True, True], "the second does not run out again"
    assert losses_of(run) == pytest.approx(truths, rel=1e-6)
    assert_trained_alike(run, without)


def test_a_sample_that_does_not_fit_alone_is_named_before_training(
    tune_run: TuneRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validating, "batch_dependent_module", lambda host: None)  # which runs the model, too
    plan.update(where="forward", layer=1, without_gradients=True, call=1, times=10**6)
    common = [*COMMON, "model._component_=tests.integration.faults.full_model", *VALIDATE, "run_val_every_n_steps=100"]
    message = r"out of memory .* \d+ tokens, which cannot be split: number \d+ of dataset_val .*max_seq_len below"
    with pytest.raises(SystemExit, match=message):
        tune_run("full", *common)
    assert not Run(tmp_path / "out").metrics, "before training"


def all_prompt(tokenizer: Any) -> Any:
    return [{"tokens": [1, 2, 3], "labels": [5, -100, -100], "mask": [True] * 3}] * 3


def one_longer_than_the_model_takes(tokenizer: Any) -> Any:
    return [{"tokens": [1] * n, "labels": [1] * n, "mask": [True] * n} for n in (5, 5, 513)]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"_component_": "tests.integration.test_validation.all_prompt"}, "dataset_val has no target token in any"),
        ({"_component_": "torchtune.datasets.instruct_dataset", "source": "json", "data_files": "/no/file.json"},
         "dataset_val cannot be loaded: .*Check dataset_val.source"),
        ({"_component_": "tests.integration.test_validation.one_longer_than_the_model_takes"},
         r"dataset_val has a sample of 513 tokens, number 2 .*takes at most 512; set tokenizer.max_seq_len=512"),
    ],
)  # fmt: skip
def test_data_without_a_loss_are_refused_before_training(
    dataset: dict[str, str], message: str, tune_run: TuneRun
) -> None:
    with pytest.raises(SystemExit, match=rf"^error: {message}") as end:
        tune_run("full", replaced={"dataset_val": dataset, "run_val_every_n_steps": 1})
    assert "\n" not in str(end.value), "one line"
