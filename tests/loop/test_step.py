"""The optimizer step of a plain loop: the gradient of the whole batch, however it is cut and whatever fails."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from adaptive_batching import AdaptiveBatchingConfig, AdaptiveStep, ConfigError, DoesNotFitError

IGNORED = -100
Text = torch.Tensor  # of one sample: tokens [s]


class Model(nn.Module):
    """Predicts the next token; runs out of memory with more than ``most_tokens`` padded tokens."""

    def __init__(self, dropout: float = 0.0, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.norm = norm or nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(16, 20)
        self.most_tokens = 10**9
        self.failures_left = 10**9
        self.forwards: list[tuple[int, ...]] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [b, s] -> [b, s, 20]
        hidden = self.embedding(tokens).cumsum(1)
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        logits: torch.Tensor = self.out(self.dropout(hidden))
        if torch.is_grad_enabled():
            self.forwards.append(tuple(tokens.shape))
            if tokens.numel() > self.most_tokens and self.failures_left > 0:
                self.failures_left -= 1
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


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch["tokens"]).flatten(0, 1)
    labels = batch["labels"].flatten()
    return cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), (labels != IGNORED).sum()


def length(sample: Text) -> int:
    return len(sample) - 1


def texts(*lengths: int) -> list[Text]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(20, (n + 1,), generator=generator) for n in lengths]


SAMPLES = texts(9, 2, 30, 5, 12, 7, 3, 21)


def model_and_optimizer(**settings: Any) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(**settings).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def plain_step(model: Model, optimizer: torch.optim.Optimizer, samples: list[Text], clip_norm: float) -> torch.Tensor:
    total, number = loss(model, collate(samples))
    mean = total / number
    mean.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return mean.detach()


def never(model: Model) -> None: ...


def always(model: Model) -> None:
    model.most_tokens = 64


def once(model: Model) -> None:
    model.most_tokens, model.failures_left = 64, 1


@pytest.mark.parametrize("max_tokens", [None, 64, 1])
@pytest.mark.parametrize("runs_out", [never, always, once])
def test_steps_are_those_of_a_plain_loop_however_they_are_cut_and_whatever_runs_out(
    runs_out: Callable[[Model], None], max_tokens: int | None
) -> None:
    plain, plain_optimizer = model_and_optimizer()
    model, optimizer = model_and_optimizer()
    runs_out(model)
    step = AdaptiveStep(model, optimizer, loss, collate, length=length, max_tokens=max_tokens, clip_norm=0.5)
    for _ in range(3):
        expected = plain_step(plain, plain_optimizer, SAMPLES, 0.5)
        torch.testing.assert_close(step(SAMPLES), expected)
    for name, weights in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weights)
    assert (step.num_recoveries > 0) == (runs_out is not never and max_tokens is None)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_random_numbers_of_samples_that_run_again_are_the_same() -> None:
    def loss_and_next_random_number(failures: int) -> tuple[torch.Tensor, torch.Tensor]:
        model, optimizer = model_and_optimizer(dropout=0.5)
        step = AdaptiveStep(model, optimizer, loss, collate, length=length)
        step(SAMPLES)  # of this size one has fitted: it runs again as it was
        model.most_tokens, model.failures_left = 64, failures
        return step(SAMPLES), torch.rand(1)

    for undisturbed, recovered in zip(loss_and_next_random_number(0), loss_and_next_random_number(1), strict=True):
        assert torch.equal(undisturbed, recovered)


def test_parts_hold_samples_of_similar_length_within_max_tokens() -> None:
    model, optimizer = model_and_optimizer()
    AdaptiveStep(model, optimizer, loss, collate, length=length, max_tokens=64)(SAMPLES)
    assert all(b * s <= 64 for b, s in model.forwards)
    assert sum(b for b, _ in model.forwards) == len(SAMPLES)
    assert len(model.forwards) <= 3, "as a forward has a cost of its own"


def test_after_a_failure_later_steps_are_cut_at_once() -> None:
    model, optimizer = model_and_optimizer()
    model.most_tokens = 64
    step = AdaptiveStep(model, optimizer, loss, collate, length=length)
    step(SAMPLES)
    recoveries = step.num_recoveries
    assert recoveries > 0
    step(SAMPLES)
    assert step.num_recoveries == recoveries


def test_parts_that_fail_within_max_tokens_become_smaller() -> None:
    model, optimizer = model_and_optimizer()
    model.most_tokens = 64
    step = AdaptiveStep(model, optimizer, loss, collate, length=length, max_tokens=100)
    step(SAMPLES)
    model.forwards.clear()
    step(SAMPLES)
    assert all(b * s <= 64 for b, s in model.forwards)


def test_after_many_clean_steps_parts_become_larger_again() -> None:
    model, optimizer = model_and_optimizer()
    model.most_tokens, model.failures_left = 64, 1
    step = AdaptiveStep(model, optimizer, loss, collate, length=length)
    for _ in range(200):
        step(SAMPLES)
    assert step.num_recoveries == 1
    assert model.forwards[-1] == (8, 30)


def test_what_fitted_before_runs_again_as_it_was_in_every_step_that_fails_once() -> None:
    model, optimizer = model_and_optimizer()
    step = AdaptiveStep(model, optimizer, loss, collate, length=length)
    step(SAMPLES)
    for _ in range(3):
        model.most_tokens, model.failures_left = 64, 1
        step(SAMPLES)
    assert set(model.forwards) == {(8, 30)}


def test_an_allocator_that_starts_over_in_every_step_makes_parts_smaller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the third step, which stands; with smaller parts it starts over no more."""
    plain, plain_optimizer = model_and_optimizer()
    model, optimizer = model_and_optimizer()

    def forwards_without_room(device: torch.device) -> int:
        return sum(b * s > 220 for b, s in model.forwards)

    monkeypatch.setattr("adaptive_batching._loop.step.num_allocation_retries", forwards_without_room)
    step = AdaptiveStep(model, optimizer, loss, collate, length=length, clip_norm=0.5)
    for _ in range(6):
        torch.testing.assert_close(step(SAMPLES), plain_step(plain, plain_optimizer, SAMPLES, 0.5))
    assert model.forwards[:3] == [(8, 30)] * 3
    assert len(model.forwards[3:]) == 6 and all(b * s <= 210 for b, s in model.forwards[3:])
    assert caplog.text.count("from now on a forward takes at most 210 padded tokens, an eighth less") == 1
    assert step.num_recoveries == 0


@pytest.mark.parametrize(("samples", "norm"), [(SAMPLES[:1], None), (SAMPLES, Centred())], ids=["one", "dependent"])
def test_an_allocator_that_starts_over_is_left_alone_where_nothing_can_be_cut(
    samples: list[Text], norm: nn.Module | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = model_and_optimizer(norm=norm)
    monkeypatch.setattr("adaptive_batching._loop.step.num_allocation_retries", lambda device: len(model.forwards))
    step = AdaptiveStep(model, optimizer, loss, collate, length=length)
    for _ in range(5):
        step(samples)
    assert len(model.forwards) == 5 and not caplog.records


def test_without_a_length_parts_are_numbers_of_samples() -> None:
    model, optimizer = model_and_optimizer()
    model.most_tokens = 3 * 8
    AdaptiveStep(model, optimizer, loss, collate)(texts(*[8] * 8))
    assert [b for b, _ in model.forwards] == [8, 4, 2, 2, 2, 2]


def test_accumulated_gradients_are_left_for_the_caller() -> None:
    model, optimizer = model_and_optimizer()
    scale = 1024.0
    losses = []

    def backward(value: torch.Tensor) -> None:
        losses.append(value.item())
        (scale * value).backward()

    step = AdaptiveStep(model, optimizer, loss, collate, max_tokens=2, backward=backward)
    expected = copy.deepcopy(model)
    total, number = loss(expected, collate(SAMPLES))
    (scale * total / number).backward()
    before = copy.deepcopy(model.state_dict())
    step.gradients(SAMPLES)
    assert max(losses) < 30 * total / number, "half precision does not overflow"
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_batch_without_targets_changes_nothing() -> None:
    model, optimizer = model_and_optimizer()
    for max_tokens in (None, 1):
        step = AdaptiveStep(model, optimizer, loss, collate, length=length, max_tokens=max_tokens)
        assert step.gradients(texts(0, 0)) == 0
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
        model.zero_grad()


# Errors


def test_a_sample_that_does_not_fit_alone_is_an_error_that_says_which() -> None:
    model, optimizer = model_and_optimizer()
    model.most_tokens = 25
    with pytest.raises(DoesNotFitError, match="1 sample of up to 30 tokens, which cannot be cut; shorten it"):
        AdaptiveStep(model, optimizer, loss, collate, length=length)(SAMPLES)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(None, DoesNotFitError), (64, ConfigError)], ids=["recovery", "cutting"]
)
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(16), Centred()])
def test_a_model_that_computes_over_the_batch_is_not_cut(
    norm: nn.Module, max_tokens: int | None, expected: type[Exception]
) -> None:
    model, optimizer = model_and_optimizer(norm=norm)
    model.most_tokens = 64
    with pytest.raises(expected, match=rf"norm \({type(norm).__name__}\) computes over the batch"):
        AdaptiveStep(model, optimizer, loss, collate, length=length, max_tokens=max_tokens)(SAMPLES)


def mean_loss(model: nn.Module, batch: Any) -> Any:
    total, number = loss(model, batch)
    return total / number


def losses_not_summed(model: nn.Module, batch: Any) -> Any:
    return torch.ones(3, requires_grad=True), 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(mean_loss, r"loss returned a tensor of shape \(\); "), (losses_not_summed, r"a tensor of shape \(3,\), 3\); ")],
)
def test_a_loss_that_is_no_sum_and_number_is_refused(wrong: Any, message: str) -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(ConfigError, match=message + "it must return the sum of the batch's losses"):
        AdaptiveStep(model, optimizer, wrong, collate)(SAMPLES)


def test_mistakes_are_told_before_anything_runs() -> None:
    model, optimizer = model_and_optimizer()
    step = AdaptiveStep(model, optimizer, loss, collate)
    with pytest.raises(ConfigError, match="samples is empty"):
        step([])
    with pytest.raises(ConfigError, match="upper=0 must be at least 1"):
        step.find_maximum_batch_size(SAMPLES[0], upper=0)
    with pytest.raises(ConfigError, match="max_tokens=0 must be at least 1"):
        AdaptiveStep(model, optimizer, loss, collate, max_tokens=0)
    step.gradients(SAMPLES)
    with pytest.raises(ConfigError, match=r"call optimizer.zero_grad\(\) first"):
        step(SAMPLES)


def test_other_errors_pass_through() -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        AdaptiveStep(model, optimizer, lambda model, batch: (torch.ones(2, 3) @ torch.ones(2, 3), 1), collate)(SAMPLES)


# The probe


@pytest.mark.parametrize("in_parts", [False, True])
def test_the_probe_finds_what_the_data_allow_and_leaves_no_trace(
    in_parts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = model_and_optimizer(dropout=0.5)
    step = AdaptiveStep(model, optimizer, loss, collate, length=length, clip_norm=1.0)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random_state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        found = step.find_maximum_batch_size(SAMPLES[2], upper=100, in_parts=in_parts, settings=EXACT)
    assert (found.batch_size, found.reason) == (100, "upper bound")
    assert found.search == "predict", "the step was traced"
    assert not caplog.records
    assert optimizer.state_dict() == before[1]
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.forwards[-1] == (100, 30)
    assert len(model.forwards) == found.num_steps * (2 if in_parts else 1)


EXACT = AdaptiveBatchingConfig(round_to_power_of_two=False)
