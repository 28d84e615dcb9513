"""The trainer of ``examples/``, against stock's ``Trainer`` on the same samples."""

from __future__ import annotations

import importlib
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
        defaults = dict(
            per_device_train_batch_size=24, num_train_epochs=2, learning_rate=3e-3, logging_steps=1,
            max_grad_norm=0.5, train_sampling_strategy="sequential", save_strategy="no", report_to="none",
            use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        args = transformers.TrainingArguments(output_dir=str(folder), **{**defaults, **settings})
        kind = example.AdaptiveTrainer if adaptive else transformers.Trainer
        self.data = example.make_data()
        self.trainer = kind(
            example.make_model(), args, train_dataset=self.data, data_collator=example.PaddingCollator(), **ours
        )
        self.forwards: list[torch.Size] = []
        self.most_tokens = 10**9
        self.trainer.model.register_forward_pre_hook(self._forward, with_kwargs=True)

    def _forward(self, model: Any, args: Any, kwargs: Any) -> None:
        shape = kwargs["input_ids"].shape
        if model is self.trainer.model and torch.is_grad_enabled():
            self.forwards.append(shape)
            if shape.numel() > self.most_tokens and self.trainer.state.global_step == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")

    def run(self) -> Training:
        self.trainer.train()
        return self

    def logged(self, key: str) -> list[float]:
        return [entry[key] for entry in self.trainer.state.log_history if key in entry]


def assert_trained_alike(ours: Training, theirs: Training) -> None:
    assert len(ours.logged("loss")) == len(theirs.logged("loss")) == 6
    for key in ("loss", "grad_norm", "learning_rate", "epoch"):
        assert ours.logged(key) == pytest.approx(theirs.logged(key), rel=1e-3), key
    for (name, weights), expected in zip(
        ours.trainer.model.named_parameters(), theirs.trainer.model.parameters(), strict=True
    ):
        torch.testing.assert_close(weights, expected, rtol=1e-2, atol=1e-4, msg=name)


def test_cut_batches_and_samples_that_run_again_train_as_stock_does(example: Any, tmp_path: Path) -> None:
    stock = Training(example, tmp_path, adaptive=False).run()

    cut = Training(example, tmp_path, max_tokens=400).run()
    assert_trained_alike(cut, stock)
    assert len(cut.forwards) > 12 and max(shape.numel() for shape in cut.forwards) <= 400

    failing = Training(example, tmp_path)
    failing.most_tokens = 500
    assert_trained_alike(failing.run(), stock)
    assert failing.trainer.step.max_tokens > failing.most_tokens, "as far as the probe can tell"
    assert failing.logged("out_of_memory_recoveries")[-1] >= 1


def test_a_growing_batch_ends_its_schedule_with_the_last_sample(example: Any, tmp_path: Path) -> None:
    increase = example.growth.step(every=1, gamma=2)
    training = Training(
        example, tmp_path, per_device_train_batch_size=10, num_train_epochs=3, increase=increase, max_batch_size=32,
        train_sampling_strategy="random", max_tokens=10**6,
    )  # fmt: skip
    training.run()
    sizes = [shape[0] for shape in training.forwards]
    assert sizes == [10, 10, 10, 10, 10, 10, 4, 20, 20, 20, 4, 32, 32]
    assert training.logged("epoch")[6::4] == [1.0, 2.0]
    assert training.logged("epoch")[-1] == 3.0
    rates = training.logged("learning_rate")
    assert rates[-1] == pytest.approx(rates[0] / 13), "one step before it reaches 0"


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2 must be 1: set per_device_train_batch_size")],
)
def test_what_cannot_be_used_with_it_is_refused(
    setting: dict[str, Any], message: str, example: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        Training(example, tmp_path, **setting)


def test_a_growing_run_is_not_resumed(example: Any, tmp_path: Path) -> None:
    training = Training(example, tmp_path, increase=example.growth.step())
    with pytest.raises(ValueError, match="resume_from_checkpoint"):
        training.trainer.train(resume_from_checkpoint=True)
