"""The optimizer step of a plain loop: the gradient of the whole batch, however it is split and whatever fails."""

from __future__ import annotations

import copy
import json
import logging
import weakref
from collections import UserDict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from adaptive_batching import AdaptiveBatchingConfig, AdaptiveStep, ConfigError, DoesNotFitError, _state
from adaptive_batching._loop.samples import run_forward

IGNORED = -100
Text = torch.Tensor  # of one sample: tokens [s]


class Book:
    """What a model has done, and is to do, which is no state of the model that a step would put back."""

    def __init__(self) -> None:
        self.most_tokens = self.failures_left = 10**9
        self.forwards: list[tuple[int, ...]] = []


BOOKS: weakref.WeakKeyDictionary[nn.Module, Book] = weakref.WeakKeyDictionary()


class Model(nn.Module):
    """Predicts the next token; runs out of memory with more than ``most_tokens`` padded tokens."""

    def __init__(self, dropout: float = 0.0, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.norm = norm or nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(16, 20)

    @property
    def book(self) -> Book:
        return BOOKS.setdefault(self, Book())

    @property
    def forwards(self) -> list[tuple[int, ...]]:
        return self.book.forwards

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [b, s] -> [b, s, 20]
        hidden = self.embedding(tokens).cumsum(1)
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        logits: torch.Tensor = self.out(self.dropout(hidden))
        if torch.is_grad_enabled():
            book = self.book
            book.forwards.append(tuple(tokens.shape))
            if tokens.numel() > book.most_tokens and book.failures_left > 0:
                book.failures_left -= 1
                raise torch.OutOfMemoryError("CUDA out of memory")
        return logits


class Centred(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - hidden.mean(0)


def collate(samples: list[Text]) -> dict[str, torch.Tensor]:
    return {
        "tokens": pad_sequence([sample[:-1] for sample in samples], batch_first=True),
        "labels": pad_sequence([sample[1:] for sample in samples], batch_first=True, padding_value=IGNORED),
    }


def loss(model: Any, batch: Any, reduction: str = "sum") -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    return cross_entropy(logits, labels, ignore_index=IGNORED, reduction=reduction), (labels != IGNORED).sum()


def length(sample: Text) -> int:
    return len(sample) - 1


def texts(*lengths: int) -> list[Text]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(20, (n + 1,), generator=generator) for n in lengths]


SAMPLES = texts(9, 2, 30, 5, 12, 7, 3, 21)


def make(
    loss: Any = loss, *, collate: Any = collate, max_tokens: int | None = None, max_grad_norm: float | None = None,
    by_length: bool = True, count: Any = None, **settings: Any,
) -> tuple[Model, AdaptiveStep[Text]]:  # fmt: skip
    torch.manual_seed(0)
    model = Model(**settings).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = AdaptiveStep(
        model, optimizer, loss, collate, length=length if by_length else None, count=count, max_grad_norm=max_grad_norm
    )
    step.max_tokens = max_tokens
    return model, step


class PlainLoop:
    """Trains on whole batches, without this library."""

    def __init__(self, model: nn.Module, max_grad_norm: float, loss: Any = loss, collate: Any = collate) -> None:
        self.model, self._max_grad_norm, self._loss, self._collate = model, max_grad_norm, loss, collate
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.gradients: list[torch.Tensor | None] = []  # of the last step, before they were clipped

    def step(self, samples: Any) -> torch.Tensor:
        total, number = self._loss(self.model, self._collate(samples))
        (total / number).backward()
        self.gradients = [None if each.grad is None else each.grad.clone() for each in self.model.parameters()]
        nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return (total / number).detach()  # type: ignore[no-any-return]

    def weights(self) -> list[torch.Tensor]:
        return [each.detach() for each in self.model.parameters()]


def always(model: Model, times: int = 10**9) -> None:
    model.book.most_tokens, model.book.failures_left = 64, times


once = partial(always, times=1)


def test_a_mean_loss_counts_by_its_number_and_one_of_no_targets_for_nothing() -> None:
    prompt = torch.cat([SAMPLES[0][:1], torch.full((4,), IGNORED)])  # no target

    def by_mean(model: Any, batch: Any) -> torch.Tensor:
        return loss(model, batch, "mean")[0]

    def targets(batch: Any) -> torch.Tensor:
        return (batch["labels"] != IGNORED).sum()

    def padded(samples: list[Text]) -> Any:
        batch = collate(samples)
        return {**batch, "tokens": batch["tokens"].clamp(min=0)}

    results = []
    for given, count in ((loss, None), (by_mean, targets)):
        model, step = make(given, collate=padded, max_tokens=1, count=count)
        results.append((step([*SAMPLES, prompt]), [parameter.detach().clone() for parameter in model.parameters()]))
    torch.testing.assert_close(*results)
    _, step = make(loss, count=targets)
    with pytest.raises(ConfigError, match="with count, it must return the mean of the batch's losses"):
        step(SAMPLES)


def test_the_state_of_a_step_is_what_running_out_of_memory_has_taught_it() -> None:
    model, step = make(max_tokens=500)
    once(model)
    step(SAMPLES)
    _, resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(step.state_dict())))
    assert (resumed.max_tokens, resumed.num_recoveries) == (500, step.num_recoveries) == (500, 1)
    assert resumed.state_dict() == step.state_dict()


@pytest.mark.parametrize("max_tokens", [None, 64, 1])
@pytest.mark.parametrize("failures", [0, 1, 10**9])
def test_steps_are_those_of_a_plain_loop_however_they_are_cut_and_whatever_runs_out(
    failures: int, max_tokens: int | None
) -> None:
    plain = PlainLoop(make()[0], 0.5)
    model, step = make(max_tokens=max_tokens, max_grad_norm=0.5)
    always(model, failures)
    for number in range(3):
        if number == 1:  # in the first, two parts are compared with their union
            model.forwards.clear()
        expected = plain.step(SAMPLES)
        recoveries = step.num_recoveries
        torch.testing.assert_close(step(SAMPLES), expected)
    assert step.num_recoveries == recoveries, "after a failure, later steps are split at once"
    for name, weights in plain.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weights)
    assert (step.num_recoveries > 0) == (failures > 0 and max_tokens is None)
    assert all(parameter.grad is None for parameter in model.parameters())
    if max_tokens == 64 and failures == 0:
        assert all(b * s <= 64 for b, s in model.forwards)
        assert sum(b for b, _ in model.forwards) == 2 * len(SAMPLES)
        assert len(model.forwards) <= 6, "as a forward has a cost of its own"


def test_parts_become_smaller_within_max_tokens_and_larger_again_after_many_clean_steps() -> None:
    model, step = make(max_tokens=100)
    always(model)
    step(SAMPLES)
    model.forwards.clear()
    step(SAMPLES)
    assert all(b * s <= 64 for b, s in model.forwards)
    model, step = make()
    once(model)
    for _ in range(200):
        step(SAMPLES)
    assert step.num_recoveries == 1
    assert model.forwards[-1] == (8, 30)
    for _ in range(3):  # what fitted before runs again as it was, in every step that fails once
        once(model)
        model.forwards.clear()
        step(SAMPLES)
        assert model.forwards == [(8, 30)] * 2


def test_an_allocator_that_starts_over_in_every_step_makes_parts_smaller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the third step, which stands; with smaller parts it starts over no more."""
    plain = PlainLoop(make()[0], 0.5)
    model, step = make(max_grad_norm=0.5)

    def forwards_without_room(device: torch.device, name: str) -> int:
        return sum(b * s > 220 for b, s in model.forwards)

    monkeypatch.setattr("adaptive_batching._step.work.counted", forwards_without_room)
    for _ in range(6):
        torch.testing.assert_close(step(SAMPLES), plain.step(SAMPLES))
    assert model.forwards[:3] == [(8, 30)] * 3
    parts = model.forwards[6:]  # after three in which two parts are compared with their union
    assert len(parts) == 6 and all(b * s <= 210 for b, s in parts)
    assert caplog.text.count("from now on a forward pass holds at most 210 padded tokens, an eighth less") == 1
    assert step.num_recoveries == 0


def test_an_allocator_that_starts_over_is_left_alone_where_nothing_can_be_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, step = make()
    monkeypatch.setattr("adaptive_batching._step.work.counted", lambda *_: len(model.forwards))
    for _ in range(5):
        step(SAMPLES[:1])
    assert len(model.forwards) == 5 and not caplog.records


def test_accumulated_gradients_are_left_for_the_caller() -> None:
    model, step = make(max_tokens=2, by_length=False)
    losses, scale = [], 1024.0

    def backward(value: torch.Tensor) -> None:
        losses.append(value.item())
        (scale * value).backward()

    expected = copy.deepcopy(model)
    total, number = loss(expected, collate(SAMPLES))
    (scale * total / number).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=r"multiplies the loss by 1024, as a gradient scaler .* call step\.gradients"):
        step(SAMPLES, backward)
    assert all(parameter.grad is None for parameter in model.parameters()) and losses == [1.0], "nothing has run"
    step.gradients(SAMPLES, backward)
    assert max(losses) < 30 * total / number, "half precision does not overflow"
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def masked_mean(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over targets times their number, which is nothing over nothing where there is none."""
    losses, number = loss(model, batch, "none")
    return losses.sum() / number * number, number


def constant_of_nothing(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total, number = loss(model, batch)
    return (total if number > 0 else torch.zeros(())), number


@pytest.mark.parametrize("given", [masked_mean, constant_of_nothing])
def test_a_part_without_targets_leaves_the_gradient_as_it_is(given: Any) -> None:
    def without_prompts(samples: list[Text]) -> Any:
        batch = collate(samples)
        return {
            "tokens": batch["tokens"].clamp(min=0),
            "labels": batch["labels"].masked_fill(batch["tokens"] < 0, IGNORED),
        }

    prompts = [torch.full((n,), -1) for n in (3, 12, 40)]
    results = []
    for samples, max_tokens in ((SAMPLES, None), ([*SAMPLES, *prompts], 40)):
        model, step = make(given, collate=without_prompts, max_tokens=max_tokens)
        results.append(([step(samples) for _ in range(2)], [each.detach().clone() for each in model.parameters()]))
    torch.testing.assert_close(*results)
    for max_tokens in (None, 3):
        model, step = make(given, collate=without_prompts, max_tokens=max_tokens)
        assert step.gradients(prompts) == 0
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_a_batch_without_targets_changes_nothing() -> None:
    for max_tokens in (None, 1):
        model, step = make(max_tokens=max_tokens)
        assert step.gradients(texts(0, 0)) == 0
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


# Parameters and batches that are not the usual ones


@pytest.mark.parametrize("max_tokens", [None, 64])
def test_parameters_of_the_loss_that_the_optimizer_has_are_those_of_the_model_s_too(max_tokens: int | None) -> None:
    def trained(most_tokens: int, max_tokens: int | None = None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, scale = Model().double(), nn.Parameter(torch.ones((), dtype=torch.float64))
        optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=0.01)

        def scaled(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
            return loss(lambda tokens: scale * model(tokens), batch)

        step = AdaptiveStep(model, optimizer, scaled, collate, length=length, max_grad_norm=0.1)
        step.max_tokens = max_tokens
        found = step.find_maximum_batch_size(SAMPLES[0], upper=2)
        assert (found.batch_size, scale.item(), scale.grad) == (2, 1.0, None), "the probe leaves no trace"
        model.book.most_tokens = most_tokens
        for _ in range(3):
            step(SAMPLES)
        return [scale, *model.parameters()]

    for ours, expected in zip(trained(100, max_tokens), trained(10**9), strict=True):
        torch.testing.assert_close(ours, expected)


def test_gradients_that_the_optimizer_does_not_use_are_not_left_behind() -> None:
    model = Model()
    step = AdaptiveStep(model, torch.optim.SGD(model.out.parameters(), lr=0.1), loss, collate)
    for _ in range(2):
        step(SAMPLES)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_that_the_optimizer_does_not_clear_add_up_as_in_a_plain_loop() -> None:
    models = [Model().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours, plain = models
    step = AdaptiveStep(ours, torch.optim.SGD(ours.out.parameters(), lr=0.1), loss, collate, length=length)
    always(ours, times=2)
    optimizers = [torch.optim.SGD(model.out.parameters(), lr=0.1) for model in models]
    for _ in range(3):
        total, number = loss(plain, collate(SAMPLES))
        (total / number).backward()
        step.gradients(SAMPLES)
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    kept = ours.embedding.weight.grad
    step(SAMPLES)
    assert ours.embedding.weight.grad is kept is not None


@pytest.mark.parametrize("where", ["loss", "backward", "optimizer"])
def test_an_error_midway_leaves_no_gradients_and_the_next_step_is_that_of_a_plain_loop(where: str) -> None:
    model, step = make(max_tokens=64)
    _, clean = make(max_tokens=64)
    fails = iter([False, True] if where != "optimizer" else [True])

    def fail(*args: Any) -> None:
        if not _state.rehearsing and next(fails, False):
            raise KeyboardInterrupt

    if where == "optimizer":
        handle: Any = step._optimizer.register_step_pre_hook(fail)
    elif where == "backward":
        handle = model.out.register_full_backward_hook(fail)
    else:
        handle = model.register_forward_pre_hook(lambda *args: fail() if torch.is_grad_enabled() else None)
    with pytest.raises(KeyboardInterrupt):
        step(SAMPLES)
    assert all(parameter.grad is None for parameter in model.parameters())
    handle.remove()
    torch.testing.assert_close(step(SAMPLES), clean(SAMPLES))


class Mean(nn.Module):
    """The mean of a bag of words, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.embedding(tokens).cumsum(1))
        return logits


def test_sparse_gradients_are_those_of_a_plain_loop_and_wrong_ones_are_found_out() -> None:
    def trained(max_tokens: int | None, loss: Any = loss) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Mean().double()
        step = AdaptiveStep(model, torch.optim.SGD(model.parameters(), lr=0.5), loss, collate, length=length)
        step.max_tokens = max_tokens
        return [*(step(SAMPLES) for _ in range(3)), *(each.detach() for each in model.parameters())]

    torch.testing.assert_close(trained(24), trained(None))

    def twice_for_two(model: Any, batch: Any) -> Any:
        total, number = loss(model, batch)
        more = 0.1 * len(batch["tokens"]) * model.embedding(batch["tokens"]).sum()
        return total + more - more.detach(), number

    with pytest.raises(ConfigError, match="% off that of the same batch in one"):
        trained(24, twice_for_two)


def test_a_batch_that_moves_itself_is_moved_as_one() -> None:
    """Of a packed sequence, a tuple, the sizes of its batches stay on the host."""
    model = nn.Linear(4, 2, device="meta")
    packed = pack_sequence([torch.randn(n, 4) for n in (5, 3)])
    seen = []

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        seen.append(batch["x"])
        return model(batch["x"].data).sum(), 2

    run_forward(loss, model, {"x": packed, "y": torch.ones(2)})
    assert seen[0].data.device.type == "meta" and seen[0].batch_sizes.device.type == "cpu"


def test_a_loop_within_one_autocast_context_trains_the_weights_of_each_step() -> None:
    (model, step), (other, apart) = make(), make()
    model.float()
    other.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [step(SAMPLES).item() for _ in range(4)]
    for found in losses:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert found == apart(SAMPLES).item()


class Attributes:
    """A batch that is no mapping."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values = values

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.values[key]


@pytest.mark.parametrize("kind", [UserDict, Attributes])
def test_batches_of_a_class_of_their_own_are_cut_and_a_dependence_in_them_is_seen(kind: Any) -> None:
    model, step = make(collate=lambda samples: kind(collate(samples)))
    always(model)
    step(SAMPLES)
    assert step.num_recoveries > 0
    model, step = make(collate=lambda samples: kind(collate(samples)), norm=Centred())
    always(model)
    with pytest.raises(ConfigError, match="% off that of the same batch in one"):
        step(SAMPLES)


# Losses that compute over the batch, outside of the model


def contrastive(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    """Tell each sample's features from those of the others in the batch."""
    model(batch["tokens"])
    hidden = normalize(model.embedding(batch["tokens"][:, 0]), dim=-1)
    return cross_entropy(hidden @ hidden.T / 0.1, torch.arange(len(hidden)), reduction="sum"), len(hidden)


def mean_of_one(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return loss(model, batch, "mean")[0], 1


def mean_and_number(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    return loss(model, batch, "mean")


def mean_times_samples(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    return loss(model, batch, "mean")[0] * len(batch["tokens"]), len(batch["tokens"])


def with_padding_in_its_number(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    return loss(model, batch)[0], batch["labels"].numel()


def with_random_numbers_of_its_own(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    """Draws what nobody can repeat for a sample, whatever the batch that it is in, so that nothing can be measured."""
    losses, _ = loss(model, batch, "none")
    kept = torch.from_numpy(CHANCE.random(len(losses)) < 0.5)
    return (losses * kept).sum(), kept.sum()


CHANCE = np.random.default_rng(0)
WRONG = [
    contrastive, mean_of_one, mean_and_number, mean_times_samples, with_padding_in_its_number,
    with_random_numbers_of_its_own,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_loss_that_computes_over_the_batch_is_not_cut(wrong: Any) -> None:
    for max_tokens in (None, 64):
        model, step = make(wrong, max_tokens=max_tokens)
        always(model)
        with pytest.raises(ConfigError, match=r"% off that of the same batch in one|loss returns .* as the number"):
            step(SAMPLES)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert make(wrong)[1](SAMPLES).isfinite(), "whole it may be used"


def with_dropout(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    model.dropout.p = 0.5
    return loss(model, batch)


def with_weights(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    weights = (1.0 + batch["labels"].flatten()).clamp(min=0)
    return (loss(model, batch, "none")[0] * weights).sum(), weights.sum()


def with_random_numbers(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    losses, _ = loss(model, batch, "none")
    kept = torch.rand(batch["labels"].shape).flatten() < 0.5
    kept &= batch["labels"].flatten() != IGNORED
    return (losses * kept).sum(), kept.sum()


@pytest.mark.parametrize("right", [with_dropout, with_weights, with_random_numbers])
def test_a_loss_that_is_a_sum_over_samples_is_cut(right: Any) -> None:
    model, step = make(right)
    always(model)
    step(SAMPLES)
    assert step.num_recoveries > 0


# Errors


def test_a_sample_longer_than_any_before_is_named_where_memory_runs_out(caplog: pytest.LogCaptureFixture) -> None:
    model, step = make()
    step(texts(9, 8))
    always(model)
    step(texts(12, 40, 7))
    assert "a sample, number 1 of the step's 3 (the first is 0), has 40 tokens, and none before had more" in caplog.text
    caplog.clear()
    with pytest.raises(DoesNotFitError, match="Memory ran out because a sample, number 0 of the step's 1"):
        step(texts(90))
    caplog.clear()
    step(texts(40, 39, 38))
    assert "out of memory with" not in caplog.text or "a sample, number" not in caplog.text  # as long as one that ran


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda total, number: total / number, r"loss returned a tensor of shape \(\); "),
        (lambda total, number: (torch.ones(3, requires_grad=True), 3), r"a tensor of shape \(3,\), 3\); "),
        (lambda total, number: (total, torch.ones(12)), r"a tensor of shape \(12,\)\); "),
    ],
)
def test_a_loss_that_is_no_sum_and_number_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message + "it must return the sum of the batch's losses"):
        make(lambda model, batch: returned(*loss(model, batch)))[1](SAMPLES)


def collate_short(samples: list[Text]) -> dict[str, torch.Tensor]:
    return collate([sample for sample in samples if len(sample) < 9])


def test_a_part_of_samples_that_collate_leaves_out_ends_in_words() -> None:
    model = Model()
    step = AdaptiveStep(
        model, torch.optim.SGD(model.parameters()), loss, collate_short, length=len,
    )  # fmt: skip
    samples = [torch.arange(number) % 20 for number in (3, 5, 8, 12)]
    step.gradients(samples)
    model.zero_grad()
    step.max_tokens = 12
    with pytest.raises(ConfigError, match=r"collate fails on 1 of the step's 4 samples by themselves .*leave them out"):
        step.gradients(samples)


def test_mistakes_are_told_before_anything_runs() -> None:
    model, step = make()
    with pytest.raises(ConfigError, match="samples is empty"):
        step([])
    with pytest.raises(
        ConfigError, match=r"samples is a dict, which looks collated already; pass a list.* collate_fn=list"
    ):
        step(collate(SAMPLES))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="upper=0 must be at least 1"):
        step.find_maximum_batch_size(SAMPLES[0], upper=0)
    for wrong in (0, 2.5, "8"):
        with pytest.raises(ConfigError, match=f"max_tokens={wrong!r} must be a whole number of at least 1"):
            step.max_tokens = wrong  # type: ignore[assignment]
    step.max_tokens = np.int64(4)  # type: ignore[assignment]
    assert type(step.max_tokens) is int
    step.gradients(SAMPLES)
    with pytest.raises(ConfigError, match=r"call optimizer.zero_grad\(\) first"):
        step(SAMPLES)
    model.zero_grad()
    step._work._length = lambda sample: 2.5  # type: ignore[assignment, return-value]
    with pytest.raises(ConfigError, match=r"length returned 2\.5; it must return the tokens of a sample before padd"):
        step(SAMPLES)


# The probe


@pytest.mark.parametrize(("in_parts", "rounds", "size"), [(False, False, 100), (True, False, 100), (False, True, 64)])
def test_the_probe_finds_what_the_data_allow_and_leaves_no_trace(
    in_parts: bool, rounds: bool, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, step = make(dropout=0.5, max_grad_norm=1.0)
    before = copy.deepcopy((model.state_dict(), step._optimizer.state_dict()))
    random_state = torch.get_rng_state()
    settings = AdaptiveBatchingConfig(round_to_power_of_two=rounds)
    with caplog.at_level(logging.WARNING):
        found = step.find_maximum_batch_size(SAMPLES[2], upper=100, in_parts=in_parts, settings=settings)
    assert (found.batch_size, found.reason) == (size, "upper bound")
    assert not caplog.records
    assert step._optimizer.state_dict() == before[1]
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.forwards[-1] == (size, 30)
    assert len(model.forwards) == found.num_steps * (2 if in_parts else 1)


def test_losses_of_parts_are_about_as_large_as_those_of_whole_batches() -> None:
    """Half precision neither overflows nor vanishes when a step is split for the first time."""
    seen: list[float] = []

    def noted(value: torch.Tensor) -> None:
        if not _state.rehearsing:
            seen.append(float(value))
        value.backward()  # type: ignore[no-untyped-call]

    model, step = make()
    step.gradients(SAMPLES, noted)
    model.zero_grad()
    step.max_tokens = 64
    whole = seen.pop()
    seen.clear()
    step.gradients(SAMPLES, noted)
    assert len(seen) > 1 and whole / 2 < sum(seen) < 2 * whole, "by a power of two, the number of losses"


def test_another_backward_is_asked_for_its_scale_as_well() -> None:
    _, step = make()
    step(SAMPLES, lambda value: value.backward())  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match="multiplies the loss by 1024, as a gradient scaler does"):
        step(SAMPLES, lambda value: (1024 * value).backward())  # type: ignore[no-untyped-call]


def test_memory_that_was_only_scattered_ends_no_run_whose_batches_are_not_split() -> None:
    """The batch runs again as it was, which is no split."""
    model, step = make(norm=nn.BatchNorm1d(16))
    step(SAMPLES)
    model.book.most_tokens, model.book.failures_left = 0, 1
    step(SAMPLES)
    assert step.num_recoveries == 1
    model.book.failures_left = 2
    with pytest.raises(DoesNotFitError, match="splitting the batch would change the result"):
        step(SAMPLES)


def test_within_autocast_a_probe_leaves_no_copies_of_weights() -> None:
    """A step meets its own weights, and not those of a trial that ran out of memory before it could drop its copies."""

    def trained(*, probes: bool) -> list[torch.Tensor]:
        model, step = make(max_tokens=64)
        model.float()
        with torch.autocast("cpu", torch.bfloat16):
            if probes:
                model.book.most_tokens = 60
                exact = AdaptiveBatchingConfig(search="binary_search", round_to_power_of_two=False)
                found = step.find_maximum_batch_size(SAMPLES[2], upper=4, settings=exact)
                assert found.measurements[-1].peak_bytes is None, "the last one ran out of memory"
                model.book.most_tokens = 10**9
            for _ in range(2):
                step(SAMPLES)
        return list(model.parameters())

    for ours, theirs in zip(trained(probes=True), trained(probes=False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
