"""A batch in parts trains as the whole batch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from adaptive_batching import DoesNotFitError
from adaptive_batching.transformers import AdaptiveArguments
from tests.support.wide import few, wide
from tests.transformers import trainers
from tests.transformers.trainers import OutOfMemory, assert_alike, logged, make_trainer, trained, without_probe

KINDS: dict[str, dict[str, Any]] = {
    "Llama": {"model": trainers.make_llama},
    "BertForMaskedLM": {"model": trainers.make_bert},
    "BertForSequenceClassification": {
        "model": lambda: trainers.make_bert("BertForSequenceClassification"),
        "collator": trainers.collate_classes,
    },
    "T5": {"model": trainers.make_t5},
    "label smoothing": {"model": trainers.make_llama, "label_smoothing_factor": 0.1},
}


def of_kind(kind: str, **settings: Any) -> dict[str, Any]:
    made = {**KINDS[kind], **settings}
    return {**made, "model": made["model"]()}


def auto() -> AdaptiveArguments:
    return AdaptiveArguments(micro_batch_size="auto")


def test_parts_of_a_number_are_what_accumulation_makes_of_a_batch(tmp_path: Path) -> None:
    stock = trained(tmp_path / "stock", per_device_train_batch_size=2, gradient_accumulation_steps=4)
    ours = make_trainer(tmp_path / "ours", AdaptiveArguments(micro_batch_size=2))
    watched = OutOfMemory(ours.model, 10**9)
    ours.train()
    assert max(shape[0] for shape in watched.forwards[-20:]) == 2
    assert_alike(ours, stock, 1e-7)
    first = logged(ours)[0]
    assert first.keys() == {*logged(stock)[0], *trainers.OURS}
    assert (first["oom_retries"], first["batch_size"], first["global_batch_size"]) == (0, 8, 8)


@pytest.mark.parametrize("kind", few(KINDS, "Llama", "BertForSequenceClassification"))
def test_a_batch_in_parts_has_the_losses_of_the_whole(kind: str, tmp_path: Path) -> None:
    stock = trained(tmp_path / "stock", **of_kind(kind))
    split = without_probe(make_trainer(tmp_path / "ours", auto(), **of_kind(kind)), 60)
    watched = OutOfMemory(split.model, 10**9)
    split.train()
    assert_alike(split, stock)
    assert max(shape.numel() for shape in watched.forwards[-12:]) <= 60


@pytest.mark.parametrize(
    "settings",
    [
        wide({"gradient_accumulation_steps": 3}),
        wide({"gradient_accumulation_steps": 3, "max_steps": 5}),
        {"gradient_accumulation_steps": 2, "num_train_epochs": 2.5},
        {"gradient_accumulation_steps": 2, "dataloader_drop_last": True},
        wide({"gradient_checkpointing": True}),
        wide({"train_sampling_strategy": "group_by_length"}),
        wide({"max_grad_norm": 0.1}),
        wide({"dataloader_num_workers": 1, "num_train_epochs": 1}),
    ],
    ids=str,
)
def test_what_the_optimizer_sees_is_what_trainer_shows_it(settings: dict[str, Any], tmp_path: Path) -> None:
    stock = trained(tmp_path / "stock", **settings)
    split = without_probe(make_trainer(tmp_path / "ours", auto(), **settings), 50)
    split.train()
    assert_alike(split, stock)
    assert split.state.global_step == stock.state.global_step


@pytest.mark.parametrize(("kind", "accumulated"), [("Llama", 2), wide("BertForSequenceClassification", 1), ("T5", 2)])
def test_samples_that_run_out_of_memory_run_again_and_count_once(kind: str, accumulated: int, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": accumulated, "include_num_input_tokens_seen": "non_padding"}
    stock = trained(tmp_path / "stock", **of_kind(kind, per_device_train_batch_size=8 * accumulated,
                         **{**settings, "gradient_accumulation_steps": 1}))  # fmt: skip
    ours = make_trainer(tmp_path / "ours", AdaptiveArguments(micro_batch_size=8), **of_kind(kind, **settings))
    short = OutOfMemory(ours.model, 100)
    ours.train()
    assert_alike(ours, stock, keys=("loss", "grad_norm", "learning_rate"))
    assert ours.adaptive.num_recoveries == logged(ours)[-2]["oom_retries"] >= 1
    assert max(shape.numel() for shape in short.forwards) <= 100
    assert ours.state.num_input_tokens_seen == stock.state.num_input_tokens_seen


@pytest.mark.parametrize("accumulated", few([1, 2], 2))
def test_recovery_alone_is_a_setting_and_nothing_recovers_without_any(accumulated: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": accumulated}
    stock = trained(tmp_path / "stock", **settings)
    off = make_trainer(tmp_path / "off", AdaptiveArguments(), **settings)
    assert off.adaptive is None
    OutOfMemory(off.model, 100)
    with pytest.raises(torch.OutOfMemoryError):
        off.train()
    ours = make_trainer(tmp_path / "ours", AdaptiveArguments(recover_from_oom=True), **settings)
    short = OutOfMemory(ours.model, 100)
    ours.train()
    assert short.failures and ours.adaptive.num_recoveries >= 1
    assert_alike(ours, stock)


def test_a_sample_that_does_not_fit_ends_the_run_in_words(tmp_path: Path) -> None:
    ours = make_trainer(tmp_path, AdaptiveArguments(micro_batch_size=8))
    OutOfMemory(ours.model, 20)
    with pytest.raises(DoesNotFitError, match=r"with 1 sample of up to 2\d tokens, which cannot be split"):
        ours.train()
    off = make_trainer(tmp_path, AdaptiveArguments(micro_batch_size=8, recover_from_oom=False))
    OutOfMemory(off.model, 100)
    with pytest.raises(DoesNotFitError, match=r"set recover_from_oom=True"):
        off.train()


def test_memory_of_the_host_that_runs_out_before_training_has_fewer_samples_measured(tmp_path: Path) -> None:
    """Torch has an error of its own for it, unlike that of devices."""
    trainers_made = []
    for name in ("clean", "short"):
        model = trainers.make_llama()
        left = iter(range(1 if name == "short" else 0))

        def fail(module: Any, args: Any, kwargs: Any, left: Any = left) -> None:
            if not torch.is_grad_enabled() and len(kwargs["input_ids"]) == 7 and next(left, None) is not None:
                raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

        model.register_forward_pre_hook(fail, with_kwargs=True)
        trainers_made.append(make_trainer(tmp_path / name, AdaptiveArguments(micro_batch_size=4), model=model))
        trainers_made[-1].train()
        assert next(left, None) is None
    clean, short = trainers_made
    assert [each.get("loss") for each in logged(short)] == [each.get("loss") for each in logged(clean)]


@pytest.mark.parametrize("kind", few(["Llama", "BertForSequenceClassification"], "Llama"))
def test_a_loss_is_looked_at_in_a_few_tokens_where_two_samples_do_not_fit(kind: str, tmp_path: Path) -> None:
    """All have one length, and labels, if those are of tokens, at their ends."""
    data = [{"input_ids": ids, "labels": [-100] * 20 + ids[20:]} for ids in ([n, *range(2, 42)] for n in range(1, 17))]
    settings = {"data": data, "num_train_epochs": 1}
    stock = trained(tmp_path / "stock", **of_kind(kind, **settings))
    ours = make_trainer(tmp_path / "ours", AdaptiveArguments(micro_batch_size=1), **of_kind(kind, **settings))
    short = OutOfMemory(ours.model, 2 * 41 - 1, in_training=False)
    ours.train()
    assert short.failures > 0
    assert_alike(ours, stock)


def test_tokens_of_multiple_choice_are_those_of_all_choices(tmp_path: Path) -> None:
    def model() -> Any:
        return trainers.make_bert("BertForMultipleChoice")

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(choice) for sample in samples for choice in sample["input_ids"])
        ids = torch.tensor([[each + [0] * (longest - len(each)) for each in one["input_ids"]] for one in samples])
        labels = torch.tensor([sample["label"] for sample in samples])
        return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": labels}

    texts = [sample["input_ids"] for sample in trainers.make_data(24)]
    data = [{"input_ids": [text, text[::-1], text[1:]], "label": len(text) % 3} for text in texts]
    made: dict[str, Any] = dict(collator=collate, data=data, num_train_epochs=1)
    stock = trained(tmp_path / "stock", model=model(), **made)
    ours = make_trainer(tmp_path / "ours", auto(), model=model(), **made)
    assert trainers.prepared(ours).longest == 3 * max(map(len, texts))
    watched = OutOfMemory(ours.model, 10**9)
    without_probe(ours, 150).train()
    assert_alike(ours, stock)
    assert max(shape.numel() for shape in watched.forwards[-8:]) <= 150


class Noise(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Measures the noise that is added to embeddings in training, in each forward pass that has some."""

    def __init__(self) -> None:
        self.scales: list[tuple[torch.Size, float]] = []

    def on_train_begin(self, *args: Any, model: Any, **kwargs: Any) -> None:
        model.get_input_embeddings().register_forward_hook(self.measure)

    def measure(self, embedding: Any, given: Any, output: torch.Tensor) -> None:
        [ids] = given
        if noise := float((output - embedding.weight[ids]).abs().max()):
            self.scales.append((ids.shape, noise))


@pytest.mark.parametrize(
    ("ours", "most_tokens"),
    [(auto(), 60), wide(AdaptiveArguments(micro_batch_size=2), 0), (AdaptiveArguments(micro_batch_size=8), 60)],
    ids=["auto", "a number", "recovery"],
)
def test_noise_of_neftune_is_as_large_in_parts_as_in_whole_batches(
    ours: AdaptiveArguments, most_tokens: int, tmp_path: Path
) -> None:
    """It is divided by the root of the length to which a batch is padded: here, of short samples and of longer ones."""
    data = sorted(trainers.make_data(16), key=lambda sample: len(sample["input_ids"]))
    settings: dict[str, Any] = dict(
        data=data, neftune_noise_alpha=5.0, gradient_accumulation_steps=2, train_sampling_strategy="sequential"
    )
    watched: list[list[tuple[torch.Size, float]]] = []
    for name, arguments in {"stock": None, "ours": ours}.items():
        noise = Noise()
        trainer = make_trainer(tmp_path / name, arguments, callbacks=[noise], num_train_epochs=1, **settings)
        if arguments is not None and arguments.micro_batch_size == "auto":
            without_probe(trainer, most_tokens)
        elif arguments is not None and most_tokens:
            OutOfMemory(trainer.model, most_tokens)
        trainer.train()
        watched.append(noise.scales)
    stock, split = watched
    assert len(stock) == 2 and len(split) > 4 and len({shape for shape, _ in split}) > 2
    expected = [scale for _, scale in stock]
    assert expected[0] > 1.2 * expected[1]
    for _, scale in split:
        assert min(abs(scale / each - 1) for each in expected) < 0.1
    for each in expected:
        assert any(abs(scale / each - 1) < 0.1 for _, scale in split)
