"""Of all that runs somebody's code outside its own step, nothing stays: the probe, the checks, retries."""

from __future__ import annotations

import collections
import itertools
import random
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from adaptive_batching._step.batch_dependence import find_batch_dependent_module
from tests.support.changing import Meter, Restless, Stateful, described, random_numbers

SAMPLES = list(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))


class Loss:
    """Sums up what it has computed, as people do for their logs."""

    def __init__(self) -> None:
        self.total, self.meter, self.history = torch.zeros(()), Meter(), list[float]()

    def __call__(self, model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        loss = model(batch).square().sum()
        self.total = self.total + loss.detach()
        self.meter.note(1.0)
        self.history.append(float(len(batch)))
        return loss, len(batch)


class Run:
    """A model, an optimizer and a loss that change all they can."""

    def __init__(self) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        self.model, self.loss = Restless(), Loss()
        self.optimizer = Stateful(self.model.linear.parameters())
        self.step = AdaptiveStep[torch.Tensor](self.model, self.optimizer, self.loss)
        self.optimizer.register_step_post_hook(lambda *_: self.loss.history.append(-1.0))

    def state(self) -> Any:
        return described([self.model, self.optimizer, vars(self.loss)]), random_numbers()


@pytest.mark.parametrize("has_states", [False, True])
def test_a_probe_leaves_nothing_behind(has_states: bool) -> None:
    run = Run()
    if has_states:
        run.step(SAMPLES)
    before = run.state()
    found = run.step.find_maximum_batch_size(
        SAMPLES[0], upper=8, settings=AdaptiveBatchingConfig(round_to_power_of_two=False)
    )
    assert found.batch_size == 8
    assert run.state() == before


def test_a_check_for_dependence_leaves_nothing_behind() -> None:
    run = Run()
    before = run.state()
    first, second = torch.stack(SAMPLES[:3]), torch.stack([SAMPLES[0], *SAMPLES[3:5]])
    find_batch_dependent_module(run.model, lambda batch: run.loss(run.model, batch), first, second, owners=[run.loss])
    assert run.state() == before


def test_measuring_a_loss_and_auditing_it_leave_nothing_behind() -> None:
    """A step that is split ends as one whose parts ran with nothing before them."""

    def ended(*, looked_at_before: bool) -> Any:
        run = Run()
        run.step.max_tokens = 4
        if looked_at_before:
            run.step._work._parts_add_up = True
            run.step._runner._audit._next = 10  # type: ignore[union-attr]
        run.step(SAMPLES)
        return run.state()

    assert ended(looked_at_before=False) == ended(looked_at_before=True)


def test_parts_that_run_again_change_what_they_would_have_changed_at_first() -> None:
    def ended(failures: int) -> Any:
        run = Run()
        run.step.max_tokens = 4
        run.step(SAMPLES)
        left = iter(range(failures))

        def fail(module: Any, args: Any) -> None:
            if run.model.counts["calls"] == calls + 1 and next(left, None) is not None:
                raise torch.OutOfMemoryError("CUDA out of memory")

        calls = run.model.counts["calls"]
        with_hook = run.model.register_forward_pre_hook(fail)
        run.step(SAMPLES)  # as many tokens have fitted: the samples run again as they were
        with_hook.remove()
        assert run.step.num_recoveries == failures
        return run.state()

    assert ended(0) == ended(1)


def test_what_fails_for_good_leaves_what_was_before_the_step() -> None:
    run = Run()
    run.step(SAMPLES)
    before = described([run.model, vars(run.loss)])

    def fail(module: Any, args: Any) -> None:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")

    with_hook = run.model.register_forward_pre_hook(fail)
    with pytest.raises(DoesNotFitError):
        run.step(SAMPLES)
    with_hook.remove()
    assert described([run.model, vars(run.loss)]) == before


class Many(nn.Module):
    """A model of so many parameters, which notes its tensors in a dictionary and a list in every forward."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(1) for _ in range(number)])
        self.seen = {name: torch.zeros(1) for name, _ in self.named_parameters()}
        self.nested = [[0] for _ in range(number)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["weights.0"] += 1
        self.nested[-1].append(1)
        return x * torch.stack(list(self.weights)).sum()


BY_STEPS = AdaptiveBatchingConfig(search="binary_search")


def test_a_probe_restores_states_and_containers_of_more_than_a_thousand_entries() -> None:
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


class ByRow:
    """A loss with a table of so many rows, of which it keeps views or which it changes in place."""

    def __init__(self, rows: int) -> None:
        self.rows = [torch.zeros(1) for _ in range(rows)]
        self.replaced = dict(enumerate(self.rows))
        self.notes: list[list[float]] = [[] for _ in range(rows)]
        self.in_place = False

    def __call__(self, model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        loss = model(batch).square().sum()
        self.replaced[len(self.rows) - 1] = loss.detach()
        self.notes[-1].append(1.0)
        if self.in_place:
            self.rows[-1] += 1
        return loss, len(batch)


def test_a_large_table_of_a_loss_is_put_back_or_its_change_is_an_error() -> None:
    model, loss = nn.Linear(4, 4), ByRow(1010)
    step = AdaptiveStep[torch.Tensor](model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    before = described(vars(loss))
    step.find_maximum_batch_size(SAMPLES[0], upper=2, settings=BY_STEPS)
    assert described(vars(loss)) == before
    loss.in_place = True
    with pytest.raises(ConfigError, match=r"changes tensors in place in a list .* more than 1,000 entries \(1, "):
        step.find_maximum_batch_size(SAMPLES[0], upper=2, settings=BY_STEPS)


def test_views_of_weights_in_a_large_table_are_no_error() -> None:
    model = Many(1010)
    loss = ByRow(1010)
    loss.rows = list(model.state_dict().values())
    step = AdaptiveStep[torch.Tensor](model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    before = described([model, loss.rows])
    step.find_maximum_batch_size(torch.ones(1), upper=2, settings=BY_STEPS)
    assert described([model, loss.rows]) == before


Sum = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Owner:
    """Keeps what its loss has computed, out of sight as well, and learns a scale."""

    class Hidden:
        __slots__ = ("total",)
        total: torch.Tensor

    def __init__(self) -> None:
        self.scale, self.weight, self.hidden = nn.Parameter(torch.ones(())), torch.ones(()), self.Hidden()
        self.hidden.total = torch.zeros(())
        self.last: list[torch.Tensor] = []

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).sum() * self.scale * self.weight
        self.weight = self.weight * 1.0
        self.hidden.total += loss.detach()
        self.last.append(loss)
        return loss

    def method(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return self(model, batch)


def enclosing(scale: nn.Parameter | None = None) -> Sum:
    weight, kept = torch.ones(()), dict[str, torch.Tensor]()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal weight
        before = kept.get("sum", torch.zeros(())).detach()
        kept["sum"] = model(batch).sum() * weight * (1.0 if scale is None else scale) + 0 * before
        weight = weight * 1.0
        return kept["sum"]

    return loss


WEIGHT, KEPT = torch.ones(()), dict[str, torch.Tensor]()


def naming(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    global WEIGHT
    KEPT["sum"] = model(batch).sum() * WEIGHT + KEPT.get("sum", torch.zeros(())).detach() * 0
    WEIGHT = WEIGHT * 1.0
    return KEPT["sum"]


def with_hooks(model: nn.Module) -> Sum:
    """A loss that is plain, of a model whose hooks add up what they see."""
    sums, norms = dict[str, torch.Tensor](), [torch.zeros(())]

    class Watch:
        total = torch.zeros(())

        def note(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.total = self.total + output.detach().sum()

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        sums["all"] = sums.get("all", 0.0) + output.detach().sum()
        return output + 0 * sums["all"]

    model.register_forward_hook(note)
    model.register_forward_hook(Watch().note)
    next(model.parameters()).register_hook(lambda gradient: norms.append(norms[-1] + gradient.norm()))
    return lambda model, batch: model(batch).sum()  # type: ignore[no-any-return]


def of_scale(make: Callable[[nn.Parameter], Sum]) -> tuple[Sum, list[nn.Parameter]]:
    scale = nn.Parameter(torch.ones(()))
    return make(scale), [scale]


def of_owner(make: Callable[[Owner], Sum]) -> tuple[Sum, list[nn.Parameter]]:
    owner = Owner()
    return make(owner), [owner.scale]


KEEPING: dict[str, Callable[[nn.Module], tuple[Sum, list[nn.Parameter]]]] = {
    "object": lambda _: of_owner(lambda owner: owner),
    "method": lambda _: of_owner(lambda owner: owner.method),
    "closure": lambda _: of_scale(enclosing),
    "closure around a method": lambda _: of_owner(lambda owner: lambda model, batch: owner.method(model, batch)),
    "globals": lambda _: (naming, []),
    "hooks": lambda model: (with_hooks(model), []),
}


IN_LOOP = ("method", "globals", "hooks")


@pytest.mark.parametrize(
    ("kind", "in_loop"), [*((kind, False) for kind in KEEPING), *((kind, True) for kind in IN_LOOP)]
)
def test_training_goes_on_as_without_a_probe_whatever_keeps_what_it_has_computed(kind: str, in_loop: bool) -> None:
    def trained(*, probes: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        loss, own = KEEPING[kind](model)
        optimizer = torch.optim.AdamW([*model.parameters(), *own], weight_decay=0.1)
        step = AdaptiveStep[torch.Tensor](model, optimizer, loss, count=len)
        if probes and in_loop:
            step.find_maximum_batch_size(SAMPLES[0], upper=2)
        elif probes:
            find_maximum_batch_size(model, optimizer, loss, lambda size: torch.stack(SAMPLES[:1] * size), upper=2)
        assert all(parameter.grad is None for parameter in (*model.parameters(), *own))
        step(SAMPLES)
        return [parameter.tolist() for parameter in (*model.parameters(), *own)]

    assert trained(probes=True) == trained(probes=False)


def test_a_count_that_is_a_method_is_put_back() -> None:
    class Counts:
        def __init__(self) -> None:
            self.seen = [torch.zeros(())]

        def __call__(self, batch: torch.Tensor) -> torch.Tensor:
            self.seen.append(self.seen[-1] + batch.sum())
            return (batch[:, 0] * 0 + 1).sum() + 0 * self.seen[-1]

        def method(self, batch: torch.Tensor) -> torch.Tensor:
            return self(batch)

    model, counts = nn.Linear(4, 1), Counts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = AdaptiveStep[torch.Tensor](model, optimizer, lambda model, batch: model(batch).mean(), count=counts.method)
    step.find_maximum_batch_size(SAMPLES[0], upper=2)
    assert len(counts.seen) == 1


class ReadAhead:
    """Draws samples in a thread, ahead of the steps that take them; its loss is a method."""

    def __init__(self, kind: str) -> None:
        self.model = nn.Linear(4, 1)
        self.ahead: Any = [] if kind == "list" else collections.deque()
        self.drawn, self.seen, self.kind = 0, list[int](), kind
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

    def draw(self) -> None:
        """Have the thread draw another sample, now."""
        self.wanted.release()
        self.done.acquire()

    def note(self) -> None:
        self.draw()  # while the loss is computed, whatever that is for

    def method(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.note()
        return model(batch).square().sum(), len(batch)


@pytest.mark.parametrize("kind", ["deque", "list", "another object"])
def test_no_sample_is_lost_that_a_thread_has_read_ahead(kind: str) -> None:
    source = ReadAhead(kind)
    step = AdaptiveStep[torch.Tensor](source.model, torch.optim.SGD(source.model.parameters(), lr=0.1), source.loss)
    step.find_maximum_batch_size(SAMPLES[0], upper=2, settings=BY_STEPS)
    step.max_tokens = 2
    failures = iter([False] * 30 + [True])

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


def test_what_has_a_pool_of_threads_keeps_what_it_counts_and_its_modules_are_put_back() -> None:
    class Pooled:
        def __init__(self) -> None:
            self.pool, self.results = ThreadPoolExecutor(1), list[Any]()
            self.codes = nn.BatchNorm1d(4, affine=False)

        def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
            self.pool.submit(self.results.append, len(batch)).result()
            self.codes(torch.stack([batch[0], batch[0] + 1]))
            return model(batch).square().sum(), len(batch)

    model, pooled = nn.Linear(4, 1), Pooled()
    step = AdaptiveStep[torch.Tensor](model, torch.optim.SGD(model.parameters(), lr=0.1), pooled.loss)
    step.find_maximum_batch_size(SAMPLES[0], upper=2, settings=BY_STEPS)
    assert pooled.results and pooled.codes.num_batches_tracked == 0
    pooled.pool.shutdown()


class Holding:
    """A loss that is a method of what holds large tensors and arrays, two of which it changes."""

    def __init__(self) -> None:
        self.large = [torch.zeros(2**18) for _ in range(8)]  # of 1 MiB each
        self.array, self.counted = np.zeros(2**17), np.zeros(2**17)
        self.changing = torch.zeros(2**15)  # of 128 KiB
        self.after = 0  # steps that only read

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        with torch.no_grad():
            self.changing += len(batch)
            self.counted += len(batch)
        return model(batch).square().sum() + self.large[0].sum() + float(self.array.sum()), len(batch)


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


def test_no_step_copies_what_a_loss_holds_and_leaves_as_it_is() -> None:
    model, holding = nn.Linear(4, 1), Holding()
    step = AdaptiveStep[torch.Tensor](model, torch.optim.SGD(model.parameters(), lr=0.1), holding.loss)
    step(SAMPLES)
    with Copies() as copies:
        step(SAMPLES)
    assert holding.changing.nbytes <= copies.num_bytes < 2 * holding.changing.nbytes


def test_what_a_loss_changes_in_place_is_put_back_before_samples_run_again() -> None:
    model, holding = nn.Linear(4, 1), Holding()
    step = AdaptiveStep[torch.Tensor](model, torch.optim.SGD(model.parameters(), lr=0.1), holding.loss)
    failures = iter([False, True, False, True])

    def run_out(*_: Any) -> None:
        if torch.is_grad_enabled() and next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_hook(run_out)
    for _ in range(4):
        step(SAMPLES)
    assert step.num_recoveries == 2
    assert holding.changing.eq(4 * 8).all() and (holding.counted == 4 * 8).all()


def compiled(kept: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not torch.compiler.is_compiling():
            kept.eager += 1
        return model(batch).square().sum(), torch.tensor(float(len(batch)))

    return torch.compile(loss, backend="eager")  # type: ignore[no-any-return]


@pytest.mark.parametrize("encloses", [False, True])
def test_a_compiled_loss_is_compiled_after_a_check_too(encloses: bool) -> None:
    kept = types.ModuleType("kept")  # whose attributes nobody puts back
    kept.eager = 0  # type: ignore[attr-defined]
    of_compiled = compiled(kept)
    loss = (lambda model, batch: of_compiled(model, batch)) if encloses else of_compiled
    model = nn.Linear(4, 1)
    step = AdaptiveStep[torch.Tensor](model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    step.max_tokens = 4
    step(SAMPLES)
    checked = kept.eager
    assert checked > 0, "a check compiles nothing"
    for _ in range(3):
        step(SAMPLES)
    assert kept.eager == checked


def test_the_probe_and_checks_draw_nothing_from_generators_of_a_collate_function() -> None:
    model, chance, numpy_chance = nn.Linear(4, 1), random.Random(0), np.random.default_rng(0)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + 0 * (chance.random() + numpy_chance.random())

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch).square().sum(), len(batch)

    step = AdaptiveStep[torch.Tensor](model, torch.optim.SGD(model.parameters(), lr=0.1), loss, collate)
    step.find_maximum_batch_size(SAMPLES[0], upper=2, settings=BY_STEPS)
    step.max_tokens = 4
    step(SAMPLES)  # in two parts, after checks of the loss and an audit
    undisturbed = random.Random(0), np.random.default_rng(0)
    for generator in (*undisturbed, *undisturbed):
        generator.random()
    assert [chance.random(), numpy_chance.random()] == [generator.random() for generator in undisturbed]
