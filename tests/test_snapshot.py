from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from adaptive_batching import _kept_values, _snapshot
from adaptive_batching._kept_values import fingerprint
from adaptive_batching._snapshot import Snapshot, StepState, rehearsal, without_hooks
from adaptive_batching._values import ConfigError
from tests.support.changing import Meter, Restless, described, random_numbers

CPU = torch.device("cpu")


def restless() -> Restless:
    torch.manual_seed(0)
    return Restless()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(1,), (61 * 8,), (40, 64), (3, 1001)])
def test_a_fingerprint_tells_other_bits_and_other_places(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(-100, 100, shape, generator=generator).to(dtype)
    before = fingerprint(tensor)
    assert torch.equal(fingerprint(tensor.clone()), before)
    flat = tensor.flatten()
    for place in {0, flat.numel() // 2, flat.numel() - 1}:
        changed = tensor.clone()
        changed.view(-1)[place] += 1
        assert not torch.equal(fingerprint(changed), before), place
    if len(shape) == 2:
        assert not torch.equal(fingerprint(tensor[[1, 0, *range(2, shape[0])]]), before)
        assert not torch.equal(fingerprint(tensor.flip(0)), before)


def test_what_is_compared_on_its_device_is_put_back_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    far: list[int] = []

    def is_far(part: torch.Tensor) -> bool:
        far.append(part.numel())
        return True

    monkeypatch.setattr(_kept_values, "_is_far", is_far)
    model = restless()
    before = described(model)
    with rehearsal([model], CPU) as start_over:
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
            with torch.no_grad():
                model.linear.weight.mul_(-1)
            assert described(model) != before
            start_over()
            assert described(model) == before
    assert sum(far) >= sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("ends", [contextlib.nullcontext(), pytest.raises(KeyError)], ids=["ends", "fails"])
def test_a_rehearsal_leaves_nothing_behind(ends: Any) -> None:
    model = restless()
    model.linear.weight.grad = gradient = torch.ones(4, 4)
    before, numbers = described(model), random_numbers()
    with ends, rehearsal([model], CPU):
        model.linear.weight.requires_grad_(False)
        model.linear.weight.requires_grad_(True)
        model(torch.randn(3, 4)).sum().backward()
        model.eval()
        if not isinstance(ends, contextlib.nullcontext):
            raise KeyError
    assert described(model) == before and random_numbers() == numbers
    assert model.linear.weight.grad is gradient and torch.equal(gradient, torch.ones(4, 4))


def test_what_moves_in_memory_comes_back() -> None:
    model = nn.BatchNorm1d(2)
    mean, values = model.running_mean, [0.0, 0.0]
    assert mean is not None
    pointer = mean.data_ptr()
    with rehearsal([model], CPU):
        mean.data = torch.ones(5)
    assert model.running_mean is mean and mean.data_ptr() == pointer and mean.tolist() == values


def test_parameters_that_are_not_copied_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_snapshot, "_COPIED_PARAMETERS", 16)
    model = nn.Linear(4, 4, bias=False)
    with rehearsal([model], CPU):
        model(torch.ones(1, 4))
    with (
        pytest.raises(ConfigError, match=r"changes parameters of the model \(1, the first of shape \(4, 4\)\)"),
        rehearsal([model], CPU),
    ):
        model.weight.data.mul_(2)


TOTAL, HISTORY = torch.zeros(()), [0.0]


def through_globals(x: float) -> None:
    global TOTAL
    TOTAL = TOTAL + x
    HISTORY.append(x)


def closure() -> Callable[[float], None]:
    total, meter, parts = 0.0, Meter(), torch.zeros(2)

    def note(x: float) -> None:
        nonlocal total
        total += x
        meter.note(x)
        parts.add_(x)

    return note


class Loss:
    def __init__(self) -> None:
        self.total, self.meter = 0.0, Meter()

    def __call__(self, x: float) -> None:
        self.note(x)

    def note(self, x: float) -> None:
        self.total += x
        self.meter.note(x)


def reached(function: Any) -> Any:
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    own = getattr(function, "__self__", function)
    of_cells = [vars(each) if isinstance(each, Meter) else each for each in cells]
    return described([TOTAL, HISTORY, of_cells, vars(own) if isinstance(own, Loss) else None])


@pytest.mark.parametrize(
    "function",
    [through_globals, closure(), Loss(), Loss().note, functools.partial(closure()), lambda x: through_globals(x)],
)
def test_what_a_function_sums_up_is_put_back(function: Callable[[float], None]) -> None:
    inner = getattr(function, "func", function)
    before = reached(inner)
    with rehearsal([function], CPU):
        function(2.0)
        assert reached(inner) != before
    assert reached(inner) == before


def test_data_are_not_looked_into() -> None:
    class Rows(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.rows = torch.zeros(2)

    class Owner:
        def __init__(self) -> None:
            self.data, self.kept = Rows(), torch.zeros(3)
            self.train_dataset = [{"x": torch.zeros(4)}]

    assert [each.shape for each in Snapshot([Owner()]).tensors] == [(3,)]


def test_states_of_an_optimizer_are_kept_for_those_who_step_it_alone() -> None:
    class Owner:
        """A trainer, and a wrapper of an optimizer."""

        def __init__(self) -> None:
            self.optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(5))])

    class Wrapper(Owner, torch.optim.Optimizer):
        pass

    owner, wrapper = Owner(), Wrapper()
    for each in (owner, wrapper):
        [parameter] = each.optimizer.param_groups[0]["params"]
        parameter.grad = torch.ones(5)
        each.optimizer.step()
    assert Snapshot([owner]).tensors == []
    assert [value.shape for value in Snapshot([wrapper]).tensors if value.dim()] == [(5,), (5,)]


def test_a_step_state_puts_back_what_it_has_learnt_that_a_step_changes_and_copies_nothing_else() -> None:
    model, meter = restless(), Meter()
    calm = nn.Linear(2, 2)
    state = StepState([nn.ModuleList([model, calm]), meter])
    for _ in range(3):
        state.save()
        before = described([model, vars(meter)])
        for _ in range(2):  # run again
            model(torch.randn(3, 4))
            meter.note(1.0)
            state.put_back()
            assert described([model, vars(meter)]) == before
        model(torch.randn(3, 4))
        state.end()
    state.save()
    assert not any(module is calm for module, _ in state._places)


def test_a_step_state_learns_again_when_it_is_told_to() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, changes: bool) -> None:
            self.calls += changes

    model = Late()
    state = StepState([model])
    for changes in (False, True):
        state.look_again()
        state.save()
        model(changes)
        state.end()
    state.save()
    model(True)
    state.put_back()
    assert model.calls == 1


def test_trained_parameters_are_left_to_the_step() -> None:
    model = nn.Linear(2, 2)
    state = StepState([model])
    state.save()
    with torch.no_grad():
        model.weight.fill_(7)
    state.put_back()
    assert model.weight.eq(7).all()


def test_hooks_of_optimizers_do_not_run_inside() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with without_hooks([optimizer]):
        optimizer.step()
    assert not calls
    optimizer.step()
    assert calls == [1]
