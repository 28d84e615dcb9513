"""Adam's second moment under growing batches: as long a memory in samples, and no jump where beta2 changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batching._torchtune.stock.learning_rate import SecondMoment, check_that_beta2_can_follow
from adaptive_batching._values import ConfigError

BETAS = (0.9, 0.99)
GRADIENTS = torch.tensor([[0.5, -2.0, 1e-3]], dtype=torch.float64).expand(10, 3)


def trained(optimizer: Optimizer, parameter: nn.Parameter, gradients: torch.Tensor = GRADIENTS) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


def adam(kind: str = "AdamW", **arguments: object) -> tuple[Optimizer, nn.Parameter]:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    return getattr(torch.optim, kind)([parameter], lr=0.01, betas=BETAS, **arguments), parameter


@pytest.mark.parametrize("changes", [[1, 4], [1, 2, 8], [4, 1]])
@pytest.mark.parametrize(("kind", "arguments"), [("AdamW", {}), ("Adam", {"amsgrad": True}), ("NAdam", {})])
def test_a_change_leaves_the_size_of_steps_where_gradients_do_not_change(
    kind: str, arguments: dict[str, object], changes: list[float]
) -> None:
    """The average of equal squares is their square, whatever its decay: so the run is that of a constant beta2."""
    constant, expected = adam(kind, **arguments)
    optimizer, parameter = adam(kind, **arguments)
    moment = SecondMoment([optimizer], {})
    for growth in changes:
        moment.follow(growth)
        trained(optimizer, parameter)
        trained(constant, expected)
    torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("follows", [True, False])
def test_what_is_resumed_goes_on_or_back_as_the_setting_says(follows: bool) -> None:
    optimizer, parameter = adam()
    moment = SecondMoment([optimizer], {})
    moment.follow(4)
    trained(optimizer, parameter)
    with moment.unscaled():
        assert optimizer.param_groups[0]["betas"] == BETAS, "what a checkpoint holds"
        saved = copy.deepcopy(optimizer.state_dict())
    resumed, again = adam()
    resumed.load_state_dict(saved)
    with torch.no_grad():
        again.copy_(parameter)
    SecondMoment([resumed], moment.state_dict(), follows=follows).follow(4)
    assert resumed.param_groups[0]["betas"][1] == (BETAS[1] ** 4 if follows else BETAS[1])
    trained(optimizer, parameter)
    trained(resumed, again)
    torch.testing.assert_close(again, parameter, rtol=0 if follows else 1e-12, atol=0)


def test_an_optimizer_without_such_a_moment_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"keep_beta2_half_life=True works with Adam.* is torch\.optim\.sgd\.SGD; use"
    ):
        check_that_beta2_can_follow([torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)])
