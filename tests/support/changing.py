"""A model, a loss and an optimizer that change all that is declared, and what there is to compare."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import torch
from torch import nn


class Meter:
    """What people write to keep a mean, with a state to be listed by."""

    def __init__(self) -> None:
        self.total, self.values = torch.zeros(()), [0.0]

    def note(self, value: float) -> None:
        self.total = self.total + value
        self.values.append(value)

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Restless(nn.Module):
    """Maps vectors of 4 to vectors of 4, and changes whatever it has of buffers, codes, numbers and modes."""

    running: torch.Tensor
    replaced: torch.Tensor
    expanded: torch.Tensor
    seen: torch.Tensor
    drawn: torch.Tensor
    large: torch.Tensor
    sparse: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.codes = nn.Parameter(torch.zeros(2, 4), requires_grad=False)
        self.register_buffer("running", torch.zeros(4))
        self.register_buffer("replaced", torch.ones(2))
        self.register_buffer("expanded", torch.zeros(1, 4).expand(3, 4))
        self.register_buffer("seen", torch.zeros(3))  # by hooks
        self.register_buffer("drawn", torch.zeros(3))
        self.register_buffer("large", torch.zeros(2**18 + 8))  # beyond what is copied in any case
        self.register_buffer("late", None)
        self.register_buffer("sparse", torch.eye(2).to_sparse().coalesce())
        self.longest, self.rate, self.lazy = 1, 0.5, None
        self.register_forward_hook(lambda *_: self._see(0))
        self.linear.register_forward_pre_hook(lambda *_: self._see(1))
        self.linear.weight.register_hook(lambda *_: self._see(2))

    def _see(self, what: int) -> None:
        self.seen[what] += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.running += x.detach().mean(0)
            self.replaced = self.replaced * 2
            self.expanded[:, :1].data[0] += 1
            self.codes.data.add_(1)
            self.sparse.values().add_(1)
            self.large.data[:3] += 1
            self.drawn += torch.tensor([torch.rand(1).item(), random.random(), np.random.rand()])
        self.late = x.detach().sum()
        self.longest, self.rate = max(self.longest, len(x)) + 1, self.rate * 2
        self.fresh, self.lazy = len(x), 1  # type: ignore[assignment]
        self.linear.train(not self.linear.training)
        return self.linear(x) + 0 * self.running  # type: ignore[no-any-return]


class Stateful(torch.optim.Optimizer):
    """Has states that are lists and mappings, a number of its own, and a rate that it changes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            group["lr"] *= 0.9
            group["steps"] = self.num_steps
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(directions=[], factors={"left": torch.zeros_like(parameter)})
                state["directions"].append(parameter.grad.clone())
                state["factors"]["left"] += 1
                parameter -= group["lr"] * parameter.grad


def described(value: Any, seen: set[int] | None = None) -> Any:
    """Return all that is known of a value, in a form to compare: bits of tensors, and attributes of objects."""
    seen = set() if seen is None else seen
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, torch.Tensor):
        value = value.to_dense() if value.is_sparse else value
        numbers = value.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return type(value).__name__, tuple(value.shape), value.dtype, value.requires_grad, numbers
    if isinstance(value, np.ndarray):
        return "array", value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return str(value.get_state())
    if id(value) in seen:
        return "seen"
    seen = {*seen, id(value)}
    if isinstance(value, dict):
        return type(value).__name__, [
            (key if isinstance(key, str) else type(key).__name__, described(each, seen))  # numbers of hooks are new
            for key, each in value.items()
        ]
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value).__name__, [described(each, seen) for each in value]
    if isinstance(value, set):
        return "set", sorted(map(str, value))
    if isinstance(value, nn.Module | torch.optim.Optimizer | Meter):
        return type(value).__name__, [(name, described(each, seen)) for name, each in vars(value).items()]
    return type(value).__name__


def random_numbers() -> tuple[Any, ...]:
    """Return what the generators of the process would give next, which is not taken."""
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    drawn = torch.rand(2).tolist(), random.random(), np.random.rand()
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    return drawn
