"""Data that stream train as with Trainer: no sample is lost or read twice, whatever is looked at before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import IterableDataset

from adaptive_batching import ConfigError
from adaptive_batching._report.events import find_record, read_events
from adaptive_batching.transformers import AdaptiveArguments, adopt
from tests.support.wide import few, wide
from tests.transformers import trainers
from tests.transformers.trainers import OutOfMemory, assert_alike, losses, make_trainer, without_probe

AUTO, TWO = AdaptiveArguments(micro_batch_size="auto"), AdaptiveArguments(micro_batch_size=2)
STREAMED = "adaptive_batching._transformers.streamed_data"
SETTINGS: dict[str, Any] = dict(
    per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=8, max_grad_norm=0.3
)
"""Of 40 samples, a pass takes 5 steps."""


class Stream(IterableDataset[Any]):
    """Gives samples in another order in each pass, as it is told its number; some draw from torch's generator."""

    def __init__(self, num_samples: int = 40, *, draws: bool = False) -> None:
        self._data, self._draws, self._epoch = trainers.make_data(num_samples), draws, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = [*range(len(self._data))]
        random.Random(self._epoch).shuffle(order)
        for index in order:
            sample = self._data[index]
            if self._draws and torch.rand(()) < 0.5:
                sample = {**sample, "labels": sample["input_ids"]}
            yield sample


class Sized(Stream):
    def __len__(self) -> int:
        return len(self._data)


def of_datasets(num_shards: int = 1) -> Any:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(trainers.make_data())
    return data.to_iterable_dataset(num_shards=num_shards).shuffle(seed=1, buffer_size=16)


def trained(folder: Path, ours: AdaptiveArguments | None = None, *, short: int | None = None, **settings: Any) -> Any:
    """Return a trainer that has trained on a stream, and once in a while ran out of memory above ``short`` tokens."""
    settings = {**SETTINGS, **settings}
    checkpoint = settings.pop("checkpoint", None)
    settings.setdefault("data", Stream())
    trainer = make_trainer(folder, ours, **settings)
    if ours == AUTO:
        without_probe(trainer, 100)
    if short is not None:
        trainer.add_callback(ShortFromNowOn(trainer.model, short))
    trainer.train(checkpoint)
    return trainer


class ShortFromNowOn(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def __init__(self, model: Any, most_tokens: int) -> None:
        self._model, self._most_tokens = model, most_tokens

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        OutOfMemory(self._model, self._most_tokens)


DATA = {"stream": Stream, "drawn": lambda: Stream(draws=True), "sized": Sized, "datasets": of_datasets}


@pytest.mark.parametrize(
    ("kind", "ours", "short"),
    [
        wide("stream", "auto", None), ("stream", 2, 30), ("datasets", "auto", 50), wide("datasets", 2, None),
        ("drawn", 2, None), wide("sized", "auto", None), wide("workers", 2, None),
    ],
)  # fmt: skip
def test_a_stream_trains_as_before_and_nothing_of_it_is_lost_when_memory_runs_out(
    kind: str, ours: Any, short: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"dataloader_num_workers": 2} if kind == "workers" else {}
    make = DATA.get(kind, lambda: of_datasets(2))
    stock = trained(tmp_path, data=make(), **settings)
    found = trained(tmp_path, AUTO if ours == "auto" else TWO, short=short, data=make(), **settings)
    assert_alike(found, stock)
    for name, value in trainers.weights(found).items():
        torch.testing.assert_close(value, trainers.weights(stock)[name], rtol=1e-4, atol=1e-5)
    assert found.state.global_step == 8 and "incomplete" not in caplog.text
    assert (found.adaptive.num_recoveries > 0) == (short is not None)


def test_the_rest_of_a_pass_is_a_step_of_its_own(tmp_path: Path) -> None:
    """Trainer itself does so with other data; of a stream, it adds this gradient to that of the next step."""
    data = Stream(36)
    data.set_epoch = lambda epoch: None  # type: ignore[method-assign]
    stock = trained(tmp_path, data=[*data], train_sampling_strategy="sequential", num_train_epochs=2, max_steps=10)
    found = trained(tmp_path, TWO, data=data, max_steps=10)
    assert_alike(found, stock, keys=("loss", "grad_norm", "learning_rate"))
    steps = read_events(find_record(tmp_path))["step"]
    assert [step["samples"] for step in steps] == 2 * [8, 8, 8, 8, 4]


@pytest.mark.parametrize("step", few([3, 7], 7), ids=lambda step: f"step {step}")
def test_a_stream_goes_on_where_it_was_left_in_whatever_pass(step: int, tmp_path: Path) -> None:
    whole = trained(tmp_path, TWO, save_strategy="steps", save_steps=step)
    resumed = trained(tmp_path / "resumed", TWO, checkpoint=str(tmp_path / f"checkpoint-{step}"))
    trainers.assert_same(resumed, whole, losses)
    if step == 7:
        longer = trained(tmp_path / "longer", TWO, checkpoint=str(tmp_path / f"checkpoint-{step}"), max_steps=9)
        assert longer.state.global_step == 9


def test_a_stream_is_skipped_on_resume_or_not_as_trainer_does(tmp_path: Path) -> None:
    trained(tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
    for skips in (True, False):
        settings: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint-2"), "ignore_data_skip": not skips}
        settings["max_steps"] = 4
        stock, found = (trained(tmp_path / "resumed", ours, **settings) for ours in (None, TWO))
        assert_alike(found, stock, keys=("loss", "grad_norm", "learning_rate"))


def test_a_stream_goes_on_in_steps_of_the_same_size_only(tmp_path: Path) -> None:
    trained(tmp_path, TWO, save_strategy="steps", save_steps=2, max_steps=4)
    with pytest.raises(ConfigError, match=r"checkpoint-2' is of a run with 8 samples in a step, and this has 16") as no:
        trained(tmp_path, TWO, checkpoint=str(tmp_path / "checkpoint-2"), per_device_train_batch_size=8, max_steps=4)
    assert "\n" not in str(no.value)


class Once(IterableDataset[Any]):
    """Can be read once, because it is its own iterator."""

    def __init__(self) -> None:
        self.rest = iter(trainers.make_data())

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.rest)


class Shares(Once):
    """Each iteration goes on where another has stopped."""

    def __iter__(self) -> Any:
        yield from self.rest


@pytest.mark.parametrize("kind", [Once, Shares])
def test_a_stream_that_cannot_be_read_twice_is_refused_before_it_is_read(kind: Any, tmp_path: Path) -> None:
    data = kind()
    with pytest.raises(ConfigError, match=rf"train_dataset is a {kind.__name__}, .*begin(s)? again.*__iter__") as no:
        make_trainer(tmp_path, TWO, data=data, **SETTINGS).train()
    assert "\n" not in str(no.value)
    left = len([*data.rest])
    assert left == 40 if kind is Once else left == 38


def test_one_that_cannot_be_read_twice_trains_as_with_trainer_where_that_will_do(tmp_path: Path) -> None:
    settings = {**SETTINGS, "max_steps": 5}
    trainer = adopt(make_trainer(tmp_path, data=Once(), **settings), TWO, only_if_possible=True)
    trainer.train()
    assert_alike(trainer, trained(tmp_path, data=Once(), **settings))


def test_an_empty_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_dataset is a Stream, which has no samples"):
        make_trainer(tmp_path, TWO, data=Stream(0), **SETTINGS).train()


def test_the_longest_of_a_stream_is_that_of_its_first_samples_and_it_is_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=STREAMED)
    trainer = make_trainer(tmp_path, AUTO, data=Stream(1100), **SETTINGS)
    trainers.prepared(trainer)
    longest = max(len(sample["input_ids"]) for sample in [*Stream(1100)][:1000])
    assert trainer.adaptive.longest == longest
    assert f"the longest of its first 1000 samples has {longest} tokens" in caplog.text


def test_a_length_that_the_arguments_allow_is_the_longest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger=STREAMED)
    trainer = make_trainer(tmp_path, AUTO, data=Stream(), **SETTINGS)
    trainer.args.max_length = 48
    watched = OutOfMemory(trainer.model, 10**9)
    trainers.prepared(trainer)
    assert trainer.adaptive.longest == 48 and max(shape[1] for shape in watched.forwards) % 48 == 0
    assert "samples of train_dataset are taken to have up to 48 tokens (max_length)" in caplog.text
    assert_alike(*(trained(tmp_path, ours) for ours in (AUTO, None)))


def test_the_largest_batch_is_found_and_is_that_of_the_whole_stream(tmp_path: Path) -> None:
    largest = AdaptiveArguments(use_maximum_batch_size=True, max_batch_size=8)
    settings: dict[str, Any] = {"max_steps": 4, "lr_scheduler_type": "constant"}
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    found = trained(tmp_path, largest, data=Stream(64), **settings, **saves)
    assert found.adaptive.sizes.maximum == 8
    stock = trained(tmp_path, per_device_train_batch_size=8, data=Stream(64), **settings)
    assert_alike(found, stock)
    assert [each["batch_size"] for each in losses(found)] == [8] * 4
    resumed = trained(tmp_path, largest, data=Stream(64), checkpoint=str(tmp_path / "checkpoint-2"), **settings)
    trainers.assert_same(resumed, found, losses)


def test_growth_needs_passes_whose_length_is_known(tmp_path: Path) -> None:
    grows = AdaptiveArguments(batch_increase_function=trainers.DOUBLE, micro_batch_size=4, max_batch_size=8)
    with pytest.raises(ConfigError, match=r"batch_increase_function .*stream.*__len__") as no:
        make_trainer(tmp_path, grows, data=Stream(), **SETTINGS)
    assert "\n" not in str(no.value)
    settings: dict[str, Any] = dict(max_steps=-1, num_train_epochs=2, save_strategy="steps", save_steps=6)
    found = trained(tmp_path, grows, data=Sized(), **settings)
    assert [each["batch_size"] for each in losses(found)] == [4] * 5 + [8] * 3
    resumed = trained(tmp_path / "on", grows, data=Sized(), checkpoint=str(tmp_path / "checkpoint-6"), **settings)
    trainers.assert_same(resumed, found, losses)
