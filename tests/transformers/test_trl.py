"""TRL's trainers, with LoRA, packed data and what else their users set, against themselves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets")
import transformers  # noqa: E402

from adaptive_batching.transformers import AdaptiveArguments, adaptive  # noqa: E402
from tests.support.pages import blocks  # noqa: E402
from tests.support.wide import few, wide  # noqa: E402
from tests.transformers import trainers  # noqa: E402
from tests.transformers.trainers import OutOfMemory, arguments, assert_alike, logged  # noqa: E402

chance = random.Random(1)


def ids(least: int, most: int) -> list[int]:
    return [chance.randrange(3, trainers.VOCABULARY) for _ in range(chance.randrange(least, most))]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(3, trainers.VOCABULARY)}
    made = Tokenizer(models.WordLevel({**words, "<unk>": 0, "<eos>": 1, "<pad>": 2}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    )


def of_sft(samples: int = 24) -> Any:
    return datasets.Dataset.from_list([{"input_ids": ids(3, 24)} for _ in range(samples)])


def of_texts(samples: int = 24) -> Any:
    def text(least: int, most: int) -> str:
        return " ".join(f"w{number}" for number in ids(least, most))

    rows = [{"prompt": text(2, 8), "chosen": text(2, 16), "rejected": text(2, 16)} for _ in range(samples)]
    return datasets.Dataset.from_list(rows)


def make(kind: str, folder: Path, tokenizer: Any, ours: AdaptiveArguments | None, **settings: Any) -> Any:
    model = trainers.make_llama()
    given: dict[str, Any] = {}
    is_lora, has_prompts = settings.pop("lora", False), settings.pop("has_prompts", False)
    streams = settings.pop("streams", False)
    if is_lora:
        model = trainers.with_lora(model)
    if kind == "SFT":
        made, config, given["train_dataset"] = trl.SFTTrainer, trl.SFTConfig, of_sft()
        settings = {"max_length": 32, **settings}
    elif kind == "DPO":
        made, config, given["train_dataset"] = trl.DPOTrainer, trl.DPOConfig, of_texts()
        if not is_lora:
            given["ref_model"] = trainers.make_llama()
    else:
        made, config, given["train_dataset"] = trl.RewardTrainer, trl.RewardConfig, of_texts().remove_columns("prompt")
        torch.manual_seed(0)
        model = transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(num_labels=1, num_key_value_heads=2, pad_token_id=2, **trainers.SIZES)
        )
    settings = {"gradient_checkpointing": False, "bf16": False, "num_train_epochs": 1, **settings}
    if streams:
        given["train_dataset"] = given["train_dataset"].to_iterable_dataset()
        settings["max_steps"] = 3
    args = arguments(folder, config, **settings)
    if ours is not None:
        made, given["adaptive"] = adaptive(made), ours
    trainer = made(model=model, args=args, processing_class=tokenizer, **given)
    if has_prompts:  # the first half of each sample
        trainer.train_dataset = trainer.train_dataset.map(without_first_half)
    return trainer


def without_first_half(sample: dict[str, Any]) -> dict[str, Any]:
    half = len(sample["labels"]) // 2
    return {"labels": [-100] * half + sample["labels"][half:]}


@pytest.fixture(autouse=True)
def same_data() -> None:
    chance.seed(1)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("SFT", {}),
    ("SFT", {"packing": True}),
    ("SFT", {"padding_free": True, "max_length": None}),
    ("SFT", {"gradient_checkpointing": True, "has_prompts": True}),
    ("SFT", {"lora": True, "neftune_noise_alpha": None}),
    ("SFT", {"streams": True}),
    ("DPO", {}),
    ("DPO", {"streams": True}),
    ("DPO", {"lora": True, "loss_type": ["sigmoid_norm"]}),
    ("Reward", {}),
]
NARROW: list[tuple[str, dict[str, Any]]] = [("SFT", {}), ("Reward", {})]


METRICS = {
    "SFT": ("entropy", "mean_token_accuracy"),
    "DPO": (
        "rewards/chosen", "rewards/margins", "logps/rejected", "logits/chosen", "logits/rejected",
        "mean_token_accuracy", "entropy",
    ),
    "Reward": ("accuracy", "margin", "mean_reward", "min_reward", "max_reward"),
}  # fmt: skip
"""What TRL logs of a batch: means over what the loss is one of, or over tokens, and extremes."""


@pytest.mark.parametrize(
    ("kind", "settings", "ours"),
    [
        *((*case, "auto") if case in NARROW else wide(*case, "auto") for case in CASES),
        wide("SFT", {}, 3),
        ("SFT", {}, None),
        ("DPO", {}, 3),
        wide("DPO", {}, None),
        wide("Reward", {}, 3),
        wide("Reward", {}, None),
    ],
    ids=str,
)
def test_a_trainer_of_trl_trains_as_before(
    kind: str, settings: dict[str, Any], ours: Any, tokenizer: Any, tmp_path: Path
) -> None:
    stock = make(kind, tmp_path / "stock", tokenizer, None, **settings)
    stock.train()
    chance.seed(1)
    split = make(kind, tmp_path / "ours", tokenizer, AdaptiveArguments(micro_batch_size=ours), **settings)
    if ours == "auto":
        trainers.without_probe(split, 64)
    watched = OutOfMemory(split.model, 10**9)
    split.train()
    if ours is None:
        return trainers.assert_same(split, stock)
    assert len(watched.forwards) > stock.state.global_step
    if ours == "auto" and kind == "SFT":  # others run two answers to a sample
        most = max(shape.numel() for shape in watched.forwards[2:])  # the first have told what the loss is
        assert most <= 64, "as many as fit, with padding and without"
        assert split.adaptive.step.in_rows
    assert_alike(split, stock)
    assert_alike(split, stock, 1e-3, keys=METRICS[kind])
    found, expected = (next(each for each in logged(one) if "loss" in each) for one in (split, stock))
    assert found.keys() == {*expected, *trainers.OURS}
    assert found["num_tokens"] == expected["num_tokens"], "each sample counts once"


@pytest.mark.parametrize("kind", few(["SFT", "DPO", "Reward"], "SFT"))
def test_what_is_counted_in_a_step_that_runs_again_counts_once(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    trained, failures = [], 0
    for ours in (None, AdaptiveArguments(micro_batch_size=8)):
        chance.seed(1)
        trainer = make(kind, tmp_path, tokenizer, ours)
        short = OutOfMemory(trainer.model, 10**9 if ours is None else 110)
        trainer.train()
        trained.append(trainer)
        failures = short.failures
    stock, split = trained
    assert failures
    assert_alike(split, stock, 1e-3, keys=METRICS[kind])
    found, expected = (next(each for each in logged(one) if "loss" in each) for one in (split, stock))
    assert found["num_tokens"] == expected["num_tokens"]


def test_the_probe_and_checks_count_nothing(tokenizer: Any, tmp_path: Path) -> None:
    trainer = make("SFT", tmp_path, tokenizer, AdaptiveArguments(micro_batch_size="auto"))
    trainers.prepared(trainer)
    assert trainer._total_train_tokens == 0 and not any(map(len, trainer._metrics.values()))


@pytest.mark.parametrize("kind", few(["SFT", "DPO", "Reward"], "DPO"))
def test_an_evaluation_in_parts_gives_what_it_would_have_given(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    found, predicted = [], []

    def keep(given: Any) -> dict[str, float]:
        predicted.append([torch.tensor(each[:, :2]) for each in (given.predictions, given.label_ids)])
        return {}

    for ours in (None, AdaptiveArguments(micro_batch_size=8)):
        chance.seed(1)
        trainer = make(kind, tmp_path, tokenizer, ours, per_device_eval_batch_size=6)
        trainer.compute_metrics = keep if kind == "DPO" else None
        short = OutOfMemory(trainer.model, 130 if ours else 10**9, in_training=False)
        found.append(trainer.evaluate(trainer.train_dataset.select(range(20))))
    assert short.failures
    stock, in_parts = found
    assert in_parts.keys() == stock.keys()
    for key in set(stock) - set(trainers.TIMES):
        assert in_parts[key] == pytest.approx(stock[key], rel=1e-4, abs=1e-6), key
    if kind == "DPO":
        torch.testing.assert_close(*predicted, rtol=1e-4, atol=1e-5)


def test_the_script_of_the_page_trains(tokenizer: Any, tmp_path: Path) -> None:
    [script] = [
        block.text for block in blocks("python") if "SFTTrainer" in block.text and "processing_class" in block.text
    ]
    args = arguments(tmp_path, trl.SFTConfig, bf16=False, num_train_epochs=1)
    names: dict[str, Any] = dict(
        SFTTrainer=trl.SFTTrainer, model=trainers.make_llama(), args=args, data=of_sft(), tokenizer=tokenizer
    )
    exec(script, names)
    assert names["trainer"].adaptive.probe.enough == 8
    assert names["trainer"].state.global_step == 3
