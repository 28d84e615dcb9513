"""``trainer.adaptive.find()`` tells what fits, and the plan, before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from adaptive_batching import ConfigError, DoesNotFitError
from adaptive_batching._device import RandomState
from adaptive_batching._transformers.trainer_probe import probe
from adaptive_batching.transformers import AdaptiveArguments
from tests.transformers import trainers
from tests.transformers.trainers import OutOfMemory, assert_same, make_trainer, weights

CPU = torch.device("cpu")

CASES: dict[str, tuple[AdaptiveArguments, dict[str, Any], int]] = {
    "auto": (
        AdaptiveArguments(micro_batch_size="auto"),
        {"neftune_noise_alpha": 5.0, "gradient_checkpointing": True, "gradient_accumulation_steps": 2}, 1,
    ),
    "maximum": (
        AdaptiveArguments(use_maximum_batch_size=True, batch_increase_function=trainers.DOUBLE,
                          max_batch_size=16),
        {"per_device_train_batch_size": 4, "optim": "sgd"}, 1,
    ),
    "nothing to probe": (AdaptiveArguments(micro_batch_size=3), {}, 0),
}  # fmt: skip


def adds_noise(trainer: Any) -> bool:
    return any("neftune" in hook.__name__ for hook in trainer.model.get_input_embeddings()._forward_hooks.values())


@pytest.mark.parametrize("case", CASES)
def test_what_is_found_before_training_is_what_it_trains_with_and_leaves_no_trace(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, settings, probes = CASES[case]
    probed: list[Any] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        probed.append(probe(*args, **kwargs))
        return probed[-1]

    monkeypatch.setattr("adaptive_batching._transformers.adaptive_run.probe", counted)

    def make(folder: str) -> Any:
        model = trainers.make_llama(attention_dropout=0.2)
        return make_trainer(
            tmp_path / folder,
            arguments,
            model=model,
            eval_dataset=trainers.make_data(5),
            num_train_epochs=1,
            **settings,
        )

    ours, whole = make("ours"), make("whole")
    before, random_state = weights(ours), RandomState(CPU)
    found = ours.adaptive.find()
    assert found is ours.adaptive and len(probed) == probes
    assert all(torch.equal(value, before[name]) for name, value in weights(ours).items())
    assert all(parameter.grad is None for parameter in ours.model.parameters())
    assert RandomState(CPU) == random_state
    assert not adds_noise(ours) and ours.optimizer is None and not ours.is_in_train
    assert [*tmp_path.glob("ours/**/*")] == []
    told = str(found).splitlines()
    if ours.adaptive._known.stored is not None:
        trainers.without_probe(whole, ours.adaptive._known.stored)
    for trainer in (whole, ours):
        transformers.set_seed(1)
        trainer.evaluate()
        trainer.train()
    assert_same(ours, whole)
    assert f"the plan: {whole.state.global_step} steps" in told
    assert told == str(ours.adaptive).splitlines() and len(probed) == probes, "it is not probed again"
    assert ours.adaptive.find() is ours.adaptive and len(probed) == probes, "nor after training"


def test_where_nothing_fits_it_says_so_and_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    ours = make_trainer(tmp_path, AdaptiveArguments(micro_batch_size="auto"), neftune_noise_alpha=5.0)
    OutOfMemory(ours.model, 0)
    random_state = RandomState(CPU)
    with pytest.raises(DoesNotFitError):
        ours.adaptive.find()
    assert RandomState(CPU) == random_state
    assert not adds_noise(ours) and not ours.is_in_train


def test_with_a_sharded_model_it_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_trainer(tmp_path, AdaptiveArguments(micro_batch_size="auto"))
    monkeypatch.setattr(ours, "is_fsdp_enabled", True)
    with pytest.raises(ConfigError, match=r"find\(\) would leave the model sharded; .*on_train_begin") as caught:
        ours.adaptive.find()
    assert "\n" not in str(caught.value)


class Keeping(transformers.Trainer):
    """Keeps what it has computed, in lists and by a hook, and computes with it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight, self.kept, self.sums = torch.ones(()), [torch.zeros(())], dict[str, torch.Tensor]()
        self.model.register_forward_hook(self.note)
        sums: dict[str, torch.Tensor] = {}

        def note(module: Any, args: Any, output: Any) -> None:
            sums["all"] = sums.get("all", 0.0) + output.logits.detach().sum()
            output.loss = output.loss + 0 * sums["all"]

        self.model.register_forward_hook(note)

    def note(self, module: Any, args: Any, output: Any) -> None:
        self.sums["all"] = self.sums.get("all", 0.0) + output.logits.detach().sum()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs) * self.weight
        self.weight = self.weight * 1.0
        self.kept.append(self.kept[-1] + loss.detach())
        return loss + 0 * self.kept[-1]


def test_nothing_of_a_probe_stays_in_what_a_trainer_and_hooks_keep(tmp_path: Path) -> None:
    auto = AdaptiveArguments(micro_batch_size="auto")
    probed = make_trainer(tmp_path / "a", auto, kind=Keeping, num_train_epochs=1)
    probed.adaptive.find()
    assert probed.sums == {} and len(probed.kept) == 1
    probed.train()
    given = make_trainer(tmp_path / "b", auto, kind=Keeping, num_train_epochs=1)
    trainers.without_probe(given, probed.adaptive._known.stored)
    given.train()
    assert_same(probed, given)


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


@pytest.mark.parametrize(("size", "forwards"), [(4, 10), ("auto", 5)])
def test_what_a_loss_logs_is_sent_for_parts_of_training_and_never_for_checks_and_the_probe(
    size: Any, forwards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, ours = Heard(), AdaptiveArguments(micro_batch_size=size, audit_every=1)
    trainer = make_trainer(tmp_path, ours, kind=Telling, callbacks=[heard], num_train_epochs=1)
    sent: list[Any] = []
    monkeypatch.setattr(trainer.accelerator, "log", sent.append)
    trainer.adaptive.find()
    assert heard.logs == len(sent) == 0 and trainer.state.log_history == []
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


@pytest.mark.parametrize("given", [{"micro_batch_size": 40}, {"use_maximum_batch_size": True, "max_batch_size": 40}])
def test_what_a_collate_function_draws_in_training_is_what_it_draws_first(given: Any, tmp_path: Path) -> None:
    """The step is one forward, so that it draws as Trainer does; what comes before draws nothing, nor do audits."""
    settings: dict[str, Any] = dict(per_device_train_batch_size=40, num_train_epochs=3)
    ours = AdaptiveArguments(**given, audit_every=1)
    adapted = make_trainer(tmp_path / "ours", ours, collator=Masking(), **settings)
    adapted.adaptive.find()
    adapted.train()
    stock = make_trainer(tmp_path / "stock", collator=Masking(), **settings)
    stock.train()
    trainers.assert_alike(adapted, stock)
