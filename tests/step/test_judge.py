from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from adaptive_batching._step.judge import GradientSketch, WithoutChance, error_of_sum, gradient_error, perturbed
from adaptive_batching._transformers.losses_of_groups import in_groups


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: nn.Dropout(0.5)(x),
        lambda x: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True, norm_first=True)(x),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5),
        lambda x: x + torch.zeros_like(x).uniform_(-1, 1),
        lambda x: x + torch.randn_like(x) + torch.randn(x.shape) + torch.empty_like(x).normal_(1, 2),
        lambda x: x * (torch.rand(x.shape) < 0.5) * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: x + torch.randint(3, x.shape) + torch.randint(1, 5, x.shape) + torch.empty_like(x).bernoulli_(0.3),
        lambda x: x + torch.randint_like(x, 2, 9) + torch.rand_like(x),
    ],
)
def test_a_sample_meets_the_same_numbers_in_any_batch_and_at_any_time(draw: Callable[[Any], torch.Tensor]) -> None:
    x = torch.randn(3, 5, 4)
    with WithoutChance():
        torch.manual_seed(0)  # of weights that are made in a forward
        whole = draw(x)
        torch.manual_seed(0)
        torch.testing.assert_close(draw(x[1:2]), whole[1:2])
        torch.manual_seed(0)
        assert torch.equal(draw(x), whole)


def test_what_is_chosen_at_random_is_neither_all_nor_nothing() -> None:
    with WithoutChance():
        chosen = torch.bernoulli(torch.full((2, 40), 0.15))
        assert 3 <= chosen[0].sum() <= 9 and torch.equal(chosen[0], chosen[1])
        assert torch.randint(10, 20, (1, 40)).unique().numel() > 5
        assert torch.randperm(4).tolist() == [3, 2, 1, 0], "samples that are mixed meet others"


def test_what_else_draws_is_named() -> None:
    layer, x = nn.LSTM(4, 4, num_layers=2, dropout=0.5), torch.randn(3, 5, 4)
    with WithoutChance() as mode:
        F.dropout(torch.rand(3, 5), 0.5).softmax(-1)
        layer.eval()(x)
        assert mode.draws == set()
        layer.train()(x)
        D.Gamma(torch.ones(2), 1.0).sample()
    assert mode.draws == {"lstm", "_standard_gamma"}


def test_a_checkpointed_layer_runs_again_as_it_has_run() -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(F.scaled_dot_product_attention(x, x, x, dropout_p=0.3), 0.5)

    layer, x = Layer(), torch.randn(1, 1, 3, 4, requires_grad=True)
    with WithoutChance():
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    again = x.detach().clone().requires_grad_()
    F.scaled_dot_product_attention(again, again, again).sum().backward()
    torch.testing.assert_close(x.grad, again.grad)
    assert not nn.modules.module._global_forward_pre_hooks, "nothing stays"
    assert not torch.equal(F.dropout(x, 0.5), x)


def test_rounding_is_that_of_the_least_precise_type_that_was_returned() -> None:
    linear = nn.Linear(4, 4)
    with WithoutChance() as mode:
        linear(torch.ones(1, 4))
        assert max(mode.rounding) <= 1e-4
        with torch.autocast("cpu", torch.bfloat16):
            linear(torch.ones(1, 4))
    assert min(mode.rounding) > 1e-3


@given(st.lists(st.integers(1, 5), max_size=40), st.integers(2, 9))
def test_groups_are_few_unlike_and_of_different_sizes(samples: list[int], most: int) -> None:
    numbered = list(enumerate(samples))
    groups = in_groups(numbered, lambda sample: sample[1], most=most)
    chosen = [sample for group in groups for sample in group]
    assert len(chosen) == len(set(chosen)) == min(most, 7, len(samples))
    assert len(groups) <= 4 and all(1 <= len(group) <= 3 for group in groups)
    assert len({kind for _, kind in chosen}) == min(len(set(samples)), len(chosen))
    if len(chosen) > 2:
        assert len({len(group) for group in groups}) > 1


def test_the_error_of_a_sum_is_relative_to_its_terms() -> None:
    assert error_of_sum([1.0, 2.0], 3.0) == 0
    assert error_of_sum([1.0, 2.0], 3.3) == pytest.approx(0.3 / 3.3)
    assert error_of_sum([1e6, -1e6], 1.0) == pytest.approx(5e-7), "terms that cancel leave what rounding leaves"
    assert error_of_sum([math.nan], 1.0) == math.inf


def test_weights_are_changed_a_little_and_put_back_bit_for_bit() -> None:
    last = nn.Linear(3, 2)
    nn.init.zeros_(last.weight)
    last.bias.requires_grad_(False)
    model = nn.Sequential(nn.Linear(400, 300), last)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with WithoutChance(), perturbed(model.parameters()):
        changed = [
            not torch.equal(parameter, value) for parameter, value in zip(model.parameters(), before, strict=True)
        ]
    assert changed == [True, True, True, False]
    assert all(torch.equal(parameter, value) for parameter, value in zip(model.parameters(), before, strict=True))


def with_gradient(*values: float | None) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = None if value is None else torch.tensor([value])
    return parameters


def test_sketches_of_gradients_tell_how_far_apart_these_are() -> None:
    one, other = GradientSketch(with_gradient(3.0, 4.0)), GradientSketch(with_gradient(3.0, 5.0))
    assert one.norm == pytest.approx(5) and one.distance(other) == pytest.approx(1)
    assert GradientSketch(with_gradient(3.0, None)).distance(GradientSketch(with_gradient(3.0, 0.0))) == 0
    assert one.distance(GradientSketch(with_gradient(math.nan, 4.0))) == math.inf
    large = nn.Parameter(torch.zeros(1000, 1000))
    large.grad = torch.zeros(1000, 1000)
    before = GradientSketch([large])
    large.grad[-1, -1] = 2.0
    assert before.distance(GradientSketch([large])) == pytest.approx(2), "by its norm, where it is not looked at"


def test_gradients_that_cannot_be_compared_tell_nothing() -> None:
    parameters = with_gradient(1.0)

    def leave(value: float) -> Callable[[], bool]:
        def run() -> bool:
            parameters[0].grad = torch.tensor([value])
            return True

        return run

    compared = gradient_error(parameters, leave(1.0), leave(1.5), lambda: None)
    assert compared is not None and compared[0] == pytest.approx(1 / 3)
    assert gradient_error(parameters, leave(1.0), lambda: False, lambda: None) is None, "memory has run out"
    assert gradient_error(parameters, leave(math.inf), leave(1.0), lambda: None) is None, "as a scaler finds out"
    assert gradient_error(parameters, leave(0.0), leave(0.0), lambda: None) == (0.0, 1e-4, set())
    assert gradient_error(parameters, leave(1.0), leave(math.nan), lambda: None) == (2.0, 1e-4, set()), "in parts alone"


def run_backward(parameter: nn.Parameter) -> bool:
    parameter.square().sum().backward()  # type: ignore[no-untyped-call]
    return True


@pytest.mark.parametrize("rate", [0.1, 0.0])  # which is zero where it warms up
def test_an_optimizer_within_backward_shows_also_where_it_leaves_no_gradient(rate: float) -> None:
    parameter = nn.Parameter(torch.ones(3))

    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.data -= rate * parameter.grad
        parameter.grad = None

    def start_over() -> None:
        parameter.grad = None

    run = partial(run_backward, parameter)
    assert gradient_error([parameter], run, run, start_over) == (0.0, 1e-4, set())
    logs = parameter.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]
    for runs in (run, lambda: True):  # as a batch without targets does
        assert gradient_error([parameter], runs, runs, start_over) == (0.0, 1e-4, set()), "a hook that only looks"
    logs.remove()
    parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    assert gradient_error([parameter], run, run, start_over) == (math.inf, 1e-4, set())


def test_a_run_that_changes_what_is_trained_and_leaves_its_gradient_is_found_out() -> None:
    parameter = nn.Parameter(torch.ones(3))

    def start_over() -> None:
        parameter.data.fill_(1)
        parameter.grad = None

    def run() -> bool:
        run_backward(parameter)
        parameter.data.clamp_(max=0.5)
        return True

    assert gradient_error([parameter], run, run, start_over) == (math.inf, 1e-4, set())
