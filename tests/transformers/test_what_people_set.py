"""What people set or override in a Trainer keeps working when its batches run in parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from adaptive_batching import ConfigError
from adaptive_batching.transformers import AdaptiveArguments, adaptive
from tests.transformers import trainers
from tests.transformers.trainers import make_trainer


class Steps(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Writes down what a callback is told of, with the step."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda args, state, control, **kwargs: self.told.append((name, state.global_step))


def test_callbacks_are_told_what_they_were_told(tmp_path: Path) -> None:
    told = {}
    for name, arguments in {"stock": None, "ours": AdaptiveArguments(micro_batch_size=3)}.items():
        callback = Steps()
        make_trainer(
            tmp_path / name, arguments, callbacks=[callback], gradient_accumulation_steps=3, save_strategy="epoch",
            eval_strategy="epoch", eval_dataset=trainers.make_data(5),
        ).train()  # fmt: skip
        told[name] = callback.told
    # An epoch's last step, of fewer batches, takes as many substeps as the others.
    steps = {name: [each for each in of if each[0] != "on_substep_end"] for name, of in told.items()}
    assert steps["ours"] == steps["stock"]
    assert {"on_substep_end", "on_evaluate", "on_save", "on_log"} <= {name for name, _ in told["ours"]}


class Epochs(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Writes down how many epochs are over when a step ends."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(state.epoch)


def test_a_callback_finds_how_many_epochs_are_over(tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(gradient_accumulation_steps=3)  # the second step of an epoch has two batches
    seen = []
    for name, arguments in {"stock": None, "ours": AdaptiveArguments(micro_batch_size=3)}.items():
        seen.append(Epochs())
        make_trainer(tmp_path / name, arguments, callbacks=[seen[-1]], **settings).train()
    assert seen[1].seen == pytest.approx(seen[0].seen) and seen[0].seen == pytest.approx([0.6, 1, 1.6, 2])
    grown = Epochs()
    trainers.growing(tmp_path / "growing", callbacks=[grown]).train()
    assert grown.seen == pytest.approx([2 / 7, 4 / 7, 6 / 7, 1, 1.5, 2, 3])


class Slotted:
    """A collate function without a dictionary of attributes."""

    __slots__ = ("pads",)

    def __init__(self) -> None:
        self.pads = True

    def __call__(self, samples: list[trainers.Features]) -> dict[str, torch.Tensor]:
        return trainers.collate(samples)


class Counting(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Has an attribute that trainers of TRL have, for something else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics = {"train": 3}


def test_a_collate_function_with_slots_and_attributes_of_any_name_work_as_before(tmp_path: Path) -> None:
    made: dict[str, Any] = dict(collator=Slotted(), kind=Counting, num_train_epochs=1)
    stock = trainers.trained(tmp_path / "stock", **made)
    ours = trainers.trained(tmp_path / "ours", AdaptiveArguments(micro_batch_size="auto"), **made)
    trainers.assert_alike(ours, stock)
    held_out = trainers.make_data(5)
    assert ours.evaluate(held_out)["eval_loss"] == pytest.approx(stock.evaluate(held_out)["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("setting", [{"micro_batch_size": "auto"}, {"batch_increase_function": trainers.DOUBLE}])
def test_no_epochs_train_nothing_as_before(setting: dict[str, Any], tmp_path: Path) -> None:
    stock = trainers.trained(tmp_path / "stock", num_train_epochs=0)
    ours = trainers.trained(tmp_path / "ours", AdaptiveArguments(**setting), num_train_epochs=0)
    trainers.assert_same(ours, stock)


@pytest.mark.parametrize("method", ["training_step", "prediction_step"])
def test_a_class_that_overrides_a_step_of_ours_is_refused_when_it_is_made(method: str) -> None:
    def step(self: Any, *args: Any) -> Any:
        return args

    base, mixin = adaptive(transformers.Trainer), type("Mixin", (), {method: step})
    for bases, members in (((base,), {method: step}), ((mixin, base), {})):
        with pytest.raises(ConfigError, match=rf"{method} of Mine .* write class Mine\(Trainer\), and adaptive\(Mine"):
            type("Mine", bases, members)
    assert issubclass(adaptive(type("Mine", (transformers.Trainer,), {method: step})), transformers.Trainer)


def test_an_early_stop_and_the_best_model_work_as_before(tmp_path: Path) -> None:
    stopped = {}
    for name, arguments in {"stock": None, "ours": AdaptiveArguments(micro_batch_size=3)}.items():
        stopped[name] = trainer = make_trainer(
            tmp_path / name, arguments, num_train_epochs=6, load_best_model_at_end=True,
            save_strategy="epoch", eval_strategy="epoch", eval_dataset=trainers.make_data(9),
            callbacks=[transformers.EarlyStoppingCallback(1, early_stopping_threshold=9.0)],
        )  # fmt: skip
        trainer.train()
    assert stopped["ours"].state.global_step == stopped["stock"].state.global_step == 10
    best = [trainer.state.best_model_checkpoint.rpartition("/")[2] for trainer in stopped.values()]
    assert best[0] == best[1]


class Hub:
    """Stands in for the Hub, and keeps what huggingface_hub chooses to upload."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uploaded: dict[str, int] = {}  # bytes by path
        monkeypatch.setattr("huggingface_hub.hf_api.is_xet_available", lambda: False)
        monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *args, **kwargs: SimpleNamespace(repo_id="a/b"))
        monkeypatch.setattr("huggingface_hub.HfApi.create_commit", self._commit)
        monkeypatch.setattr("huggingface_hub.HfApi._validate_yaml", lambda *args, **kwargs: None)  # of a model card

    def _commit(self, *, operations: list[Any], **kwargs: Any) -> None:
        for each in operations:
            self.uploaded[each.path_in_repo] = len(Path(each.path_or_fileobj).read_bytes())


class PagesDone(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Sees what the folder has when an upload begins: all of a checkpoint, and a page that is complete."""

    trainer: Any
    pages = 0

    def on_push_begin(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        assert not checkpoint.is_dir() or (checkpoint / "adaptive_batching.json").is_file()
        report = self.trainer._recording.report
        if report is not None and report._page is not None:
            self.pages += 1
            assert report._page.poll() is not None


@pytest.mark.usefixtures("makes_pages")
def test_what_is_pushed_to_the_hub_gets_the_record_and_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uploaded = {}
    for name, arguments in {"stock": None, "ours": AdaptiveArguments(micro_batch_size=3)}.items():
        hub, seen = Hub(monkeypatch), PagesDone()
        seen.trainer = trainer = make_trainer(
            tmp_path / name, arguments, max_steps=8, save_strategy="epoch", push_to_hub=True, hub_always_push=True,
            hub_model_id="a/b", hub_strategy="checkpoint", hub_token="hf_secret",
        )  # fmt: skip
        if arguments is not None:
            trainer.add_callback(seen)
        trainer.train()
        for job in trainer.push_in_progress.jobs:
            job.result()
        trainer.push_to_hub()
        uploaded[name] = hub.uploaded
    assert seen.pages, "one was being made"
    more = {path: size for path, size in uploaded["ours"].items() if path not in uploaded["stock"]}
    assert more.keys() == {
        "adaptive_batching/report.html", "adaptive_batching/report.jsonl", "last-checkpoint/adaptive_batching.json"
    }  # fmt: skip
    assert uploaded["stock"].keys() <= uploaded["ours"].keys()
    assert max(more.values()) < 200_000
    assert "hf_secret" not in (tmp_path / "ours" / "adaptive_batching" / "report.jsonl").read_text()
    assert "could not be made" not in caplog.text
