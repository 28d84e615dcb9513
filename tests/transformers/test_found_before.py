"""A trainer takes what was found before for as long as it holds, and a run that is resumed keeps its sizes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import transformers

from adaptive_batching._probe.sizes import Measurement, ProbeResult, candidate_sizes
from adaptive_batching.transformers import AdaptiveArguments, adaptive
from tests.transformers import trainers
from tests.transformers.trainers import assert_same, losses, make_trainer

AUTO, MAXIMUM = AdaptiveArguments(micro_batch_size="auto"), AdaptiveArguments(use_maximum_batch_size=True)


class Memory:
    """A device where each sample takes ten bytes, which tells the truth at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 100
        self.probed: list[int] = []
        """What each probe has found."""

        module = "adaptive_batching._transformers.adaptive_run"
        monkeypatch.setattr(f"{module}.probe", self._probe)
        monkeypatch.setattr(f"{module}.memory_budget", lambda *_: self.num_bytes)

    def _probe(self, trainer: Any, step: Any, extremes: Any, settings: Any, request: Any, **_: Any) -> ProbeResult:
        candidates = candidate_sizes(request.upper, powers_of_two=request.rounds)
        size = [each for each in candidates if 10 * each <= self.num_bytes][-1]
        self.probed.append(size)
        reason = "memory" if size < candidates[-1] else request.upper_reason
        predicted = [(each, 10 * each) for each in range(1, 2 * size + 2)]
        measured = [Measurement(size, True, 10 * size)]
        return ProbeResult(size, reason, self.num_bytes, 10**9, "predict", 0.1, measured, predicted)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Memory:
    caplog.set_level(logging.INFO, "adaptive_batching")
    return Memory(monkeypatch)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What has been said of what was found, since the last call."""
    told = [line for line in caplog.messages if "probing again" in line or "keeps its sizes" in line]
    caplog.clear()
    return told


def test_a_second_train_takes_what_the_first_has_found_until_something_changes(
    memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, AUTO, max_steps=1)

    def train() -> list[str]:
        trainer.train()
        return lines(caplog)

    assert train() == train() == [] and memory.probed == [8]
    trainer.args.learning_rate = 1e-5
    trainer.args.num_train_epochs = 7
    trainer.model = trainer.model_wrapped = trainers.make_llama()  # another of the same kind
    assert train() == [] and memory.probed == [8]
    trainer.model = trainer.model_wrapped = trainers.make_llama(intermediate_size=96)
    [line] = train()
    assert "this trainer's probe does not hold, because these changed: model.model.names, shapes and" in line
    trainer.args.gradient_checkpointing = True
    [line] = train()
    assert "run.gradient_checkpointing: False -> True" in line
    trainer.train_dataset = trainers.make_data(longest=30)
    [line] = train()
    assert "run.longest: 24 -> 30" in line
    trainer.args.per_device_train_batch_size = 4
    [line] = train()
    assert "found 8, and now only 4 are of use" in line and trainer.adaptive.max_tokens == 4 * 30
    assert memory.probed == [8, 8, 8, 8, 4]


def test_each_model_of_model_init_has_its_own(memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    widths = iter([64, 64, 96])  # the first is made with the trainer
    trainer = adaptive(transformers.Trainer)(
        model_init=lambda: trainers.make_llama(intermediate_size=next(widths)),
        args=trainers.arguments(tmp_path, max_steps=1),
        train_dataset=trainers.make_data(),
        data_collator=trainers.collate,
        adaptive=AUTO,
    )
    trainer.train()
    assert lines(caplog) == []
    trainer.train()
    assert "model.model.names, shapes and dtypes" in lines(caplog)[0] and memory.probed == [8, 8]


@pytest.mark.wide
@pytest.mark.parametrize("arguments", [AUTO, MAXIMUM], ids=["auto", "maximum"])
def test_a_resumed_run_equals_the_uninterrupted_one_whatever_memory_there_is(
    arguments: AdaptiveArguments, memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(folder: str, **settings: Any) -> Any:
        model = trainers.make_llama(attention_dropout=0.2)
        return make_trainer(tmp_path / folder, arguments, model=model, gradient_accumulation_steps=2, **settings)

    whole = make("whole", save_strategy="steps", save_steps=1)
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    for num_bytes in (100, 400):
        memory.num_bytes = num_bytes
        resumed = make(f"with_{num_bytes}", save_steps=100, num_train_epochs=2)
        resumed.train(str(checkpoint))
        assert_same(resumed, whole, losses)
        assert len(lines(caplog)) == (num_bytes > 100), "that more would fit"
        assert resumed.adaptive.probe == whole.adaptive.probe
    assert len(memory.probed) == 1
    memory.num_bytes = 40
    smaller = make("smaller")
    if arguments is AUTO:  # what the optimizer sees is the same
        smaller.train(str(checkpoint))
        assert memory.probed == [10, 4], "the old one fits no more"
