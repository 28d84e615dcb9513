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

from adaptive_batching import ConfigError
from adaptive_batching.transformers import AdaptiveArguments
from tests.support.wide import few, wide
from tests.transformers import trainers
from tests.transformers.trainers import Features, OutOfMemory, assert_alike, make_trainer, trained, without_probe

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
    ("accumulated", "alternate", "size"),
    [wide(1, False, 3), (4, False, 3), wide(4, False, "auto"), (4, True, "auto")],
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


def classes() -> Any:
    return trainers.make_bert("BertForSequenceClassification")


def labelled(left_out: range) -> Data:
    """Samples with a label each, but for some that cannot be read."""
    return [None if number in left_out else each for number, each in enumerate(trainers.make_labelled(64))]  # type: ignore[misc]


def of_those_that_could_be_read(samples: Data) -> Features:
    return trainers.collate_labelled([sample for sample in samples if sample is not None])


def of_short_ones(samples: Data) -> Features:
    return trainers.collate_labelled([sample for sample in samples if len(sample["input_ids"]) <= 18])


def of_short_ones_or_nothing(samples: Data) -> Features | None:
    return of_short_ones(samples) if any(len(sample["input_ids"]) <= 18 for sample in samples) else None


@pytest.mark.parametrize(
    ("data", "collator", "size"),
    [
        wide(labelled(range(0, 64, 6)), of_those_that_could_be_read, 3),  # of which some are looked at before training
        (labelled(range(1, 64, 6)), of_those_that_could_be_read, 1),  # and of these none
        wide(labelled(range(0)), of_short_ones, "auto"),
        (labelled(range(0)), of_short_ones_or_nothing, 1),
    ],
    ids=["None at first", "None later", "too long", "too long, without a batch"],
)
def test_samples_that_a_collate_function_leaves_out_do_not_count(
    data: Data, collator: Any, size: Any, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"data": data, "collator": collator, "remove_unused_columns": False, "num_train_epochs": 1}
    stock = trained(tmp_path / "stock", model=classes(), **given)
    ours = AdaptiveArguments(micro_batch_size=size)
    split = without_probe(make_trainer(tmp_path / "ours", ours, model=classes(), **given), 60)
    split.train()
    assert_alike(split, stock)


def test_the_longest_sample_that_is_kept_is_probed(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "data": labelled(range(0)),
        "collator": of_short_ones,
        "remove_unused_columns": False,
        "max_steps": 1,
    }
    ours = make_trainer(tmp_path, AdaptiveArguments(micro_batch_size="auto"), model=classes(), **given)
    ours.train()
    assert ours.adaptive.longest == 18


class WithPictures(nn.Module):
    """Adds a weight of their pictures to samples that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.text = classes()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, labels: Any, picture: Any = None, picture_mask: Any = None, **inputs: Any) -> dict[str, Any]:
        logits = self.text(**inputs).logits
        if picture is not None:
            logits = logits + self.scale * (picture * picture_mask)[:, None]
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def of_text_and_pictures(samples: Data) -> Features:
    batch = trainers.collate_labelled(samples)
    if any("picture" in sample for sample in samples):
        batch["picture"] = torch.tensor([sample.get("picture", 0.0) for sample in samples])
        batch["picture_mask"] = torch.tensor([int("picture" in sample) for sample in samples])
    return batch


@pytest.mark.parametrize("size", few([1, "auto"], "auto"))
def test_batches_may_have_unlike_keys(size: Any, tmp_path: Path) -> None:
    data = trainers.make_labelled(40)
    data = [{**each, "picture": 0.1 * number} if number % 3 == 0 else each for number, each in enumerate(data)]
    given: dict[str, Any] = {
        "data": data,
        "collator": of_text_and_pictures,
        "remove_unused_columns": False,
        "num_train_epochs": 1,
    }
    stock = trained(tmp_path / "stock", model=WithPictures(), **given)
    ours = AdaptiveArguments(micro_batch_size=size)
    split = without_probe(make_trainer(tmp_path / "ours", ours, model=WithPictures(), **given), 60)
    split.train()
    assert_alike(split, stock)


class Pixels(nn.Module):
    """Tells the class of each pixel, by a loss that ignores one of the labels."""

    def __init__(self, ignored: int, *, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.ignored, self.by_hand = nn.Conv2d(3, 4, 3, padding=1), ignored, by_hand

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(pixel_values)
        if self.by_hand:
            is_target = labels != self.ignored
            losses = F.cross_entropy(logits, labels * is_target, reduction="none")
            return {"loss": (losses * is_target).sum() / is_target.sum(), "logits": logits}
        return {"loss": F.cross_entropy(logits, labels, ignore_index=self.ignored), "logits": logits}


@pytest.mark.parametrize(("ignored", "by_hand"), [(255, False), (0, False), (-1, True)])
def test_a_label_that_is_no_target_may_be_any(ignored: int, by_hand: bool, tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(0)
    data = []
    for number in range(40):
        labels = torch.randint(0 if ignored else 1, 4, (6, 6), generator=chance)
        labels[: number % 6] = ignored
        data.append({"pixel_values": torch.randn(3, 6, 6, generator=chance), "labels": labels})
    stack = lambda samples: {key: torch.stack([each[key] for each in samples]) for key in samples[0]}  # noqa: E731
    given: dict[str, Any] = {"data": data, "collator": stack, "num_train_epochs": 1}
    stock = trained(tmp_path / "stock", model=Pixels(ignored, by_hand=by_hand), **given)
    ours = AdaptiveArguments(micro_batch_size=3)
    split = trained(tmp_path / "ours", ours, model=Pixels(ignored, by_hand=by_hand), **given)
    assert_alike(split, stock)


class OwnLabels(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Ignores the padding of ``input_ids``, and -1 in labels."""

    def compute_loss(
        self, model: Any, inputs: Features, *args: Any, num_items_in_batch: Any = None, **rest: Any
    ) -> Any:
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1]
        return F.cross_entropy(logits.mT, labels, ignore_index=-1)


def ignoring_minus_one(samples: Data) -> Features:
    batch = trainers.collate(samples)
    return {**batch, "labels": batch["labels"].masked_fill(batch["labels"] == -100, -1)}


def test_rows_know_the_label_that_is_no_target(tmp_path: Path) -> None:
    given: dict[str, Any] = {"kind": OwnLabels, "collator": ignoring_minus_one, "num_train_epochs": 1}
    stock = trained(tmp_path / "stock", **given)
    ours = without_probe(make_trainer(tmp_path / "ours", AdaptiveArguments(micro_batch_size="auto"), **given), 60)
    ours.train()
    assert_alike(ours, stock)
    assert {each["padding"] for each in trainers.losses(ours)} == {1.0}


class Normed(nn.Module):
    """Normalises a sample over all of its places, those of padding included."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(96, 16), nn.GroupNorm(4, 16), nn.Linear(16, 3)

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.embed(input_ids).mT)  # [b, c, s]
        pooled = (hidden * attention_mask[:, None]).sum(2) / attention_mask.sum(1)[:, None]
        logits = self.head(pooled)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_padding_that_reaches_the_loss_is_named_as_the_cause(tmp_path: Path) -> None:
    ours = AdaptiveArguments(micro_batch_size=3)
    with pytest.raises(ConfigError, match=r"computes over padding, .* pad all samples to one length"):
        trained(tmp_path, ours, model=Normed(), collator=trainers.collate_classes)


class Choosing(nn.Module):
    """Draws twice which features a token keeps: in training, and in evaluation too if it ``always`` does."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.embed, self.head = always, nn.Embedding(96, 16), nn.Linear(16, 3)

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)  # [b, s, e]
        for _ in range(2 if self.training or self.always else 0):
            hidden = hidden * F.gumbel_softmax(hidden)
        pooled = (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1)[:, None]
        logits = self.head(pooled)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_loss_that_draws_in_training_alone_is_known_by_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = AdaptiveArguments(micro_batch_size=3)
    trainer = trained(tmp_path, ours, model=Choosing(always=False), collator=trainers.collate_classes)
    assert trainer.state.global_step > 0
    assert [record.message.split(";")[0] for record in caplog.records if "cannot be compared" in record.message] == [
        "parts of a batch cannot be compared with the whole, because random numbers are drawn (by gumbel_softmax)"
    ]


def test_a_loss_that_draws_in_evaluation_as_well_is_refused_and_what_draws_is_named(tmp_path: Path) -> None:
    ours = AdaptiveArguments(micro_batch_size=3)
    with pytest.raises(ConfigError, match=r"leave out random numbers that .* as well \(by gumbel_softmax\), and what"):
        trained(tmp_path, ours, model=Choosing(always=True), collator=trainers.collate_classes)


def test_a_model_that_fails_on_a_row_is_padded_and_its_error_is_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def check(module: Any, args: Any, kwargs: Any) -> None:
        if (kwargs["position_ids"].diff() < 0).any():
            raise ValueError("positions have to rise")

    model = trainers.make_llama()
    model.model.layers[1].register_forward_pre_hook(check, with_kwargs=True)
    ours = without_probe(make_trainer(tmp_path, AdaptiveArguments(micro_batch_size="auto"), model=model), 60)
    with caplog.at_level("INFO", "adaptive_batching"):
        ours.train()
    assert "samples of similar length in a forward pass: ValueError: positions have to rise" in caplog.text
