"""What a trainer does before its first step leaves no trace in what it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from adaptive_batching.transformers import AdaptiveArguments, adopt
from tests.support.wide import few, wide
from tests.transformers import trainers
from tests.transformers.strangers import weighted_sum
from tests.transformers.trainers import assert_same, make_trainer

CPU = torch.device("cpu")

CASES: dict[str, tuple[AdaptiveArguments, dict[str, Any], bool]] = {
    "auto": (
        AdaptiveArguments(micro_batch_size="auto"),
        {"neftune_noise_alpha": 5.0, "gradient_checkpointing": True, "gradient_accumulation_steps": 2}, True,
    ),
    "maximum": (
        AdaptiveArguments(use_maximum_batch_size=True, batch_increase_function=trainers.DOUBLE,
                          max_batch_size=16),
        {"per_device_train_batch_size": 4, "optim": "sgd"}, True,
    ),
    "autocast": (AdaptiveArguments(use_maximum_batch_size=True, max_batch_size=8), {"bf16": True}, True),
    "nothing to probe": (AdaptiveArguments(micro_batch_size=3), {}, False),
}  # fmt: skip


@pytest.mark.parametrize("case", few(CASES, "auto", "maximum"))
def test_a_run_that_probes_trains_as_one_that_is_given_what_it_finds(case: str, tmp_path: Path) -> None:
    arguments, settings, probes = CASES[case]

    def make(folder: str) -> Any:
        model = trainers.make_llama(attention_dropout=0.2)
        transformers.set_seed(1)
        return make_trainer(tmp_path / folder, arguments, model=model, num_train_epochs=1, **settings)

    ours, given = make("ours"), make("given")
    transformers.set_seed(1)
    ours.train()
    assert (ours.adaptive.probe is not None) == probes
    if probes:
        trainers.without_probe(given, ours.adaptive._known.stored)
    transformers.set_seed(1)
    given.train()
    assert_same(ours, given)
    assert str(ours.adaptive) == str(given.adaptive)


class Keeping(transformers.Trainer):
    """Keeps what it has computed, in a tensor, a buffer by a hook, and a list with a state, and computes with it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight, self.kept = torch.ones(()), [torch.zeros(())]
        self.model.register_buffer("sum", torch.zeros(()))
        self.model.register_forward_hook(self.note)

    def note(self, module: Any, args: Any, output: Any) -> None:
        module.sum += output.logits.detach().sum()
        output.loss = output.loss + 0 * module.sum

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs) * self.weight
        self.weight = self.weight * 1.0
        self.kept.append(self.kept[-1] + loss.detach())
        return loss + 0 * self.kept[-1]


def test_nothing_of_a_probe_stays_in_what_a_trainer_and_hooks_keep(tmp_path: Path) -> None:
    auto = AdaptiveArguments(micro_batch_size="auto")

    def make(name: str) -> Any:
        trainer = make_trainer(tmp_path / name, kind=Keeping, num_train_epochs=1)
        return adopt(trainer, auto, state=[trainer])

    probed = make("a")
    probed.train()
    given = make("b")
    trainers.without_probe(given, probed.adaptive._known.stored)
    given.train()
    assert_same(probed, given)
    assert len(probed.kept) == len(given.kept) and probed.model.sum == given.model.sum


class Remembers:
    """A loss that keeps what it has computed."""

    def __init__(self) -> None:
        self.history: list[float] = []
        self.before_training: int | None = None

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = weighted_sum(outputs, labels, num_items_in_batch)
        self.history.append(float(loss.detach()))
        return loss


class WhenTrainingBegins(transformers.TrainerCallback):
    def __init__(self, loss: Remembers) -> None:
        self._loss = loss

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._loss.before_training is None:
            self._loss.before_training = len(self._loss.history)


@pytest.mark.parametrize("given", [{"recover_from_oom": True}, {"micro_batch_size": "auto"}])
def test_what_checks_and_a_probe_have_changed_is_reported_in_one_line_with_what_to_do(
    given: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loss = Remembers()
    callbacks = [WhenTrainingBegins(loss)]
    trainer = make_trainer(
        tmp_path, AdaptiveArguments(**given), compute_loss_func=loss, callbacks=callbacks, max_steps=2
    )
    trainer.train()
    [line] = [record.getMessage() for record in caplog.records if "were not undone" in record.getMessage()]
    assert loss.before_training
    assert f"undone: compute_loss_func.history grew by {loss.before_training}. If they matter, pass " in line
    assert "adopt(trainer, ..., state=[...])" in line
    caplog.clear()
    trainer.train()
    assert "were not undone" not in caplog.text


class Telling(transformers.Trainer):
    """Logs what its loss computes, in each of the ways that there are."""

    control: Any

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.log({"seen": 1.0})
        self.accelerator.log({"seen": 1.0})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, {"seen": 1.0})
        return loss


class Heard(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.logs = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs += "seen" in logs


@pytest.mark.parametrize(("size", "forwards"), [wide(4, 10), ("auto", 5)])
def test_what_a_loss_logs_is_sent_for_parts_of_training_and_never_for_checks_and_the_probe(
    size: Any, forwards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, ours = Heard(), AdaptiveArguments(micro_batch_size=size, audit_every=1)
    trainer = make_trainer(tmp_path, ours, kind=Telling, callbacks=[heard], num_train_epochs=1)
    sent: list[Any] = []
    monkeypatch.setattr(trainer.accelerator, "log", sent.append)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "seen" in entry]
    assert (len(history), len(sent), heard.logs) == (forwards, forwards, 2 * forwards)


class Masking:
    """Masks targets at random, by a generator of its own that it makes when it first needs it, as transformers does."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __call__(self, samples: list[trainers.Features]) -> dict[str, torch.Tensor]:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(7)
        batch = trainers.collate(samples)
        drawn = torch.rand(batch["labels"].shape, generator=self.generator)
        return {**batch, "labels": batch["labels"].masked_fill(drawn < 0.2, -100)}


@pytest.mark.parametrize(
    "given", [wide({"micro_batch_size": 40}), {"use_maximum_batch_size": True, "max_batch_size": 40}]
)
def test_what_a_collate_function_draws_in_training_is_what_it_draws_first(given: Any, tmp_path: Path) -> None:
    """The step is one forward, so that it draws as Trainer does; what comes before draws nothing, nor do audits."""
    settings: dict[str, Any] = dict(per_device_train_batch_size=40, num_train_epochs=3)
    ours = AdaptiveArguments(**given, audit_every=1)
    adapted = make_trainer(tmp_path / "ours", ours, collator=Masking(), **settings)
    adapted.train()
    stock = make_trainer(tmp_path / "stock", collator=Masking(), **settings)
    stock.train()
    trainers.assert_alike(adapted, stock)
