from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import nn

from adaptive_batching import _state
from adaptive_batching._probe.trial import without_hooks
from adaptive_batching._state import Kept, State, draws_put_back, rehearsal
from adaptive_batching._values import ConfigError
from tests.support.changing import Meter, Restless, described, random_numbers

CPU = torch.device("cpu")


def restless() -> Restless:
    torch.manual_seed(0)
    return Restless()


@pytest.mark.parametrize("ends", [contextlib.nullcontext(), pytest.raises(KeyError)], ids=["ends", "fails"])
def test_a_rehearsal_leaves_nothing_behind(ends: Any) -> None:
    model = restless()
    model.linear.weight.grad = gradient = torch.ones(4, 4)
    before, numbers = described(model), random_numbers()
    with ends, rehearsal(State([model]), CPU) as start_over:
        for _ in range(2):
            model.linear.weight.requires_grad_(False)
            model.linear.weight.requires_grad_(True)
            model(torch.randn(3, 4)).sum().backward()
            with torch.no_grad():
                model.linear.weight.mul_(-1)
            model.eval()
            assert described(model) != before
            if not isinstance(ends, contextlib.nullcontext):
                raise KeyError
            start_over()
            assert described(model) == before and random_numbers() == numbers
    assert described(model) == before and random_numbers() == numbers
    assert model.linear.weight.grad is gradient and torch.equal(gradient, torch.ones(4, 4))


def test_what_moves_in_memory_comes_back() -> None:
    model = nn.BatchNorm1d(2)
    mean, values = model.running_mean, [0.0, 0.0]
    assert mean is not None
    pointer = mean.data_ptr()
    with rehearsal(State([model]), CPU):
        mean.data = torch.ones(5)
    assert model.running_mean is mean and mean.data_ptr() == pointer and mean.tolist() == values


def test_parameters_that_are_not_copied_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_state, "_COPIED_PARAMETERS", 16)
    model = nn.Linear(4, 4, bias=False)
    with rehearsal(State([model]), CPU):
        model(torch.ones(1, 4))
    with (
        pytest.raises(ConfigError, match=r"changes parameters of the model \(1, the first of shape \(4, 4\)\)"),
        rehearsal(State([model]), CPU),
    ):
        model.weight.data.mul_(2)


class Owner:
    """A loss that has a module, and one that another object of its own has."""

    def __init__(self) -> None:
        self.norm, self.other = nn.BatchNorm1d(2), Holder()
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        for norm in (self.norm, self.other.norm):
            norm(torch.randn(3, 2))

    def method(self, *_: Any) -> None:
        self()


class Holder:
    def __init__(self) -> None:
        self.norm = nn.BatchNorm1d(2)


@pytest.mark.parametrize("kind", ["object", "method", "partial"])
def test_modules_of_a_loss_are_its_own_attributes(kind: str) -> None:
    owner = Owner()
    losses: dict[str, Any] = {"object": owner, "method": owner.method, "partial": functools.partial(owner.method, 1)}
    before = described(owner.norm)
    with rehearsal(State(losses={"loss": losses[kind]}), CPU):
        losses[kind]()
    assert described(owner.norm) == before
    assert owner.calls == 1 and owner.other.norm.num_batches_tracked == 1, "nobody has declared these"


def test_of_a_trainer_numbers_and_small_tensors_are_put_back() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.teacher = restless(), nn.BatchNorm1d(2)
            self.count, self.mean, self.last = 3, torch.ones(2), None
            self.large, self.history = torch.zeros(2**18 + 1), [1.0]
            self.optimizer = None

        def step(self) -> None:
            self.model(torch.randn(3, 4)).sum().backward()
            self.teacher(torch.randn(3, 2))
            self.count, self.last, self.made = self.count + 1, torch.ones(1), 2.0  # type: ignore[assignment]
            self.mean += 1
            self.mean = self.mean * 2
            self.history.append(1.0)
            self.large += 1
            self.optimizer = torch.optim.SGD(self.model.parameters())  # type: ignore[assignment]

    trainer = Trainer()
    before, mean = described([trainer.model, trainer.teacher]), trainer.mean
    with rehearsal(State(trainer=trainer), CPU):
        trainer.step()
    assert described([trainer.model, trainer.teacher]) == before
    assert trainer.mean is mean and mean.tolist() == [1.0, 1.0]
    assert (trainer.count, trainer.last, hasattr(trainer, "made")) == (3, None, False)
    assert trainer.large[0] == 1 and len(trainer.history) == 2 and trainer.optimizer is not None


def test_a_state_puts_a_step_back_as_often_as_it_runs_again() -> None:
    model, meter = restless(), Meter()
    state = State([model], listed=[meter])
    for _ in range(3):
        state.save()
        before = described([model, meter])
        for _ in range(2):  # run again
            model(torch.randn(3, 4))
            meter.note(1.0)
            state.put_back()
            assert described([model, meter]) == before
        model(torch.randn(3, 4))
        state.end()


class Counting(nn.Module):
    """Has a buffer that is written to with a count in its version, which a running mean's is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.get_buffer("calls").add_(1)
        output: torch.Tensor = self.norm(batch)
        return output


def test_what_first_changes_in_a_later_step_is_put_back_and_what_never_does_is_copied_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, copied, copy = Counting(), list[torch.Tensor](), Kept.copy
    state = State([model])

    def noted(kept: Kept, *, on_host: bool) -> None:
        copied.append(kept.tensor)
        copy(kept, on_host=on_host)

    monkeypatch.setattr(Kept, "copy", noted)
    for step in range(6):
        state.save()
        if step >= 3:
            before = described([model])
            model(torch.randn(3, 2))
            state.put_back()
            assert described([model]) == before, step
            model(torch.randn(3, 2))
        state.end()
    times = {name: sum(each is buffer for each in copied) for name, buffer in model.named_buffers()}
    assert (times["table"], times["calls"], times["norm.running_mean"]) == (1, 1 + 2, 6)


def test_trained_parameters_are_left_to_the_step() -> None:
    model = nn.Linear(2, 2)
    state = State([model])
    state.save()
    with torch.no_grad():
        model.weight.fill_(7)
    state.put_back()
    assert model.weight.eq(7).all()


def test_generators_of_collate_functions_and_data_sets_are_put_back() -> None:
    class Rows(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.chance = torch.Generator().manual_seed(1)

    def collate(samples: Any, *, chance: torch.Generator) -> None: ...

    rows, chance = Rows(), torch.Generator().manual_seed(2)
    subset = torch.utils.data.Subset(rows, [0])
    before = [each.get_state().tolist() for each in (rows.chance, chance)]
    with draws_put_back(subset, functools.partial(collate, chance=chance)):
        torch.rand(1, generator=rows.chance), torch.rand(1, generator=chance)
    assert [each.get_state().tolist() for each in (rows.chance, chance)] == before


def test_hooks_of_optimizers_do_not_run_inside() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with without_hooks([optimizer]):
        optimizer.step()
    assert not calls
    optimizer.step()
    assert calls == [1]
