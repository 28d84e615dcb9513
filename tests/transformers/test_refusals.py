"""What cannot be trained in parts is refused in one line, with the name that its user knows, before any step."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra transformers)")

from adaptive_batching import ConfigError, DoesNotFitError  # noqa: E402
from adaptive_batching._transformers.refusals import check_trainer  # noqa: E402
from adaptive_batching.transformers import AdaptiveArguments, adaptive  # noqa: E402
from tests.transformers import trainers  # noqa: E402
from tests.transformers.trainers import make_trainer  # noqa: E402

THREE = AdaptiveArguments(micro_batch_size=3)


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return iter(trainers.make_data(8))


class WithoutItems:
    def __len__(self) -> int:
        return 8


class Empty(list[Any]):
    def __bool__(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Stream(), "train_dataset is a Stream, which has a length and no items; give a map-style data set"),
        (WithoutItems(), "train_dataset is a WithoutItems, which has a length and no items"),
        (Empty(), "train_dataset is a Empty, which has no samples"),
    ],
    ids=["stream", "no items", "empty"],
)
def test_data_whose_samples_cannot_be_taken_are_refused(data: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_trainer(tmp_path, THREE, data=data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("other", [1, "cpu"])
def test_a_model_in_several_places_is_refused(other: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.model.hf_device_map = {"model.embed_tokens": 0, "model.layers": other}
    with pytest.raises(ConfigError, match=r"device_map has put layers of the model on GPU 0 and (GPU 1|cpu), of which"):
        check_trainer(trainer)


@pytest.mark.parametrize("place", ["cpu", torch.device("cpu")])
def test_a_model_that_a_device_map_puts_in_one_place_trains(place: Any, tmp_path: Path) -> None:
    model = trainers.make_llama()
    model.hf_device_map = {"": place}
    make_trainer(tmp_path, THREE, model=model, max_steps=1).train()


def test_a_model_that_is_parallel_by_its_own_means_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trainers.make_llama()
    model.is_parallelizable = model.model_parallel = True
    model.model.norm.to("meta")
    monkeypatch.setattr(transformers.Trainer, "_move_model_to_device", lambda *given: None)
    with pytest.raises(ConfigError, match="layers of the model on cpu and meta, of which"):
        make_trainer(tmp_path, THREE, model=model)


class CountsBatches(transformers.Trainer):  # type: ignore[misc, name-defined]
    def get_batch_samples(self, *args: Any) -> Any:
        batches, _ = super().get_batch_samples(*args)
        return batches, torch.tensor(len(batches))


def test_a_trainer_whose_own_steps_would_be_passed_over_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CountsBatches has a get_batch_samples of its own, .*compute_loss_func"):
        make_trainer(tmp_path, THREE, kind=CountsBatches)
    make_trainer(tmp_path, AdaptiveArguments(), kind=CountsBatches, max_steps=2).train()


class Loads(transformers.Trainer):  # type: ignore[misc, name-defined]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("it loads a model")


class Generates(Loads):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs


class AsyncGRPOTrainer(Loads):
    """It has the name of one of TRL's."""


class DPOTrainer(Loads):
    """So has this one."""


@dataclass
class WithLoss(transformers.TrainingArguments):  # type: ignore[misc, name-defined]
    loss_type: str = "aot"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Generates, "Generates makes its batches while training, .*train without adaptive"),
        (AsyncGRPOTrainer, "AsyncGRPOTrainer makes its batches while training, .*train without adaptive"),
        (DPOTrainer, "loss_type='aot' of DPOTrainer compares samples"),
    ],
)
def test_a_class_that_cannot_be_split_is_refused_before_it_loads_a_model(kind: Any, said: str, tmp_path: Path) -> None:
    args = WithLoss(output_dir=str(tmp_path))
    for given, named in ((None, args), {}), ((None,), {"args": args}):
        with pytest.raises(ConfigError, match=said) as caught:
            adaptive(kind)(*given, **named, adaptive=THREE)
        assert "\n" not in str(caught.value)
    with pytest.raises(AssertionError, match="loads a model"):
        adaptive(kind)(None, args, adaptive=AdaptiveArguments())


def test_a_trainer_keeps_the_name_that_its_user_wrote(tmp_path: Path) -> None:
    class AdaptiveMine(transformers.Trainer):  # type: ignore[misc, name-defined]
        """What it is."""

    made = adaptive(AdaptiveMine)
    assert made is not AdaptiveMine and issubclass(made, AdaptiveMine)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(made, name) == getattr(AdaptiveMine, name)


class Reads(torch.nn.Module):
    """A model that looks at its values, which a trace has none of; a long sample may not fit."""

    def __init__(self, most_tokens: int) -> None:
        super().__init__()
        self.weights = torch.nn.Embedding(trainers.VOCABULARY, 1)
        self._most_tokens = most_tokens

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
        if torch.is_grad_enabled() and input_ids.shape[1] > self._most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        scores = self.weights(input_ids)[..., 0]  # [b, s]
        assert scores.detach().numpy().max() < 1e9
        return {"loss": (scores * labels.ne(-100)).sum() / labels.ne(-100).sum()}


@pytest.mark.parametrize("fits", [True, False])
def test_that_a_step_cannot_be_traced_is_told_once_as_what_it_means(
    *, fits: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = make_trainer(tmp_path, AdaptiveArguments(micro_batch_size="auto"), model=Reads(99 if fits else 20))
    with caplog.at_level("INFO"), contextlib.nullcontext() if fits else pytest.raises(DoesNotFitError):
        ours.adaptive.find()
    [told] = [each for each in caplog.records if "cannot be traced" in each.message]
    assert told.levelno == logging.INFO
    assert told.message.startswith("memory is measured by real steps instead of predicted, because the training step")
