"""Tiny models, samples of many lengths, and trainers on them, ours and those of others."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch.nn.utils.rnn import pad_sequence

from adaptive_batching._probe.sizes import Measurement, ProbeResult
from adaptive_batching._probe.stored_probe import Conditions, StoredProbe
from adaptive_batching.transformers import AdaptiveArguments, adaptive
from tests.support.environment import let_peft_pass_torchao

VOCABULARY = 96
SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=4, intermediate_size=64, num_hidden_layers=2)
DOUBLE = {"_component_": "adaptive_batching.growth.step", "every": 1, "gamma": 2}
LOGS_FOUR_DIGITS = Version(transformers.__version__) < Version("5")
Features = dict[str, Any]
_OF_TRAINER = (
    "callbacks", "compute_loss_func", "compute_metrics", "eval_dataset", "preprocess_logits_for_metrics",
)  # fmt: skip


def make_llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_key_value_heads=2, pad_token_id=0, **{**SIZES, **settings})
    )


def make_bert(kind: str = "BertForMaskedLM", **settings: Any) -> Any:
    """A model without dropout, unless settings have some."""
    torch.manual_seed(0)
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **settings}
    return getattr(transformers, kind)(transformers.BertConfig(num_labels=3, **SIZES, **settings))


class Bigrams(torch.nn.Module):
    """Predicts each token from the one before: a model that compiles in no time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, VOCABULARY)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: Any = None, **given: Any
    ) -> dict[str, torch.Tensor]:
        logits, targets = self.output(self.embedding(input_ids))[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        number = given.get("num_items_in_batch")
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="mean" if number is None else "sum")
        return {"loss": loss if number is None else loss / number, "logits": logits}


def make_bigrams() -> Any:
    torch.manual_seed(0)
    return Bigrams()


def make_classes() -> Any:
    """A model whose loss is a mean over samples, of a kind that Accelerate shards."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_labels=3, num_key_value_heads=2, pad_token_id=0, **SIZES)
    return transformers.LlamaForSequenceClassification(config)


def make_t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def with_lora(model: Any, **settings: Any) -> Any:
    import peft

    let_peft_pass_torchao()
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings))


def make_data(num_samples: int = 40, longest: int = 24) -> list[Features]:
    """Samples of 3 to ``longest`` tokens; a part of each is a prompt, and no target."""
    chance = random.Random(0)
    data = []
    for _ in range(num_samples):
        ids = [chance.randrange(1, VOCABULARY) for _ in range(chance.randrange(3, longest + 1))]
        prompt = chance.randrange(0, len(ids) - 1)
        data.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return data


def collate(samples: list[Features]) -> dict[str, torch.Tensor]:
    def padded(rows: list[Any], value: int) -> torch.Tensor:  # [b, s]
        return pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True, padding_value=value)

    return {
        "input_ids": padded([sample["input_ids"] for sample in samples], 0),
        "attention_mask": padded([[1] * len(sample["input_ids"]) for sample in samples], 0),
        "labels": padded([sample["labels"] for sample in samples], -100),
    }


def collate_classes(samples: list[Features]) -> dict[str, torch.Tensor]:
    return {**collate(samples), "labels": torch.tensor([sample["input_ids"][0] % 3 for sample in samples])}


def make_labelled(num_samples: int) -> list[Features]:
    """Samples with a label each."""
    return [{**sample, "label": sample["input_ids"][0] % 3} for sample in make_data(num_samples)]


def collate_labelled(samples: list[Features]) -> dict[str, torch.Tensor]:
    return {**collate(samples), "labels": torch.tensor([sample["label"] for sample in samples])}


def arguments(folder: Path, kind: Any = transformers.TrainingArguments, **settings: Any) -> Any:
    defaults = dict(
        per_device_train_batch_size=8, num_train_epochs=2, learning_rate=3e-3, logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=os.environ.get("TRAIN_ON", "cpu") == "cpu", disable_tqdm=True, warmup_steps=2,
    )  # fmt: skip
    return kind(output_dir=str(folder), **{**defaults, **settings})


def make_trainer(
    folder: Path,
    ours: AdaptiveArguments | None = None,
    *,
    model: Any = None,
    collator: Callable[..., Any] = collate,
    kind: Any = transformers.Trainer,
    **settings: Any,
) -> Any:
    """Return a trainer of ``kind`` with our behaviour, or ``kind`` itself if ``ours`` is None."""
    given: dict[str, Any] = {key: settings.pop(key) for key in _OF_TRAINER if key in settings}
    data = settings.pop("data", None) or make_data()
    made = kind if ours is None else adaptive(kind)
    args = arguments(folder, **settings)
    if ours is not None:
        given["adaptive"] = ours
    return made(model or make_llama(), args, train_dataset=data, data_collator=collator, **given)


def trained(folder: Path, ours: AdaptiveArguments | None = None, **settings: Any) -> Any:
    """Return a trainer that has trained."""
    trainer = make_trainer(folder, ours, **settings)
    trainer.train()
    return trainer


def growing(folder: Path, *, lr_scaling: str = "none", **settings: Any) -> Any:
    """Return a trainer on batches of 6, 12 and 20 of 40 samples, two of which make a step, in forwards of up to 4."""
    ours = AdaptiveArguments(
        batch_increase_function=DOUBLE, micro_batch_size=4, max_batch_size=24, lr_scaling=lr_scaling
    )
    defaults = dict(
        per_device_train_batch_size=6, gradient_accumulation_steps=2, num_train_epochs=3, warmup_steps=0,
        model=make_llama(attention_dropout=0.2),
    )  # fmt: skip
    return make_trainer(folder, ours, **{**defaults, **settings})


def without_probe(trainer: Any, found: StoredProbe | int) -> Any:
    """Have a trainer take what another has ``found``, or a number of tokens for a forward, and return it."""
    if isinstance(found, int):
        probed = ProbeResult(1, "memory", 1, 1, "predict", 0.0, [Measurement(1, True, 1)], enough=found)
        found = StoredProbe(probed, Conditions({}, {}, {}, {}, {}), upper=found)
    run, known = trainer.adaptive, found

    def find(*args: Any, **kwargs: Any) -> StoredProbe:
        run._known = replace(run._known, stored=known)
        return known

    run._find = find
    return trainer


TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "eval_runtime",
         "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time",
         "train_tokens_per_second", "tokens_per_second_per_device")  # fmt: skip
OURS = {"oom_retries", "batch_size", "global_batch_size", "padding"}
"""What we add to the logs, but for times."""


class _Over(Exception):
    pass


class _EndsBeforeItsFirstStep(transformers.TrainerCallback):
    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        raise _Over


def prepared(trainer: Any) -> Any:
    """Have a trainer find what it finds before its first step, which it does not take; return ``trainer.adaptive``."""
    trainer.add_callback(_EndsBeforeItsFirstStep)
    with contextlib.suppress(_Over):
        trainer.train()
    trainer.remove_callback(_EndsBeforeItsFirstStep)
    return trainer.adaptive


def logged(trainer: Any) -> list[dict[str, Any]]:
    """Return what a trainer has logged, but for times."""
    return [{key: each[key] for key in each if key not in TIMES} for each in trainer.state.log_history]


def losses(trainer: Any) -> list[dict[str, Any]]:
    """Return what a trainer has logged of each step."""
    return [each for each in logged(trainer) if "loss" in each]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def assert_same(ours: Any, theirs: Any, told: Callable[[Any], Any] = logged) -> None:
    """Two trainers have trained alike, bit for bit; one that was resumed has logged the same ``losses``."""
    assert told(ours) == told(theirs)
    expected = weights(theirs)
    for name, value in weights(ours).items():
        assert torch.equal(value, expected[name]), name


def assert_alike(ours: Any, theirs: Any, tolerance: float = 1e-5, *, keys: tuple[str, ...] = ()) -> None:
    """Two trainers have taken the same steps, up to rounding."""
    keys = keys or ("loss", "grad_norm", "learning_rate", "epoch")
    found, expected = losses(ours), losses(theirs)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        for key in keys:
            rounding = 1.01e-4 if key == "loss" and LOGS_FOUR_DIGITS else 0.0
            within = rounding + tolerance * max(abs(other[key]), 1e-8)
            assert abs(one[key] - other[key]) <= within, (key, one, other)


class OutOfMemory:
    """Runs out of memory in forwards of more than ``most_tokens`` padded tokens, as often as ``times``.

    They are those of training, or the others.
    """

    def __init__(self, model: Any, most_tokens: int, times: int = 10**9, *, in_training: bool = True) -> None:
        self.most_tokens, self.left, self.failures, self._in_training = most_tokens, times, 0, in_training
        self.forwards: list[torch.Size] = []
        model.register_forward_pre_hook(self._check, with_kwargs=True)

    def _check(self, model: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() != self._in_training:
            return
        shape = kwargs["input_ids"].shape if "input_ids" in kwargs else args[0].shape  # as in DPO of TRL 0.24
        if shape.numel() > self.most_tokens and self.left:
            self.left -= 1
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.forwards.append(shape)
