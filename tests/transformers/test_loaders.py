"""Data loaders of a trainer hand out batches to everybody, as before; only Trainer's own loop runs samples in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from adaptive_batching import ConfigError
from adaptive_batching.transformers import AdaptiveArguments
from tests.support.wide import wide
from tests.transformers import trainers
from tests.transformers.trainers import OutOfMemory, assert_alike, make_trainer

AUTO = AdaptiveArguments(micro_batch_size="auto")
THREE = AdaptiveArguments(micro_batch_size=3)


class Looks(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Writes down the first batch of each loader that a callback is given, and the loss of it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, Any]] = []

    def _look(self, event: str, loader: Any, model: Any = None) -> None:
        batch = next(iter(loader))
        assert isinstance(loader, DataLoader)
        values = {name: value.clone() for name, value in batch.items()}
        if model is not None:  # as some evaluate on what they train on
            with torch.no_grad():
                values["loss"] = model(**batch).loss
        self.seen.append((event, len(loader), values))

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._look("train_begin", given["train_dataloader"], given["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step in (2, 7):
            self._look("step_end", given["train_dataloader"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._look("epoch_end", given["train_dataloader"])

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._look("prediction_step", given["eval_dataloader"])

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._look("evaluate", given["eval_dataloader"])


def assert_same_batches(ours: list[Any], theirs: list[Any]) -> None:
    assert [each[:-1] for each in ours] == [each[:-1] for each in theirs]
    for (*_, one), (*_, other) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        wide({}),
        {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 2},
        wide({"dataloader_num_workers": 1, "num_train_epochs": 1}),
    ],
    ids=str,
)
def test_loaders_hand_out_the_batches_of_trainer_to_callbacks_and_callers_at_any_time(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    def run(ours: AdaptiveArguments | None) -> tuple[Any, Looks, list[Any]]:
        looks, mine = Looks(), []
        trainer = make_trainer(
            tmp_path, ours, callbacks=[looks], eval_dataset=trainers.make_data(20), eval_strategy="epoch",
            per_device_eval_batch_size=6, **settings,
        )  # fmt: skip

        def look() -> None:
            for loader in (
                trainer.get_train_dataloader(),
                trainer.get_eval_dataloader(),
                trainer.get_test_dataloader(trainers.make_data(7)),
            ):
                mine.append((len(loader), list(loader)[-1]))

        look()
        trainer.train()
        look()
        return trainer, looks, mine

    stock, looks, mine = run(None)
    ours, our_looks, our_mine = run(AUTO)
    assert_same_batches(our_mine, mine)
    assert_same_batches(our_looks.seen, looks.seen)
    assert_alike(ours, stock)
    assert ours.adaptive.probe is not None


def test_asking_for_a_loader_probes_nothing(tmp_path: Path) -> None:
    ours = make_trainer(tmp_path, AUTO)
    watched = OutOfMemory(ours.model, 0)
    assert len(ours.get_train_dataloader()) == 5
    assert ours.accelerator.prepare(ours.get_train_dataloader()) is not None
    values = ours.set_initial_training_values(ours.args, ours.get_train_dataloader())
    assert values[-1] == 10, "steps, as of Trainer"
    assert not watched.forwards and not watched.failures and ours.adaptive.schedule is None
    assert ours.optimizer is None


class Weighted(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Draws some samples more often, and more of them than there are."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        weights = [1.0 + len(each["input_ids"]) for each in self.train_dataset]
        return WeightedRandomSampler(weights, 52, generator=torch.Generator().manual_seed(1))


class OfTorch(transformers.Trainer):  # type: ignore[misc, name-defined]
    def get_train_dataloader(self) -> Any:
        sampler = RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(2))
        return DataLoader(
            self.train_dataset, batch_size=self.args.train_batch_size, sampler=sampler, collate_fn=self.data_collator
        )


class OfAccelerate(OfTorch):
    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(super().get_train_dataloader())


class Method(OfAccelerate):
    """Collates by a method of its own."""

    def __init__(self, *args: Any, data_collator: Any, **given: Any) -> None:
        super().__init__(*args, data_collator=self.collate, **given)

    def collate(self, samples: Any) -> Any:
        return trainers.collate(samples)


class Listed(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Draws in an order that is a list, which has no attributes."""

    def get_train_dataloader(self) -> Any:
        order = torch.randperm(len(self.train_dataset), generator=torch.Generator().manual_seed(2)).tolist()
        return DataLoader(
            self.train_dataset, batch_size=self.args.train_batch_size, sampler=order, collate_fn=self.data_collator
        )


class Told(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Looks at its loader, as many do, and hands on that of Trainer."""

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        self.first = next(iter(loader))["input_ids"]
        return loader


@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        (Weighted, AUTO),
        wide(OfTorch, AUTO),
        (OfAccelerate, THREE),
        wide(Method, THREE),
        (Listed, AUTO),
        wide(Told, THREE),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_loader_or_sampler_of_the_users_own_trains_as_before(kind: Any, ours: Any, tmp_path: Path) -> None:
    # Of accumulated batches it is asked whether they may run together.
    more: dict[str, Any] = {"gradient_accumulation_steps": 2} if kind is Listed else {}

    def train(ours: AdaptiveArguments | None) -> Any:
        trainer = make_trainer(tmp_path, ours, kind=kind, **more)
        transformers.set_seed(3)
        trainer.train()
        return trainer

    found, expected = train(ours), train(None)
    assert_alike(found, expected)
    samples = 52 if kind is Weighted else 40
    assert sum(each.samples for each in found.adaptive.planned()) == 2 * samples


class BatchesOfTheirOwn(BatchSampler):
    def __iter__(self) -> Any:
        yield from ([number, number + 1] for number in range(0, 40, 2))

    def __len__(self) -> int:
        return 20


class LoaderOfTheirOwn(DataLoader[Any]):
    def __iter__(self) -> Any:
        return ({**batch, "extra": 1} for batch in super().__iter__())


def kept(**given: Any) -> Any:
    """Return a class of trainer with a loader of these settings."""

    class OfItsOwn(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            settings = dict(dataset=self.train_dataset, collate_fn=self.data_collator, batch_size=8)
            settings.update(given)
            settings = {name: value for name, value in settings.items() if value is not None}
            return settings.pop("made", DataLoader)(**settings)

    return OfItsOwn


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no loader": ({"made": lambda **given: [1]}, "returns a list without a batch sampler of torch"),
    "another collate function": (
        {"collate_fn": lambda samples: trainers.collate(samples)},
        r"collates with <lambda>, and not with data_collator, .*; give it to the trainer as data_collator",
    ),
    "a loop of its own": ({"made": LoaderOfTheirOwn}, "a LoaderOfTheirOwn, which changes batches after they are"),
    "another size": ({"batch_size": 4}, r"makes batches of 4 samples, and per_device_train_batch_size=8; write"),
    "batches of its own": (
        {"batch_size": None, "batch_sampler": [[0, 1], [2]]}, "returns a DataLoader without a batch sampler of torch"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_loader_whose_batches_cannot_be_split_is_refused_before_any_step(case: str, tmp_path: Path) -> None:
    given, said = REFUSED[case]
    ours = make_trainer(tmp_path, THREE, kind=kept(**given))
    ours.get_train_dataloader()
    watched = OutOfMemory(ours.model, 10**9)
    with pytest.raises(ConfigError, match=f"get_train_dataloader of OfItsOwn .*{said}") as caught:
        ours.train()
    assert "\n" not in str(caught.value) and not watched.forwards


def test_batches_of_a_sampler_s_own_sizes_are_not_resized(tmp_path: Path) -> None:
    sampler = BatchesOfTheirOwn(SequentialSampler(range(40)), 8, drop_last=False)
    grows = AdaptiveArguments(batch_increase_function={"_component_": "adaptive_batching.growth.step", "gamma": 2})
    kind = kept(batch_size=None, batch_sampler=sampler)
    stock, ours = make_trainer(tmp_path, kind=kind), make_trainer(tmp_path, THREE, kind=kind)
    for trainer in (stock, ours):
        trainer.train()
    assert_alike(ours, stock)
    with pytest.raises(ConfigError, match="BatchesOfTheirOwn, which keeps the sizes of its batches"):
        make_trainer(tmp_path, grows, kind=kind).train()
