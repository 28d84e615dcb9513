"""Of code that runs outside its own step, nothing stays that is declared: the probe, checks, retries."""

from __future__ import annotations

import collections
import itertools
import logging
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_batching import (
    AdaptiveBatchingConfig,
    AdaptiveStep,
    ConfigError,
    DoesNotFitError,
    find_maximum_batch_size,
)
from tests.support.changing import Meter, Restless, Stateful, described, random_numbers

SAMPLES = list(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
BY_STEPS = AdaptiveBatchingConfig(search="binary_search", round_to_power_of_two=False)


class Loss:
    """Changes a module that it has, and what is listed; or also what nobody knows of."""

    def __init__(self, *, is_restless: bool = False) -> None:
        self.centers, self.meter, self.history = Restless(), Meter(), list[float]()
        self.total, self.longest = torch.zeros(()), 0
        self._is_restless = is_restless

    def __call__(self, model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        loss = model(batch).square().sum() + 0 * self.centers(batch.detach()).sum()
        self.meter.note(float(loss.detach()))
        if self._is_restless:
            self.history.append(float(len(batch)))
            self.total += loss.detach()
            self.longest += 1
        return loss, len(batch)

    def method(self, model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self(model, batch)

    def alone(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        return self(model, batch)[0]


class Masking:
    """A collate function with generators of its own, one of which it makes when it is first called."""

    def __init__(self) -> None:
        self.ours, self.pythons = torch.Generator(), random.Random(0)
        self.numpys, self.old = np.random.default_rng(0), np.random.RandomState(0)
        self.late: torch.Generator | None = None

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        if self.late is None:
            self.late = torch.Generator().manual_seed(3)
        drawn = self.pythons.random() + self.numpys.random() + self.old.rand()
        drawn += sum(torch.rand(1, generator=each).item() for each in (self.ours, self.late))
        return torch.stack(samples) + 0 * drawn


class Run:
    """A model, an optimizer, a loss and a collate function that change all that is declared."""

    def __init__(self, *, is_restless: bool = False, is_method: bool = False) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        self.model, self.loss, self.collate = Restless(), Loss(is_restless=is_restless), Masking()
        self.optimizer = Stateful(self.model.linear.parameters())
        self.step = AdaptiveStep[torch.Tensor](
            self.model, self.optimizer, self.loss.method if is_method else self.loss, self.collate,
            state=[self.loss.meter],
        )  # fmt: skip
        self.steps = 0
        self.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.steps += 1

    def state(self) -> Any:
        """All that is declared, bit for bit."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        known = [self.model, self.optimizer, self.loss.centers, self.loss.meter, gradients, vars(self.collate)]
        return described(known), random_numbers(), self.steps


@pytest.mark.parametrize("is_method", [False, True])
@pytest.mark.parametrize("has_states", [False, True])
def test_a_probe_leaves_nothing_behind(has_states: bool, is_method: bool) -> None:
    run = Run(is_method=is_method)
    if has_states:
        run.step(SAMPLES)
    run.model.linear.bias.grad = torch.full((4,), 3.0)
    before = run.state()
    assert run.step.find_maximum_batch_size(SAMPLES[0], upper=8, settings=BY_STEPS).batch_size == 8
    assert run.state() == before
    found = find_maximum_batch_size(
        run.model, run.optimizer, run.loss.alone, lambda size: torch.stack(SAMPLES[:1] * size), upper=2,
        settings=BY_STEPS, state=[run.loss.meter],
    )  # fmt: skip
    assert found.batch_size == 2
    assert run.state() == before


@pytest.mark.parametrize("is_method", [False, True])
def test_checks_and_audits_of_a_loss_leave_nothing_behind(is_method: bool) -> None:
    """A step that is split ends as one whose parts ran with nothing before them."""

    def ended(*, looked_at_before: bool) -> Any:
        run = Run(is_method=is_method)
        run.step.max_tokens = 4
        if looked_at_before:
            run.step._runner._audit._next = 10  # type: ignore[union-attr]
        run.step(SAMPLES)
        return run.state()

    assert ended(looked_at_before=False) == ended(looked_at_before=True)


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_parts_that_run_again_change_what_they_would_have_changed_at_first(steps_before: int) -> None:
    def ended(failures: int) -> Any:
        run = Run()
        run.step.max_tokens = 4
        for _ in range(steps_before):
            run.step(SAMPLES)
        left, calls = iter([False, *[True] * failures]), itertools.count()

        def fail(module: Any, args: Any) -> None:
            if torch.is_grad_enabled() and next(left, False):  # not in the first part
                raise torch.OutOfMemoryError(f"CUDA out of memory ({next(calls)})")

        if not steps_before:  # the first step is looked at, which runs parts as well
            run.step._runner._audit._next = run.step._runner._audit._next_alike = 10  # type: ignore[union-attr]
            run.step._work.limit.note(4)  # as many tokens have fitted: the samples run again as they were
        with_hook = run.model.register_forward_pre_hook(fail)
        run.step(SAMPLES)
        with_hook.remove()
        assert run.step.num_recoveries == failures
        return run.state()

    assert ended(0) == ended(1)


def test_what_fails_for_good_leaves_what_was_before_the_step() -> None:
    run = Run()
    run.step(SAMPLES)
    before = described([run.model, run.loss.meter])

    def fail(module: Any, args: Any) -> None:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")

    with_hook = run.model.register_forward_pre_hook(fail)
    with pytest.raises(DoesNotFitError):
        run.step(SAMPLES)
    with_hook.remove()
    assert described([run.model, run.loss.meter]) == before


# What is not declared


def test_a_probe_and_the_first_audit_say_what_else_has_changed_once(caplog: pytest.LogCaptureFixture) -> None:
    def warned(run: Run, act: Callable[[Run], Any]) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            act(run)
        return [record.getMessage() for record in caplog.records if "were not undone" in record.getMessage()]

    def split(run: Run) -> None:
        run.step.max_tokens = 4
        for _ in range(10):
            run.step(SAMPLES)

    acts: list[Callable[[Run], Any]] = [
        split, lambda run: run.step.find_maximum_batch_size(SAMPLES[0], upper=2, settings=BY_STEPS)
    ]  # fmt: skip
    for act in acts:
        run = Run(is_restless=True)
        [line] = warned(run, act)
        assert "loss.history grew by " in line and "loss.longest went from " in line and "loss.total has other" in line
        assert "state=[...]" in line and "meter" not in line and "model." not in line
        assert warned(run, act) == []
        assert warned(Run(), act) == []
    listed = Run(is_restless=True)
    listed.step._work.state.listed.append(Listing(listed.loss))
    [line] = warned(listed, split)
    assert "history" not in line and "longest" in line


def test_a_probe_does_not_report_what_it_puts_back(caplog: pytest.LogCaptureFixture) -> None:
    class Counts(nn.Linear):
        """Adds up in place, in an attribute beside a buffer."""

        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("seen", torch.zeros(()))
            self.counts = torch.zeros(4)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.counts += rows.detach().sum(0)
            return super().forward(rows)

    model = Counts()
    step: AdaptiveStep[torch.Tensor] = AdaptiveStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, rows: (model(rows).sum(), len(rows))
    )
    step.find_maximum_batch_size(torch.ones(4), upper=2, settings=BY_STEPS)
    assert not model.counts.any() and "were not undone" not in caplog.text


def test_a_parameter_that_a_probe_unfreezes_is_frozen_again() -> None:
    class Unfreezes(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.bias.requires_grad_()
            return super().forward(rows)

    model = Unfreezes(4, 1)
    model.bias.requires_grad_(False)
    step: AdaptiveStep[torch.Tensor] = AdaptiveStep(
        model, torch.optim.SGD([model.weight], lr=0.1), lambda model, rows: (model(rows).sum(), len(rows))
    )
    step.find_maximum_batch_size(torch.ones(4), upper=2, settings=BY_STEPS)
    assert not model.bias.requires_grad


class Listing:
    """Has the history of a loss for its state."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def state_dict(self) -> dict[str, Any]:
        return {"history": self._loss.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loss.history[:] = state["history"]


def test_what_is_listed_needs_a_state() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match=r"state has \{\}, of dict, which has no state_dict and load_state_dict"):
        AdaptiveStep[torch.Tensor](model, optimizer, Loss(), state=[{}])


# What is kept of optimizers and modules, and what it costs


class Many(nn.Module):
    """A model of so many parameters, and a buffer for each."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(1) for _ in range(number)])
        for at in range(number):
            self.register_buffer(f"seen_{at}", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for buffer in self.buffers():
            buffer += 1
        return x * torch.stack(list(self.weights)).sum()


def test_a_probe_restores_more_than_a_thousand_states_and_buffers() -> None:
    model = Many(1010)
    optimizer = torch.optim.Adam(model.parameters())

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum()  # type: ignore[no-any-return]

    loss(model, torch.ones(1, 1)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    before = described([model, optimizer])
    find_maximum_batch_size(model, optimizer, loss, lambda size: torch.ones(size, 1), upper=2, settings=BY_STEPS)
    assert described([model, optimizer]) == before


class Large(nn.Module):
    """Has buffers of 2 MiB, one of which it changes, past what counts writes if need be."""

    changing: torch.Tensor

    def __init__(self, *, by_data: bool) -> None:
        super().__init__()
        self.linear, self._by_data = nn.Linear(4, 1), by_data
        self.register_buffer("changing", torch.zeros(2**19))
        for at in range(8):
            self.register_buffer(f"calm_{at}", torch.zeros(2**19))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changing = self.changing.data if self._by_data else self.changing
        changing[:3] += len(x)
        return self.linear(x) + 0 * self.changing[0].item()  # type: ignore[no-any-return]


def squares(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).square().sum(), len(batch)


class Copies(TorchDispatchMode):
    """Adds up the bytes that are copied within it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::clone", "aten::_to_copy", "aten::copy_"):
            self.num_bytes += result.nbytes
        return result


@pytest.mark.parametrize("by_data", [False, True])
def test_no_step_copies_large_buffers_that_stay_as_they_are(by_data: bool) -> None:
    model = Large(by_data=by_data)
    step = AdaptiveStep[torch.Tensor](model, torch.optim.SGD(model.parameters(), lr=0.1), squares)
    step(SAMPLES)
    with Copies() as copies:
        step(SAMPLES)
    assert model.changing.nbytes <= copies.num_bytes < 2 * model.changing.nbytes
    failures = iter([False, True, False, True])

    def run_out(*_: Any) -> None:
        if torch.is_grad_enabled() and next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_hook(run_out)
    for _ in range(3):
        step(SAMPLES)
    assert step.num_recoveries == 2
    assert model.changing[:3].eq(5 * 8).all() and model.changing[3:].eq(0).all()


def test_the_tables_of_a_model_and_the_numbers_that_describe_them_stay_together() -> None:
    """As of rotary embeddings that become longer with what they see."""

    class Growing(nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.most = nn.Linear(4, 1), 2
            self.register_buffer("table", torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > self.most:
                self.most, self.table = len(x), torch.full((len(x),), float(len(x)))
            return self.linear(x) * self.table[: len(x), None]  # type: ignore[no-any-return]

    model = Growing()
    step = AdaptiveStep[torch.Tensor](model, torch.optim.SGD(model.parameters(), lr=0.1), squares)
    step.find_maximum_batch_size(SAMPLES[0], upper=8, settings=BY_STEPS)
    assert (model.most, model.table.tolist()) == (2, [1.0, 1.0])


# What is left alone


class ReadAhead:
    """Draws samples in a thread, ahead of the steps that take them; its loss is a method."""

    def __init__(self, kind: str) -> None:
        self.model = nn.Linear(4, 1)
        self.ahead: Any = [] if kind == "list" else collections.deque()
        self.drawn = 0
        self.wanted, self.done = threading.Semaphore(0), threading.Semaphore(0)
        if kind == "another object":  # which has no thread itself
            holder: Any = types.SimpleNamespace(source=self, note=self.note)
            self.loss: Any = types.MethodType(ReadAhead.method, holder)
        else:
            self.loss = self.method
        self.thread = threading.Thread(target=self.fill, daemon=True)
        self.thread.start()

    def fill(self) -> None:
        for number in itertools.count():
            self.wanted.acquire()
            self.ahead.append(number)
            self.drawn += 1
            self.done.release()

    def note(self) -> None:
        """Have the thread draw another sample, now: while the loss is computed, whatever that is for."""
        self.wanted.release()
        self.done.acquire()

    def method(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.note()
        return model(batch).square().sum(), len(batch)


@pytest.mark.parametrize("kind", ["deque", "list", "another object"])
def test_no_sample_is_lost_that_a_thread_has_read_ahead(kind: str) -> None:
    source = ReadAhead(kind)
    step = AdaptiveStep[torch.Tensor](source.model, torch.optim.SGD(source.model.parameters(), lr=0.1), source.loss)
    step.find_maximum_batch_size(SAMPLES[0], upper=2, settings=BY_STEPS)
    step.max_tokens = 2
    failures = iter([False] * 20 + [True])

    def run_out(*_: Any) -> None:
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory")

    fail = source.model.register_forward_pre_hook(run_out)
    taken = []
    for _ in range(12):  # the checks before the first, audits of the first and tenth
        step(SAMPLES[:4])
        for _ in range(len(source.ahead) - 2):
            taken.append(source.ahead.pop(0) if kind == "list" else source.ahead.popleft())
    fail.remove()
    assert step.num_recoveries == 1
    assert [*taken, *source.ahead] == list(range(source.drawn)), "each once, in order"


def compiled(kept: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not torch.compiler.is_compiling():
            kept.eager += 1
        return model(batch).square().sum(), torch.tensor(float(len(batch)))

    return torch.compile(loss, backend="eager")  # type: ignore[no-any-return]


def test_a_compiled_loss_is_compiled_after_a_check_too() -> None:
    kept = types.SimpleNamespace(eager=0)
    model = nn.Linear(4, 1)
    step = AdaptiveStep[torch.Tensor](model, torch.optim.SGD(model.parameters(), lr=0.1), compiled(kept))
    step.max_tokens = 4
    step(SAMPLES)
    checked = kept.eager
    assert checked > 0, "a check compiles nothing"
    for _ in range(3):
        step(SAMPLES)
    assert kept.eager == checked
