"""Samples that lie end to end train as padded ones do, and none of a model that would not is laid so."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from adaptive_batching._transformers.before_training import get_ready
from adaptive_batching._transformers.declared import state_of
from adaptive_batching._transformers.handed_out import StepInputs, has_decoder, length_function
from adaptive_batching._transformers.loss_kind import find_loss_kind
from adaptive_batching._transformers.row_of_samples import NoRowError, row_of
from adaptive_batching._transformers.step_in_parts import StepInParts
from adaptive_batching._values import ByLength, ConfigError
from adaptive_batching.transformers import AdaptiveArguments
from tests.support.wide import few, wide
from tests.transformers import architectures, trainers
from tests.transformers.trainers import assert_alike, collate, logged, make_trainer, weights, without_probe

WHY = "adaptive_batching._transformers.before_training"


def auto(**settings: Any) -> AdaptiveArguments:
    return AdaptiveArguments(micro_batch_size="auto", **settings)


def step_of(trainer: Any, samples: list[Any]) -> StepInParts:
    """Return the step of a trainer, ready to run."""
    kind, _ = find_loss_kind(trainer, samples)
    length = length_function(samples[0], targets=has_decoder(trainer.model))
    step = StepInParts(trainer, kind, ByLength(), length, state=state_of(trainer), padding=False)
    get_ready(step, samples)
    step.limit.bound = 45  # two or three samples
    return step


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def gradients_one_by_one(step: StepInParts, model: Any, samples: list[Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    batches = [{key: value.to(model.device) for key, value in collate([sample]).items()} for sample in samples]
    numbers = [step.kind.count(batch, 1) for batch in batches]
    for batch, number in zip(batches, numbers, strict=True):
        if step.kind.takes_number:
            model(**batch, num_items_in_batch=sum(numbers)).loss.backward()
        elif number:
            (model(**batch).loss * number / sum(numbers)).backward()
    return gradients(model)


ARCHITECTURES = few(
    [*architectures.END_TO_END, *architectures.PADDED],
    "Llama", "GPT2", "Bert", "Qwen3Next",
)  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_gradient_is_that_of_one_sample_at_a_time_whatever_the_architecture(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=WHY)
    model, samples = architectures.make(name), trainers.make_data(6, 20)
    implementations = [getattr(each, "config", None) for each in model.modules()]
    before = [each and each._attn_implementation for each in implementations]
    trainer = make_trainer(tmp_path, auto(), model=model, data=samples)
    step = step_of(trainer, samples)
    loss = step(StepInputs([samples]), partial(trainer.forward_backward, model))
    found, expected = gradients(model), gradients_one_by_one(step, model, samples)
    assert found.keys() == expected.keys() and loss > 0
    scale = max(float(torch.stack([value.norm() for value in expected.values()]).norm()), 1e-12)
    off = torch.stack([(found[key] - expected[key]).norm() for key in expected]).norm()
    assert off <= 1e-6 * scale
    assert [each and each._attn_implementation for each in implementations] == before, "nothing stays in configs"
    assert "samples_end_to_end" not in transformers.AttentionInterface().valid_keys()
    if architectures.has_moved(name, model):
        return
    assert step.in_rows == (name in architectures.END_TO_END)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(said) == 1, "a line says which"
    if not step.in_rows:
        assert architectures.PADDED[name][0] in said[0], said[0]


@pytest.mark.parametrize(
    ("name", "in_rows"), [("FalconH1", False), wide("Roberta", False), ("GptOss", True), wide("Llama", True)]
)
def test_what_is_carried_over_is_found_in_bfloat16_where_rounding_is_larger_and_experts_are_not_taken_for_it(
    name: str, in_rows: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=WHY)
    samples = trainers.make_data(6, 20)
    trainer = make_trainer(tmp_path, auto(), model=architectures.make(name).bfloat16(), data=samples)
    assert step_of(trainer, samples).in_rows == in_rows
    if name == "FalconH1":
        assert "Mixer) carries a sample over into the next" in caplog.text


def test_noise_that_is_scaled_by_the_length_of_a_row_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger=WHY)
    noisy = make_trainer(tmp_path, auto(), data=trainers.make_data(6, 20), neftune_noise_alpha=5.0)
    assert not trainers.prepared(noisy).step.in_rows
    assert "padding, samples of similar length in a forward pass: neftune_noise_alpha scales noise" in caplog.text


COMPILED = {"torch_compile": True, "torch_compile_backend": "eager", "num_train_epochs": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        wide({"label_smoothing_factor": 0.1}),
        wide({"bf16": True}),
        pytest.param(COMPILED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_trainer_takes_the_steps_of_padded_samples(settings: dict[str, Any], tmp_path: Path) -> None:
    made = []
    for ours in (auto(), auto(padding=True)):
        made.append(without_probe(make_trainer(tmp_path, ours, include_num_input_tokens_seen="all", **settings), 60))
        watched = trainers.OutOfMemory(made[-1].model, 10**9)
        made[-1].train()
        assert {shape[0] for shape in watched.forwards[-2:]} == {1} or ours != auto()  # an audit has come before
    rows, padded = made
    tolerance, of_weights = (2e-2, 1e-2) if "bf16" in settings else (1e-6, 1e-6)
    assert_alike(rows, padded, tolerance)
    assert_near(rows, padded, of_weights)
    tokens = sum(len(sample["input_ids"]) for sample in trainers.make_data())
    assert rows.state.num_input_tokens_seen == tokens * settings.get("num_train_epochs", 2)
    assert {each["padding"] for each in logged(rows) if "loss" in each} == {1.0}
    assert rows.adaptive.step.in_rows and not padded.adaptive.step.in_rows


def to_length(padding: int, first: int | None = None) -> list[Any]:
    """Samples that a tokenizer has padded to 24 tokens, with labels of ``padding`` there, or ``first`` in its place."""
    data = []
    for sample in trainers.make_data(24):
        ids, more = sample["input_ids"], 24 - len(sample["input_ids"])
        labels = [*ids, *([padding] * more)]
        labels[len(ids) : len(ids) + 1] = [padding if first is None else first][:more]
        data.append({"input_ids": ids + [0] * more, "attention_mask": [1] * len(ids) + [0] * more, "labels": labels})
    return data


def stacked(samples: list[Any]) -> Any:
    return {key: torch.tensor([sample[key] for sample in samples]) for key in samples[0]}


@pytest.mark.parametrize("make", few([trainers.make_llama, trainers.make_bert], trainers.make_llama))
@pytest.mark.parametrize(
    ("labels", "in_rows"),
    [((0,), False), ((-100, 0), False), ((-100,), True)],
    ids=["a copy of input_ids", "the end of a sequence is taught", "padding is ignored"],
)
def test_targets_in_padding_are_learnt_as_trainer_learns_them(
    make: Any, labels: tuple[int, ...], in_rows: bool, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"data": to_length(*labels), "collator": stacked, "num_train_epochs": 1}
    stock = trainers.trained(tmp_path / "stock", model=make(), **given)
    ours = without_probe(make_trainer(tmp_path / "ours", auto(), model=make(), **given), 96)
    ours.train()
    assert_alike(ours, stock)
    assert ours.adaptive.step.in_rows == in_rows


class TeachesPadding(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Teaches what padding is made of, as scripts do that make labels in their loss."""

    begins_at = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        teaches = (inputs["attention_mask"] == 0) & (self.state.max_steps >= self.begins_at)
        labels = inputs["labels"].masked_fill(teaches, 0)[:, 1:]
        logits = model(**{**inputs, "labels": None}).logits[:, :-1]  # [b, s, v]
        return torch.nn.functional.cross_entropy(logits.mT, labels, reduction="sum") / num_items_in_batch


def test_a_row_is_compared_with_the_padded_batch_and_not_with_its_tokens_alone(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "kind": TeachesPadding,
        "data": to_length(-100),
        "collator": stacked,
        "num_train_epochs": 1,
    }
    stock = trainers.trained(tmp_path / "stock", **given)
    ours = without_probe(make_trainer(tmp_path / "ours", auto(), **given), 96)
    ours.train()
    assert_alike(ours, stock)


@pytest.mark.parametrize("max_tokens", few([96, 1000], 96), ids=["several rows", "one row"])
def test_an_audit_compares_rows_with_the_padded_batch(max_tokens: int, tmp_path: Path) -> None:
    given: dict[str, Any] = {"kind": TeachesPadding, "data": to_length(-100), "collator": stacked}
    ours = without_probe(make_trainer(tmp_path, auto(), **given), max_tokens)
    ours.begins_at = 1  # Trainer knows its last step when it begins
    with pytest.raises(ConfigError, match=r"off that of the same batch in one \(in step 1\)"):
        ours.train()


def assert_near(one: Any, other: Any, tolerance: float = 1e-6) -> None:
    """The weights of two trainers differ by less, relative to all that they have gained in training."""
    start = trainers.make_llama().to(one.model.device).state_dict()
    pairs = [(value, weights(other)[name], start[name]) for name, value in weights(one).items()]
    off = math.sqrt(sum(float((mine - theirs).square().sum()) for mine, theirs, _ in pairs))
    moved = math.sqrt(sum(float((theirs - before).square().sum()) for _, theirs, before in pairs))
    assert off <= 100 * tolerance * moved, (off, moved)  # Adam divides by what may be near zero


class WithIndices(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Weighs samples if told to, and else only notes which have run."""

    weighs = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        indices, labels = inputs.pop("index"), inputs["labels"]
        self.seen = [*getattr(self, "seen", []), *indices.tolist()]
        logits = model(**{**inputs, "labels": None}).logits[:, :-1]  # [b, s, v]
        losses = torch.nn.functional.cross_entropy(logits.mT, labels[:, 1:], reduction="none")  # [b, s]
        weights = 1 + indices[:, None] % 3 if self.weighs else 1
        return (losses * weights).sum() / num_items_in_batch


@pytest.mark.parametrize("weighs", [False, True])
def test_what_a_collate_function_adds_for_each_sample_is_no_hindrance_unless_it_makes_a_difference(
    weighs: bool, tmp_path: Path
) -> None:
    data = [{**sample, "index": index} for index, sample in enumerate(trainers.make_data())]
    collator = lambda samples: {**collate(samples), "index": torch.tensor([each["index"] for each in samples])}  # noqa: E731
    made = []
    for ours in (auto(), auto(padding=True)):
        given: dict[str, Any] = dict(data=data, collator=collator, kind=WithIndices, remove_unused_columns=False)
        made.append(without_probe(make_trainer(tmp_path, ours, num_train_epochs=1, **given), 60))
        made[-1].weighs = weighs
        made[-1].train()
        assert sorted(made[-1].seen[-len(data) :]) == [*range(len(data))]
    rows, padded = made
    assert rows.adaptive.step.in_rows != weighs
    assert_alike(rows, padded, 1e-6)


class FailsOnce:
    """Runs out of memory in attention of the second step, at the ``number``-th call of a kind, forward or backward."""

    def __init__(self, trainer: Any, number: int, *, in_backward: bool) -> None:
        self.left, self._in_backward, self.failures = number, in_backward, 0
        self._trainer = trainer
        self.attention = trainer.model.model.layers[1].self_attn
        self.attention.register_forward_hook(self._forward)

    def _forward(self, module: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and self._in_backward:
            output[0].register_hook(lambda gradient: self._count())
        elif torch.is_grad_enabled():
            self._count()

    def _count(self) -> None:
        self.left -= self._trainer.state.global_step == 1
        if self.left == 0:
            self.left = -1
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("in_backward", few([False, True], True))
def test_a_row_that_runs_out_of_memory_runs_again_and_each_sample_counts_once(
    in_backward: bool, tmp_path: Path
) -> None:
    clean = without_probe(make_trainer(tmp_path, auto()), 60)
    clean.train()
    short = without_probe(make_trainer(tmp_path, auto()), 60)
    fails = FailsOnce(short, 2, in_backward=in_backward)
    short.train()
    assert fails.failures == 1 == short.adaptive.num_recoveries
    assert_alike(short, clean, 1e-6)
    assert {config._attn_implementation for config in [short.model.config]} == {"sdpa"}


def test_a_checkpoint_does_not_know_of_rows(tmp_path: Path) -> None:
    trainer = without_probe(make_trainer(tmp_path, auto(), save_strategy="epoch", num_train_epochs=1), 60)
    trainer.train()
    saved = "".join(path.read_text() for path in tmp_path.glob("checkpoint-*/*.json"))
    assert "input_ids" not in saved and "end_to_end" not in saved


LEFT = {"input_ids": [[0, 0, 5, 6], [1, 2, 3, 4]], "attention_mask": [[0, 0, 1, 1], [1, 1, 1, 1]]}


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_has_all_tokens_of_a_batch_and_no_target_from_another_sample(side: str) -> None:
    rolled = {key: torch.tensor(value).roll(-2 if side == "right" else 0, 1)[:1] for key, value in LEFT.items()}
    batch = {key: torch.cat([rolled[key], torch.tensor(value)[1:]]) for key, value in LEFT.items()}
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    row = row_of({**batch, "logits": torch.randn(2, 4, 3), "index": torch.tensor([7, 8]), "nothing": None}, ["labels"])
    assert row.bounds.lengths == (2, 4)
    assert row.inputs["input_ids"].tolist() == [[5, 6, 1, 2, 3, 4]]
    assert row.inputs["labels"].tolist() == [[-100, 6, -100, 2, 3, 4]]
    assert row.inputs["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3]]
    assert row.inputs["logits"].shape == (1, 6, 3) and row.inputs["nothing"] is None
    assert row.inputs["index"].tolist() == [7, 8], "of samples, as it was"
    assert row.counted["labels"][:, 1:].ne(-100).sum() == 4, "as many as in the row"


@pytest.mark.parametrize(
    "mask", [[[1, 0, 1, 1], [1, 1, 1, 1]], [[1, 1, 2, 2], [1, 1, 1, 0]], [[0, 0, 0, 0], [1, 1, 1, 1]]]
)
def test_what_is_no_row_says_why(mask: list[list[int]]) -> None:
    batch = {"input_ids": torch.tensor(LEFT["input_ids"]), "attention_mask": torch.tensor(mask)}
    with pytest.raises(NoRowError, match="other numbers than 1"):
        row_of(batch)
    del batch["attention_mask"]
    with pytest.raises(NoRowError, match="no attention_mask"):
        row_of(batch)
