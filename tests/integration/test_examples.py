"""The trainer of ``examples/``, against stock's ``Trainer`` on the same samples."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra examples)")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("hugging_face_trainer")


class Training:
    """A trainer on the example's model and data, in their order."""

    def __init__(self, example: Any, folder: Path, *, adaptive: bool = True, **settings: Any) -> None:
        ours = {key: settings.pop(key) for key in ("increase", "max_batch_size", "max_tokens") if key in settings}
        model = settings.pop("model", None) or example.make_model()
        collator = settings.pop("collator", None) or example.PaddingCollator()
        defaults = dict(
            per_device_train_batch_size=24, num_train_epochs=2, learning_rate=3e-3, logging_steps=1,
            max_grad_norm=0.5, train_sampling_strategy="sequential", save_strategy="no", report_to="none",
            use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        args = transformers.TrainingArguments(output_dir=str(folder), **{**defaults, **settings})
        kind = example.AdaptiveTrainer if adaptive else transformers.Trainer
        self.data = example.make_data()
        self.trainer = kind(model, args, train_dataset=self.data, data_collator=collator, **ours)
        self.forwards: list[torch.Size] = []
        self.most_tokens = 10**9
        self.trainer.model.register_forward_pre_hook(self._forward, with_kwargs=True)

    def _forward(self, model: Any, args: Any, kwargs: Any) -> None:
        shape = kwargs["input_ids"].shape
        if model is self.trainer.model and torch.is_grad_enabled():
            self.forwards.append(shape)
            if shape.numel() > self.most_tokens and self.trainer.state.global_step == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")

    def run(self, resume_from_checkpoint: str | None = None) -> Training:
        self.trainer.train(resume_from_checkpoint)
        return self

    def logged(self, key: str) -> list[float]:
        return [entry[key] for entry in self.trainer.state.log_history if key in entry]


def assert_trained_alike(ours: Training, theirs: Training, steps: int = 6) -> None:
    assert len(ours.logged("loss")) == len(theirs.logged("loss")) == steps
    for key in ("loss", "grad_norm", "learning_rate", "epoch"):
        assert ours.logged(key) == pytest.approx(theirs.logged(key), rel=1e-3), key
    for (name, weights), expected in zip(
        ours.trainer.model.named_parameters(), theirs.trainer.model.parameters(), strict=True
    ):
        torch.testing.assert_close(weights, expected, rtol=1e-2, atol=1e-4, msg=name)


def test_cut_batches_and_samples_that_run_again_train_as_stock_does(example: Any, tmp_path: Path) -> None:
    stock = Training(example, tmp_path, adaptive=False).run()

    split = Training(example, tmp_path, max_tokens=400).run()
    assert_trained_alike(split, stock)
    assert len(split.forwards) > 12 and max(shape.numel() for shape in split.forwards) <= 400

    failing = Training(example, tmp_path)
    failing.most_tokens = 500
    assert_trained_alike(failing.run(), stock)
    assert failing.trainer.step.max_tokens > failing.most_tokens, "as far as the probe can tell"
    assert failing.logged("oom_retries")[-1] >= 1


def labels_of_texts(example: Any, samples: list[Any]) -> dict[str, torch.Tensor]:
    """Collate ``samples`` for a model that sorts texts into 3 classes."""
    labels = torch.tensor([sample["input_ids"][0] % 3 for sample in samples])
    return {**example.PaddingCollator()(samples), "labels": labels}


SIZES = dict(vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
WITHOUT_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertForMaskedLM", "T5ForConditionalGeneration"])
def test_a_model_whose_loss_is_a_mean_trains_as_stock_does(kind: str, example: Any, tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        torch.manual_seed(0)
        config: Any = transformers.BertConfig(num_labels=3, **SIZES, **WITHOUT_DROPOUT)
        if kind.startswith("T5"):
            config = transformers.T5Config(
                vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0,
                decoder_start_token_id=0,
            )  # fmt: skip
        collator = partial(labels_of_texts, example) if kind.endswith("SequenceClassification") else None
        return {"model": getattr(transformers, kind)(config), "collator": collator, "num_train_epochs": 1}

    stock = Training(example, tmp_path, adaptive=False, **make()).run()
    split = Training(example, tmp_path, max_tokens=400, **make()).run()
    assert_trained_alike(split, stock, steps=3)


@pytest.mark.parametrize(
    ("length_of_run", "steps"),
    [({"max_steps": 8}, 8), ({"num_train_epochs": 1.5}, 5), ({"dataloader_drop_last": True}, 4)],
)
def test_a_run_is_as_long_as_stock_s(length_of_run: dict[str, Any], steps: int, example: Any, tmp_path: Path) -> None:
    stock = Training(example, tmp_path, adaptive=False, **length_of_run).run()
    assert_trained_alike(Training(example, tmp_path, max_tokens=10**6, **length_of_run).run(), stock, steps)


def test_a_growing_run_takes_all_of_max_steps(example: Any, tmp_path: Path) -> None:
    training = growing(example, tmp_path, max_steps=17).run()  # three epochs have 13
    assert len(training.logged("loss")) == 17
    assert training.logged("epoch")[-2:] == [5.0, 5.0]
    to_all_samples = Training(
        example, tmp_path, increase=lambda epoch, size: 10**3 if epoch else 0, max_batch_size=10**4, max_tokens=10**6,
        max_steps=6, dataloader_drop_last=True,
    )  # fmt: skip
    assert len(to_all_samples.run().logged("loss")) == 6, "no epoch without a step"


def growing(example: Any, folder: Path, **settings: Any) -> Training:
    """Batches of 10, 20 and 32, in random order, with dropout."""
    training = Training(
        example, folder, per_device_train_batch_size=10, num_train_epochs=3, max_batch_size=32, max_tokens=10**6,
        increase=example.growth.step(every=1, gamma=2), train_sampling_strategy="random", **settings,
    )  # fmt: skip
    for layer in training.trainer.model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    return training


def test_a_growing_run_ends_its_schedule_with_the_last_sample_and_goes_on_where_it_was_left(
    example: Any, tmp_path: Path
) -> None:
    whole = growing(example, tmp_path, save_strategy="steps", save_steps=1).run()
    assert [shape[0] for shape in whole.forwards] == [10, 10, 10, 10, 10, 10, 4, 20, 20, 20, 4, 32, 32]
    assert whole.logged("epoch")[6::4] == [1.0, 2.0]
    assert whole.logged("epoch")[-1] == 3.0
    rates = whole.logged("learning_rate")
    assert rates[-1] == pytest.approx(rates[0] / 13), "one step before it reaches 0"
    for step in (9, 11, 12):  # the epochs have 7, 4 and 2 steps
        resumed = growing(example, tmp_path / str(step)).run(str(tmp_path / f"checkpoint-{step}"))
        assert resumed.forwards == whole.forwards[step:]
        for key in ("loss", "learning_rate", "epoch"):
            assert resumed.logged(key) == whole.logged(key), key
        for ours, expected in zip(resumed.trainer.model.parameters(), whole.trainer.model.parameters(), strict=True):
            assert torch.equal(ours, expected)
    other = growing(example, tmp_path / "other", data_seed=1).run()
    assert other.forwards != whole.forwards, "the order is not that of the data"
    with pytest.raises(ValueError, match=r"1\.500 epochs were over after step 9, and would be 1\.286 with the batch"):
        Training(example, tmp_path, per_device_train_batch_size=10).run(str(tmp_path / "checkpoint-9"))


def test_what_cannot_be_used_with_it_is_refused(example: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2 must be 1: set per_device_train_batch_size"):
        Training(example, tmp_path, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="train_sampling_strategy='batch_rebalance' makes batches of its"):
        Training(example, tmp_path, train_sampling_strategy="batch_rebalance")
