from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest

from adaptive_batching import growth
from adaptive_batching._growth import increase
from adaptive_batching._growth.increase import GrowthState, IncreaseFunction, is_planned, resolve
from tests.support.examples import STATE

HERE = "tests.growth.test_schedules"
OURS = "adaptive_batching.growth"


def two_arguments(start: int, gamma: float) -> Any:
    return growth.step(every=start, gamma=gamma)


def other_names(e: int, b: int) -> int:
    return 1


def one_argument(epoch: int) -> int:
    return 1


def with_state(epoch: int, current_batch_size: int, state: GrowthState) -> int:
    return state.maximum - current_batch_size


def broken_factory(every: int) -> None:
    raise RuntimeError("no")


def size(function: IncreaseFunction, **known: Any) -> int:
    """What the batch is after ``function`` was asked."""
    state = dataclasses.replace(STATE, **known)
    arguments = {"state": state} if increase.takes_state(function) else {}
    return state.batch_size + (function(state.epoch, state.batch_size, **arguments) or 0)


EPOCHS = [0, 0.5, 1, 1.25, 2, 3, 3.75]
FORMULAS = {
    "step": (growth.step(every=1, gamma=2), lambda e: 4 * 2 ** math.floor(e)),
    "step of half an epoch": (growth.step(every=0.5, gamma=1.5), lambda e: 4 * 1.5 ** math.floor(e / 0.5)),
    "multistep": (growth.multistep([1, 2.5], gamma=3), lambda e: 4 * 3 ** ((e >= 1) + (e >= 2.5))),
    "staged": (growth.staged({0: 5, 1: 8, "2.5": 20}), lambda e: 5 if e < 1 else 8 if e < 2.5 else 20),
    "staged, first later": (growth.staged({2: 20}), lambda e: 4 if e < 2 else 20),
    "linear": (growth.linear(end=40, ramp_epochs=2), lambda e: 4 + 36 * min(1, e / 2)),
    "linear to the maximum": (growth.linear(), lambda e: 4 + 60 * e / 4),
    "polynomial": (growth.polynomial(end=40, ramp_epochs=3, power=2), lambda e: 4 + 36 * min(1, e / 3) ** 2),
    "cosine": (growth.cosine(end=40, ramp_epochs=3), lambda e: 40 - 36 * (1 + math.cos(math.pi * min(1, e / 3))) / 2),
    "late_switch": (growth.late_switch(0.5), lambda e: 4 if e < 2 else 64),
    "late_switch to a size": (growth.late_switch(0.3, end=9), lambda e: 4 if e < 1.2 else 9),
    "constant": (growth.constant(), lambda e: 4),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_each_schedule_follows_its_formula(name: str) -> None:
    function, formula = FORMULAS[name]
    assert is_planned(function)
    current = 0
    for epoch in EPOCHS:
        expected = max(min(math.floor(formula(epoch) + 1e-9), 64), current)
        assert size(function, epoch=epoch, batch_size=max(current, 4)) == max(expected, 4)
        current = expected


def test_a_fixed_increase_adds_at_the_start_of_epochs() -> None:
    every, some = growth.fixed_increase(3), growth.fixed_increase(3, epochs=[0, 2])
    assert [every(epoch, 2) for epoch in (0, 0.5, 1, 1.5, 2)] == [0, 0, 3, 0, 3]
    assert [some(epoch, 2) for epoch in (0, 0.5, 1, 1.5, 2)] == [3, 0, 0, 0, 3]


def test_the_batch_grows_where_the_rate_would_have_fallen() -> None:
    function = growth.replace_lr_decay(alpha=2)
    assert is_planned(function)
    assert [size(function, lr_decay=decay) for decay in (1, 0.51, 0.5, 0.25, 0.2, 0.03, 0)] == [4, 4, 8, 16, 16, 64, 64]


@pytest.mark.parametrize(
    ("losses", "arguments", "sizes"),
    [
        ([5, 4, 3, 2], {"patience": 1}, [4, 4, 4, 4]),
        ([5, 4, 4, 4, 4, 4], {"patience": 2}, [4, 4, 4, 8, 8, 16]),
        ([5, 4, 4, 4, 4, 4, 4, 4], {"patience": 2, "cooldown": 2}, [4, 4, 4, 8, 8, 8, 8, 16]),
        ([5, 4.999, 4.998], {"patience": 1, "min_delta": 0.01, "rate": 3}, [4, 12, 36]),
        ([5, 4, 4, 3, 3], {"patience": 2}, [4, 4, 4, 4, 4]),  # a better loss begins anew
    ],
)
@pytest.mark.parametrize("metric", ["loss", "val_loss"])
def test_the_batch_grows_when_the_loss_has_stopped_to_fall(
    metric: str, losses: list[float], arguments: dict[str, Any], sizes: list[int]
) -> None:
    function = growth.on_plateau(**arguments, metric=metric)
    assert not is_planned(function) and increase.reads_val_loss(function) == (metric == "val_loss")
    name, other = ("losses", "val_losses") if metric == "loss" else ("val_losses", "losses")
    seen = [tuple(losses[: i + 1]) for i in range(len(losses))]
    assert [size(function, **{name: each, other: (5.0,) * 9}) for each in seen] == sizes


@pytest.mark.parametrize(
    ("factory", "name", "value", "shown"),
    [
        *((growth.step, "every", value, f"every={value!r}") for value in (0, "2", True)),
        (growth.step, "gamma", 1, "gamma=1"), (growth.fixed_increase, "increase", -1, "increase=-1"),
        (partial(growth.fixed_increase, 1), "epochs", [2, -1], "epochs=-1"),
        (growth.multistep, "milestones", 3, "milestones=3"), (growth.multistep, "milestones", [1, -2], "milestones=-2"),
        (growth.staged, "stages", {}, "stages="), (growth.staged, "stages", {"first": 2}, "'first'"),
        (growth.staged, "stages", {0: 2.5}, "stages=2.5"), (growth.linear, "end", 0, "end=0"),
        (growth.cosine, "ramp_epochs", 0, "ramp_epochs=0"), (growth.polynomial, "power", -1, "power=-1"),
        (growth.late_switch, "fraction", 1, "fraction=1"), (growth.replace_lr_decay, "alpha", 1.0, "alpha=1.0"),
        (growth.on_plateau, "patience", 0, "patience=0"), (growth.on_plateau, "min_delta", -0.1, "min_delta=-0.1"),
        (growth.on_plateau, "rate", math.nan, "rate=nan"),
    ],
)  # fmt: skip
def test_factories_check_their_arguments(factory: Any, name: str, value: Any, shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        factory(**{name: value})


@pytest.mark.parametrize("name", ["with_state", "other_names"])
def test_a_path_over_the_arguments_of_another_function_is_taken_for_what_it_is(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As ``batch_increase_function=path`` on the command line arrives, over a component in the YAML."""
    assert resolve(f"{HERE}.{name}") == (f"{HERE}.{name}", globals()[name])
    assert resolve({"_component_": f"{HERE}.{name}"})[1] is globals()[name] and not caplog.text
    assert resolve({"_component_": f"{HERE}.{name}", "every": 1})[1] is globals()[name]
    assert "ignoring its arguments: every" in caplog.text
    resolved, function = resolve({"_component_": f"{OURS}.fixed_increase", "increase": 3})
    assert (resolved, function(1, 5)) == (f"{OURS}.fixed_increase", 3)


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("no_such_package.f", None, "cannot be imported"),
        (f"{HERE}.no_such_function", None, "cannot be imported"),
        ("not a path", None, "cannot be imported"),
        (f"{HERE}.HERE", None, r"not callable \(type str\)"),
        (f"{HERE}.one_argument", None, r"cannot be called with \(epoch, current_batch_size\)"),
        (f"{OURS}.step", None, r"a factory.*_component_"),
        (f"{HERE}.one_argument", None, r"; if it is a factory, write \{_component_: .*one_argument\} \(on a command"),
        ("step", None, r"did you mean \{_component_: adaptive_batching\.growth\.step\} \(on a command line, batch_inc"),
        *(
            (path, None, r"did you mean \{_component_: adaptive_batching\.growth\.step\} ")
            for path in ("growth.stp", "adaptive_batching.step", "adaptive_batching.growth.Step")
        ),
        (f"{OURS}.stp", {}, r"did you mean 'adaptive_batching\.growth\.step'\?"),
        (f"{HERE}.broken_factry", None, rf"did you mean '{HERE}\.broken_factory'\?"),
        (f"{HERE}.broken_factory", {"every": 2}, "failed with the arguments"),
        (f"{HERE}.two_arguments", {"start": 1, "gama": 2}, "has no argument 'gama', but: .*take|did you mean"),
        (f"{OURS}.step", {"evry": 2}, r"has no argument 'evry', but: every, gamma; did you mean 'every'\?$"),
        (f"{OURS}.step", {"increase": 2}, r"take it out, on the command line with ~batch_increase_function\.increase$"),
        (f"{OURS}.fixed_increase", {}, r"needs 'increase'; write batch_increase_function\.increase=\.\.\., or"),
        (f"{OURS}.step", {"every": 0}, r"failed with the arguments \{'every': 0\}: ValueError: every=0 must be"),
        ("builtins.dict", {}, "must return a function"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_training(
    path: str, arguments: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(increase.IncreaseFunctionError, match=message):
        resolve(path if arguments is None else {"_component_": path, **arguments})
