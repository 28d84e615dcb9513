"""The optimizer step of a plain loop with parameters, batches and losses that are not the usual ones."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import default_collate

from adaptive_batching import AdaptiveBatchingConfig, AdaptiveStep, ConfigError, DoesNotFitError

NUM_SAMPLES = 12
Sample = dict[str, torch.Tensor]


class Model(nn.Module):
    """Sorts features into 3 classes; runs out of memory with more than ``most_samples``."""

    def __init__(self, most_samples: int = 10**9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(4, 8)
        self.dropout: nn.Module = nn.Dropout(0.0)
        self.out = nn.Linear(8, 3)
        self.most_samples = most_samples
        self.double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:  # [b, 4] -> [b, 3]
        if torch.is_grad_enabled() and len(features) > self.most_samples:
            raise MemoryError
        logits: torch.Tensor = self.out(self.dropout(self.embedding(features).tanh()))
        return logits


def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    return cross_entropy(model(batch["features"]), batch["label"], reduction="sum"), len(batch["label"])


def make_samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(NUM_SAMPLES, 4, generator=generator, dtype=torch.float64)
    return [{"features": row, "label": torch.tensor(i % 3)} for i, row in enumerate(features)]


SAMPLES = make_samples()


def step_of(model: nn.Module, loss: Any = loss, collate: Any = default_collate, **more: Any) -> AdaptiveStep[Sample]:
    return AdaptiveStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, collate, **more)


# Parameters


@pytest.mark.parametrize("max_tokens", [None, 4])
def test_parameters_of_the_loss_that_the_optimizer_has_are_those_of_the_model_s_too(max_tokens: int | None) -> None:
    def trained(most_samples: int, **settings: Any) -> list[torch.Tensor]:
        model, scale = Model(most_samples), nn.Parameter(torch.ones((), dtype=torch.float64))
        optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=0.1)

        def scaled(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
            return cross_entropy(scale * model(batch["features"]), batch["label"], reduction="sum"), len(batch["label"])

        step: AdaptiveStep[Sample] = AdaptiveStep(model, optimizer, scaled, clip_norm=0.1, **settings)
        found = step.find_maximum_batch_size(SAMPLES[0], upper=2, settings=AdaptiveBatchingConfig())
        assert (found.batch_size, scale.item(), scale.grad) == (2, 1.0, None), "the probe leaves no trace"
        for _ in range(3):
            step(SAMPLES)
        return [scale, *model.parameters()]

    for ours, expected in zip(trained(5, max_tokens=max_tokens), trained(10**9), strict=True):
        torch.testing.assert_close(ours, expected)


def test_gradients_that_the_optimizer_does_not_use_are_not_left_behind() -> None:
    model = Model()
    step: AdaptiveStep[Sample] = AdaptiveStep(model, torch.optim.SGD(model.out.parameters(), lr=0.1), loss)
    for _ in range(2):
        step(SAMPLES)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loop_within_one_autocast_context_trains_the_weights_of_each_step() -> None:
    samples = [{**sample, "features": sample["features"].float()} for sample in SAMPLES]
    step, apart = step_of(Model().float()), step_of(Model().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [step(samples).item() for _ in range(4)]
    for found in losses:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert found == apart(samples).item()


# Batches


class HidesItsTensors(UserDict[str, Any]):
    """A batch as tokenizers make it: a mapping, and no dictionary."""


@dataclass
class Batch:
    values: dict[str, torch.Tensor]

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.values[key]


class Centred(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - hidden.mean(0)


@pytest.mark.parametrize("kind", [HidesItsTensors, Batch])
def test_batches_of_a_class_of_their_own_are_cut_and_a_dependence_in_them_is_seen(kind: Any) -> None:
    def collate(samples: list[Sample]) -> Any:
        return kind(default_collate(samples))

    model = Model(most_samples=5)
    step = step_of(model, collate=collate)
    step(SAMPLES)
    assert step.num_recoveries > 0
    model.dropout = Centred()
    with pytest.raises(DoesNotFitError, match=r"dropout \(Centred\) computes over the batch"):
        step_of(model, collate=collate)(SAMPLES)


# Losses that compute over the batch, outside of the model


def contrastive(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    """Tell each sample's features from those of the others in the batch."""
    model(batch["features"])
    hidden = normalize(model.embedding(batch["features"]), dim=-1)
    return cross_entropy(hidden @ hidden.T / 0.1, torch.arange(len(hidden)), reduction="sum"), len(hidden)


def weighted_by_the_batch(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    losses = cross_entropy(model(batch["features"]), batch["label"], reduction="none")
    return (losses * (losses.detach() - losses.detach().mean())).sum(), len(losses)


def mean_of_one(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return cross_entropy(model(batch["features"]), batch["label"]), 1


def mean_and_number(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return cross_entropy(model(batch["features"]), batch["label"]), len(batch["label"])


@pytest.mark.parametrize("wrong", [contrastive, weighted_by_the_batch, mean_of_one, mean_and_number])
def test_a_loss_that_computes_over_the_batch_is_not_cut(wrong: Any) -> None:
    model = Model(most_samples=5)
    with pytest.raises(DoesNotFitError, match=r"would not give the same result: loss(, which is .*,)? computes over"):
        step_of(model, wrong)(SAMPLES)
    with pytest.raises(ConfigError, match=r"max_tokens=4 would change the result: loss(, which is .*,)? computes over"):
        step_of(model, wrong, max_tokens=4)(SAMPLES)
    assert step_of(Model(), wrong)(SAMPLES).isfinite(), "whole it may be used"


def with_dropout(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    model.dropout.p = 0.5  # type: ignore[union-attr, assignment]
    return loss(model, batch)


def with_weights(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    losses = cross_entropy(model(batch["features"]), batch["label"], reduction="none")
    weights = 1 + batch["label"].double()
    return (losses * weights).sum(), weights.sum()


def with_cancelling_terms(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    values = model(batch["features"]).float()
    return (values - values.detach()).sum(), len(values)


def with_random_numbers_of_its_own(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    kept = torch.from_numpy(CHANCE.random(len(batch["label"])) < 0.5)
    losses = cross_entropy(model(batch["features"]), batch["label"], reduction="none")
    return (losses * kept).sum(), kept.sum()


CHANCE = np.random.default_rng(0)


@pytest.mark.parametrize("right", [with_dropout, with_weights, with_cancelling_terms, with_random_numbers_of_its_own])
def test_a_loss_that_is_a_sum_over_samples_is_cut(right: Any) -> None:
    model = Model(most_samples=5)
    step = step_of(model, right)
    step(SAMPLES)
    assert step.num_recoveries > 0


# Errors


def test_what_is_no_number_where_one_is_due_is_an_error_that_says_so() -> None:
    model = Model(most_samples=5)
    with pytest.raises(
        ConfigError, match=r"length returned 2\.5; it must return the tokens of a sample before padding"
    ):
        step_of(model, length=lambda sample: 2.5)(SAMPLES)
    step = step_of(model)
    for wrong in (0, 2.5, "8"):
        with pytest.raises(ConfigError, match=f"max_tokens={wrong!r} must be at least 1, a whole number"):
            step.max_tokens = wrong  # type: ignore[assignment]
    step.max_tokens = np.int64(4)  # type: ignore[assignment]
    assert type(step.max_tokens) is int
    with pytest.raises(ConfigError, match=r"a tensor of shape \(12,\)\); it must return the sum"):
        step_of(Model(), lambda model, batch: (loss(model, batch)[0], batch["label"]))(SAMPLES)


def test_the_number_of_losses_may_be_one_of_numpy() -> None:
    step = step_of(Model(), lambda model, batch: (loss(model, batch)[0], np.int64(NUM_SAMPLES)))
    total, number = loss(Model(), default_collate(SAMPLES))
    torch.testing.assert_close(step(SAMPLES), (total / number).detach())


def test_a_batch_that_is_collated_already_is_an_error_that_says_how_samples_come() -> None:
    with pytest.raises(ConfigError, match=r"samples is a dict, as if collated already; give a list.* collate_fn=list"):
        step_of(Model())(default_collate(SAMPLES))
