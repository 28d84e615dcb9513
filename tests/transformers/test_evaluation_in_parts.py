"""An evaluation that runs out of memory reports what it would have reported, and remembers what fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from adaptive_batching import DoesNotFitError
from adaptive_batching.transformers import AdaptiveArguments
from tests.transformers import trainers
from tests.transformers.trainers import OutOfMemory, make_trainer

OURS = AdaptiveArguments(micro_batch_size="auto")


def short_memory(trainer: Any, most_tokens: int) -> OutOfMemory:
    return OutOfMemory(trainer.model, most_tokens, in_training=False)


class Accuracies:
    """The accuracy of each call, the mean of all, and what was predicted where there is a target."""

    def __init__(self) -> None:
        self.each: list[float] = []
        self.predicted: list[Any] = []

    def __call__(self, given: Any, compute_result: bool = True) -> dict[str, float]:
        labels = np.asarray(given.label_ids)  # [b, s]
        logits = given.predictions
        best = np.asarray(logits if np.ndim(logits) == 2 else np.asarray(logits).argmax(-1))[:, :-1]
        targets = labels[:, 1:] != -100
        self.each.append(float((best == labels[:, 1:])[targets].mean()))
        self.predicted += [row[of].tolist() for row, of in zip(best, targets, strict=True)]
        return {"accuracy": float(np.mean(self.each))}


def greedy(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1)


@pytest.mark.parametrize("most_tokens", [10**9, 60])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preprocess_logits_for_metrics": greedy, "eval_accumulation_steps": 1},
        {"batch_eval_metrics": True, "preprocess_logits_for_metrics": greedy},
        {"label_smoothing_factor": 0.1},
    ],
    ids=lambda settings: "+".join(settings) if isinstance(settings, dict) else None,
)
def test_what_runs_out_of_memory_gives_what_it_would_have_given(
    settings: dict[str, Any], most_tokens: int, tmp_path: Path
) -> None:
    found: dict[str, dict[str, float]] = {}
    predicted: dict[str, list[Any]] = {}
    for name, arguments in {"stock": None, "ours": OURS}.items():
        metrics = Accuracies()
        trainer = make_trainer(
            tmp_path / name, arguments, eval_dataset=trainers.make_data(21), per_device_eval_batch_size=8,
            compute_metrics=metrics, **settings,
        )  # fmt: skip
        short = short_memory(trainer, most_tokens if name == "ours" else 10**9)
        found[name], predicted[name] = trainer.evaluate(), metrics.predicted
        assert (short.failures > 0) == (name == "ours" and most_tokens == 60)
    assert predicted["ours"] == predicted["stock"], "of the same samples, in their order"
    for key in ("eval_loss", "eval_accuracy"):
        expected = found["stock"][key]
        assert found["ours"][key] == (expected if most_tokens > 60 else pytest.approx(expected, rel=1e-6)), key
    assert found["ours"].keys() == found["stock"].keys()


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "T5"])
def test_a_loss_of_another_kind_is_what_it_would_have_been(kind: str, tmp_path: Path) -> None:
    found = []
    for arguments in (None, OURS):
        made: dict[str, Any] = {"model": trainers.make_t5()}
        if kind != "T5":
            made = {"model": trainers.make_bert(kind), "collator": trainers.collate_classes}
        trainer = make_trainer(tmp_path, arguments, per_device_eval_batch_size=8, **made)
        short = short_memory(trainer, 10**9 if arguments is None else 60)
        found.append(trainer.predict(trainers.make_data(21)))
    assert short.failures
    stock, ours = found
    assert ours.metrics["test_loss"] == pytest.approx(stock.metrics["test_loss"], rel=1e-6)
    logits = [each.predictions[0] if kind == "T5" else each.predictions for each in (ours, stock)]
    assert logits[0].shape == logits[1].shape
    within = np.ones(logits[0].shape[:-1], bool) if kind != "T5" else stock.label_ids != -100
    np.testing.assert_allclose(logits[0][within], logits[1][within], rtol=1e-4, atol=1e-5)


class Masking:
    """Leaves out targets at random, by a generator of its own, or that of the process."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __call__(self, samples: list[trainers.Features]) -> dict[str, torch.Tensor]:
        batch = trainers.collate(samples)
        drawn = torch.rand(batch["labels"].shape, generator=self.generator)
        return {**batch, "labels": batch["labels"].masked_fill(drawn < 0.5, -100)}


@pytest.mark.parametrize("is_own", [False, True])
def test_a_collate_function_that_draws_draws_once_for_each_batch_on_several_ranks(
    is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is divided by the number of the targets that it is the sum of."""
    found = []
    for ours in (None, OURS):
        generator = torch.Generator() if is_own else torch.default_generator
        trainer = make_trainer(
            tmp_path, ours, collator=Masking(generator if is_own else None), per_device_eval_batch_size=8
        )
        generator.manual_seed(5)
        with monkeypatch.context() as patched:
            patched.setattr(transformers.TrainingArguments, "world_size", 2)  # of which this process plays one
            loss = trainer.evaluate(trainers.make_data(21))["eval_loss"]
        found.append((loss, generator.get_state().tolist()))
    assert found[0] == found[1]


def test_samples_with_labels_and_without_them_are_predicted_by_the_same_trainer(tmp_path: Path) -> None:
    left_out: list[str] = []

    def collate(samples: Any) -> Any:
        return {key: value for key, value in trainers.collate(samples).items() if key not in left_out}

    ours = make_trainer(tmp_path, OURS, collator=collate, per_device_eval_batch_size=8)
    short = short_memory(ours, 60)
    labelled = ours.predict(trainers.make_data(9))
    left_out.append("labels")
    unlabelled = ours.predict(trainers.make_data(9))
    assert short.failures and unlabelled.label_ids is None and "test_loss" not in unlabelled.metrics
    np.testing.assert_array_equal(unlabelled.predictions, labelled.predictions)


def test_what_does_not_fit_is_met_in_the_first_batch_and_remembered(tmp_path: Path) -> None:
    """Forwards are as large as fit, whatever per_device_eval_batch_size says, and each batch has its own loss."""
    settings: dict[str, Any] = dict(eval_dataset=trainers.make_data(160), per_device_eval_batch_size=80)
    ours = make_trainer(tmp_path / "ours", OURS, num_train_epochs=1, eval_strategy="epoch", **settings)
    short = short_memory(ours, 500)
    ours.evaluate()
    assert short.failures == 2, "with 80 samples of 24 tokens, and with half of them"
    assert sum(shape[0] for shape in short.forwards if len(shape) == 2 and shape[0] not in (1, 2, 3, 7)) == 160
    assert max(shape.numel() for shape in short.forwards) == 480, "what is known to fit is filled"
    trainers.without_probe(ours, 100)  # what training takes is another thing
    ours.train()
    ours.predict(settings["eval_dataset"])
    ours.evaluate({"a": settings["eval_dataset"], "b": trainers.make_data(5)})
    assert short.failures == 2


@pytest.mark.parametrize("kind", ["stream", "inputs"])
def test_an_evaluation_whose_batches_others_look_into_is_trainers_own(kind: str, tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(trainers.make_data(9))

    def tokens(given: Any) -> dict[str, float]:
        return {"tokens": 0 if given.inputs is None else float((given.inputs > 0).sum())}

    settings: dict[str, Any] = dict(
        eval_dataset=Stream() if kind == "stream" else {"held out": trainers.make_data(9)}, compute_metrics=tokens,
        include_for_metrics=["inputs"] if kind == "inputs" else [],
    )  # fmt: skip
    stock = make_trainer(tmp_path / "stock", **settings).evaluate()
    found = make_trainer(tmp_path / "ours", AdaptiveArguments(micro_batch_size=4), **settings).evaluate()
    assert {key: found[key] for key in found if "_per_second" not in key and "time" not in key} == {
        key: stock[key] for key in stock if "_per_second" not in key and "time" not in key
    }


def test_a_sample_that_does_not_fit_is_told_with_what_would_help(tmp_path: Path) -> None:
    ours = make_trainer(tmp_path, OURS)
    short_memory(ours, 0)
    with pytest.raises(DoesNotFitError, match=r"cannot be split; set eval_accumulation_steps=1, .* or shorten it"):
        ours.evaluate(trainers.make_data(2))
    off = make_trainer(tmp_path, AdaptiveArguments(micro_batch_size=4, recover_from_oom=False))
    short_memory(off, 0)
    with pytest.raises(torch.OutOfMemoryError):
        off.evaluate(trainers.make_data(2))
