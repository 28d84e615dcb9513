"""Batch sizes, steps and schedule of a run: decided, planned, followed and resumed, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batching import growth, plan_batch_sizes
from adaptive_batching._growth.batch_size_schedule import BatchSizeSchedule, RunShape
from adaptive_batching._growth.controller import BatchController, FixedAccumulation, KeepGlobal
from adaptive_batching._growth.increase import IncreaseFunction, IncreaseFunctionError
from adaptive_batching._growth.schedules import fixed_increase, replace_lr_decay, step
from adaptive_batching._torchtune.ppo.parts_of_batch import InParts
from tests.support.examples import STATE


def decided(controller: BatchController, epochs: int) -> list[int]:
    sizes = []
    for epoch in range(epochs):
        controller.announce(controller.decide(dataclasses.replace(STATE, epoch=epoch)))
        sizes.append(controller.batch_size)
    return sizes


def test_growth_stays_within_the_maximum_and_warns_once_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    assert decided(BatchController(4, 9, "memory", fixed_increase(3), "f"), 5) == [4, 7, 7, 7, 7]
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "10" in warning and "9" in warning and "memory" in warning
    answers = iter([10, np.int64(2)])
    smaller = BatchController(4, 7, increase=lambda epoch, size: next(answers))
    assert decided(smaller, 2) == [4, 6], "a smaller increase is taken after a larger one was refused"


@pytest.mark.parametrize("answer", [1.0, 0.5, True, math.nan, -0.0, "2", np.float32(2), [1], KeyError("missing")])
def test_what_is_no_number_of_samples_is_refused_with_name_epoch_and_size(answer: Any) -> None:
    def answers(epoch: int, current_batch_size: int) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    controller = BatchController(4, 100, increase=answers, name="pkg.f")
    says = "raised KeyError" if isinstance(answer, Exception) else "returned .*: a whole number, or None for none"
    with pytest.raises(IncreaseFunctionError, match=rf"pkg\.f\(epoch=3, current_batch_size=4\) {says}") as error:
        controller.decide(dataclasses.replace(STATE, epoch=3))
    assert controller.batch_size == 4
    assert error.value.__cause__ is (answer if isinstance(answer, Exception) else None)


@pytest.mark.parametrize(
    ("accumulation", "answers", "sizes"),
    [
        (FixedAccumulation(2), [None, -3, 4, None, -100, 1], [8, 5, 9, 9, 1, 2]),
        (InParts(parts=4), [-3, -2, -100, 5], [4, 4, 4, 8]),  # the largest multiple, and not below one
        (KeepGlobal(16), [-1, -1, 6, -100], [4, 2, 8, 1]),  # divisors of what the optimizer sees
    ],
)
def test_a_negative_answer_makes_the_batch_smaller_but_not_empty_and_none_keeps_it(
    accumulation: Any, answers: list[Any], sizes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    given = iter(answers)
    controller = BatchController(8, 16, increase=lambda *_: next(given), name="f", accumulation=accumulation)
    assert decided(controller, len(answers)) == sizes
    assert "batch size shrinks from 8 to" in caplog.text or sizes[0] == 8
    lowered = BatchController(8, 16, increase=lambda *_: -100, name="f", accumulation=accumulation)
    least = accumulation.least
    assert lowered.decide(STATE).reason == f"f took {8 - least} away (asked for -100; {least} is the smallest)"
    assert lowered.decide(STATE).reason == f"kept (asked for -100; {least} is the smallest)"


@pytest.mark.parametrize(
    ("accumulation", "increase", "reason"),
    [
        (InParts(parts=4), 2, "kept (asked for 2: 66 is no multiple of the 4 parts of a batch)"),
        (InParts(2, parts=4), 6, "f added 4 (asked for 6: 70 is no multiple of the 4 parts of a batch)"),
        (KeepGlobal(128), 2, "kept (asked for 2: 66 does not divide the global batch 128)"),
    ],
)
def test_an_increase_that_is_rounded_says_why(accumulation: Any, increase: int, reason: str) -> None:
    controller = BatchController(64, 128, increase=lambda *_: increase, name="f", accumulation=accumulation)
    decision = controller.decide(STATE)
    assert decision.reason == reason
    assert bool(decision.warning) == (decision.batch_size == 64)


def test_a_factory_that_is_named_as_a_function_is_told_apart_when_it_answers() -> None:
    def ramp(start: int, end: int) -> Any:
        return lambda epoch, current_batch_size: start + end

    controller = BatchController(4, 100, increase=ramp, name="pkg.ramp")
    with pytest.raises(
        IncreaseFunctionError, match=r"it is a factory: write \{_component_: pkg\.ramp\} \(on a command"
    ):
        controller.decide(STATE)


def schedule_of(increase: IncreaseFunction | None, size: int, maximum: int, **settings: Any) -> BatchSizeSchedule:
    """A schedule with these settings, of its own, of its controller and of the shape of its run."""
    how = {name: settings.pop(name) for name in ("rates", "scale", "grows_in_warmup") if name in settings}
    accumulation = settings.pop("accumulation", FixedAccumulation())
    controller = BatchController(size, maximum, increase=increase, name="f", accumulation=accumulation)
    return BatchSizeSchedule(controller, RunShape(**{"epochs": 3, "samples": 100, **settings}), **how)


def sizes_of(run: BatchSizeSchedule) -> list[list[int]]:
    return [epoch.batch_sizes for epoch in run.plan()]


def steps_of(
    run: BatchSizeSchedule, number: int = 0, *, resumed: bool = False, observe: Any = dict
) -> Iterator[tuple[int, int, int, Any, int]]:
    """Yield epoch, size, schedule steps, progress and next size of each optimizer step from the epoch ``number`` on."""
    for epoch in itertools.count(number):
        if run.run_is_over or (run.shape.run_samples is None and epoch == run.shape.epochs):
            return
        if epoch > number or not resumed:
            run.start_epoch(epoch, observe)
        while not run.epoch_is_over:
            size, moved = run.controller.batch_size, run.take_step()
            run.decide_if_due(observe)
            yield epoch, size, moved, run.progress(), run.controller.batch_size


def follow(run: BatchSizeSchedule, observe: Any = dict) -> tuple[list[list[int]], list[int], list[int], list[int]]:
    """Sizes, optimizer steps, samples of one replica, and schedule steps of each epoch, as a loader would give them."""
    steps = [list(found) for _, found in itertools.groupby(steps_of(run, observe=observe), lambda s: s[0])]
    samples = [sum(run.controller.accumulation.window(size) for _, size, *_ in epoch) for epoch in steps]
    assert max(samples) <= run.shape.samples, "no sample is seen twice"
    sizes = [[size for size, _ in itertools.groupby(size for _, size, *_ in epoch)] for epoch in steps]
    return sizes, list(map(len, steps)), samples, [sum(moved for _, _, moved, *_ in epoch) for epoch in steps]


def test_a_function_of_two_arguments_is_asked_once_before_training_and_every_answer_is_kept() -> None:
    calls: list[tuple[float, int]] = []

    def record(epoch: float, current_batch_size: int) -> int:
        calls.append((epoch, current_batch_size))
        return 1

    run = schedule_of(record, 4, 100, decisions=2)
    assert sizes_of(run) == follow(run)[0] == [[5, 6], [7, 8], [9, 10]]
    assert calls == [(0, 4), (0.5, 5), (1, 6), (1.5, 7), (2, 8), (2.5, 9)]


def test_a_function_that_takes_state_is_asked_while_training_with_what_is_known_then() -> None:
    seen: list[Any] = []

    def record(epoch: float, current_batch_size: int, state: Any) -> int:
        seen.append((state.epoch, state.samples_seen, state.steps, state.losses))
        return current_batch_size

    run = schedule_of(record, 10, 40, replicas=2)
    assert sizes_of(run) == [[10]] * 3 and not seen
    assert follow(run, lambda: {"losses": (1.5,)})[0] == [[20], [40], [40]]
    assert seen == [(0, 0, 0, (1.5,)), (1, 200, 5, (1.5,)), (2, 360, 7, (1.5,))]
    assert run.history == [(0, 20), (1, 40)]


@st.composite
def runs(draw: st.DrawFn) -> tuple[dict[str, Any], int, int, list[int]]:
    """Settings, first size, maximum and increases of a run whose stock epochs have a step at least."""
    accumulation = draw(st.integers(1, 4))
    samples = draw(st.integers(accumulation, 3000))
    most = samples // accumulation
    size = draw(st.integers(1, min(64, most)))
    max_steps = draw(st.one_of(st.none(), st.integers(1, 60)))
    settings = {
        "epochs": draw(st.integers(1, 4)), "samples": samples, "accumulation": FixedAccumulation(accumulation),
        "replicas": draw(st.integers(1, 3)), "max_steps": max_steps, "decisions": draw(st.integers(1, 10)),
        "reference_steps": min(most // size, max_steps or most), "reference_samples": size * accumulation,
    }  # fmt: skip
    maximum = draw(st.integers(size, max(size, min(most, 512))))
    return settings, size, maximum, draw(st.lists(st.integers(-40, 40), min_size=1, max_size=12))


@given(made_up=runs(), early=st.booleans())
def test_what_is_planned_is_what_happens(made_up: Any, early: bool) -> None:
    settings, size, maximum, increases = made_up
    answers: dict[float, int] = {}

    def increase(epoch: float, current_batch_size: int) -> int:
        return answers.setdefault(epoch, increases[len(answers) % len(increases)])

    run = schedule_of(increase if early else lambda epoch, size, state: increase(epoch, 0), size, maximum, **settings)
    plan = run.plan()
    sizes, steps, samples, schedule = follow(run)
    if early:
        assert [(epoch.batch_sizes, epoch.steps) for epoch in plan] == list(zip(sizes, steps, strict=True))
        assert [epoch.samples for epoch in plan] == [n * settings["replicas"] for n in samples]
    assert len(steps) == settings["epochs"], "no epoch is empty"
    expected = [settings["reference_steps"]] * settings["epochs"]
    assert schedule == expected, "the schedule ends each epoch where the stock run's does"
    if settings["max_steps"] is None:
        for seen, in_epoch in zip(samples, sizes, strict=True):
            assert settings["samples"] - seen < settings["accumulation"].window(in_epoch[-1]), "less than a step"
    else:
        assert max(steps) <= settings["max_steps"]


@given(made_up=runs(), where=st.integers(0, 1000), early=st.booleans(), has_schedule=st.booleans())
def test_a_schedule_that_is_resumed_within_an_epoch_is_that_of_the_whole_run(
    made_up: Any, where: int, early: bool, has_schedule: bool
) -> None:
    settings, size, maximum, increases = made_up
    if not has_schedule:
        settings = {**settings, "reference_steps": 0}

    def increase(epoch: float, current_batch_size: int) -> int:
        return increases[int(epoch * settings["decisions"]) % len(increases)]

    def a_schedule(batch_size: int) -> BatchSizeSchedule:
        asked = increase if early else lambda epoch, size, state: increase(epoch, 0)
        return schedule_of(asked, batch_size, maximum, **settings)

    whole = list(steps_of(a_schedule(size)))
    stopped = where % len(whole)
    epoch, _, _, progress, batch_size = whole[stopped]
    if progress is None:  # at the end of an epoch
        return
    run = a_schedule(batch_size)
    assert run.resume(epoch, json.loads(json.dumps(progress))) == 0
    if early:
        planned = sum(planned.steps for planned in run.plan(epoch))
        assert planned - progress["steps"] == len(whole) - stopped - 1
    assert list(steps_of(run, epoch, resumed=True)) == whole[stopped + 1 :]


def test_a_schedule_goes_on_with_other_devices_and_sizes_at_the_same_sample() -> None:
    four = {"replicas": 4, "samples": 100, "reference_steps": 10, "reference_samples": 10}
    _, _, (_, _, _, progress, _) = itertools.islice(steps_of(schedule_of(None, 10, 10, **four)), 3)
    assert progress == {"samples": 120, "steps": 3, "schedule": [3, 10]}
    fewer = schedule_of(None, 20, 20, replicas=2, samples=200, reference_steps=20, reference_samples=10)
    assert fewer.resume(0, progress) == 0
    assert (fewer.seen_in_epoch, fewer.steps_per_epoch, fewer.take_step()) == (60, 3 + 7, 2)
    larger = schedule_of(None, 80, 80, **four)
    assert larger.resume(0, progress) == 7, "the rest of the schedule"
    assert larger.epoch_is_over


# The peak is in the middle of the second of three epochs.
RISE_AND_FALL = [*(i / 15 for i in range(16)), *(1 - i / 15 for i in range(1, 16))]
WARMS_UP_AND_HALVES = [0.0, 0.5, 1.0, *(0.5**i for i in range(1, 9))]
STOCK = {"reference_steps": 10, "reference_samples": 10}


@pytest.mark.parametrize(
    ("increase", "size", "maximum", "settings", "sizes"),
    [
        (step(every=0.25), 10, 100, {"epochs": 2, "decisions": 4}, [[10, 20, 40], [100]]),
        (step(), 10, 100, {"rates": RISE_AND_FALL, **STOCK}, [[10], [20], [40]]),
        (step(), 10, 100, {"rates": RISE_AND_FALL, **STOCK, "grows_in_warmup": False}, [[10], [10], [40]]),
        (step(every=0.5), 2, 12, {"samples": 48, "accumulation": KeepGlobal(12), "decisions": 2, "epochs": 2},
         [[2, 4], [6, 12]]),
        (replace_lr_decay(alpha=4), 10, 40, {"rates": WARMS_UP_AND_HALVES, "epochs": 1, "samples": 200, "decisions": 10,
                                             "reference_steps": 20, "reference_samples": 10}, [[10, 40]]),
    ],
    ids=["the rest of an epoch has samples for 40", "warm-up", "no growth in warm-up", "8 does not divide 12", "decay"],
)  # fmt: skip
def test_sizes_are_planned(
    increase: Any, size: int, maximum: int, settings: dict[str, Any], sizes: list[list[int]]
) -> None:
    run = schedule_of(increase, size, maximum, **settings)
    plan = run.plan()
    assert [epoch.batch_sizes for epoch in plan] == sizes
    if run.controller.accumulation == KeepGlobal(12):
        run.start_epoch(1)
        assert run.accumulation == 2 and all(epoch.steps == 4 for epoch in plan)
    if sizes[0] == [10, 20, 40]:
        assert (plan[0].steps, plan[0].samples) == (3 + 1 + 1, 30 + 20 + 40)


def test_the_plan_tells_the_learning_rate_at_the_end_of_each_epoch() -> None:
    rates = [1 - i / 30 for i in range(31)]
    run = schedule_of(step(), 10, 100, **STOCK, rates=rates, scale=lambda window: min(math.sqrt(window / 10), 1.9))
    assert [epoch.last_lr for epoch in run.plan()] == pytest.approx([rates[10], rates[20] * math.sqrt(2), 0])
    run.start_epoch(2)
    assert run.lr_scale == 1.9


@given(
    run_samples=st.integers(1, 400), samples=st.integers(1, 150), start=st.integers(1, 8), parts=st.integers(1, 4),
    gamma=st.floats(1.1, 4),
)  # fmt: skip
def test_a_run_of_so_many_samples_ends_when_less_than_a_step_is_left_and_as_planned(
    run_samples: int, samples: int, start: int, parts: int, gamma: float
) -> None:
    accumulation = InParts(parts=parts)
    size, maximum = start * parts, accumulation.allowed(min(samples, run_samples))
    if size > maximum:
        return
    settings = {"samples": samples, "accumulation": accumulation, "decisions": 3, "run_samples": run_samples}
    run = schedule_of(step(every=0.4, gamma=gamma), size, maximum, **settings)
    plan = run.plan()
    followed = [(epoch, size) for epoch, size, *_ in steps_of(run)]
    assert all(size % parts == 0 for _, size in followed)
    assert [epoch.steps for epoch in plan] == list(Counter(epoch for epoch, _ in followed).values())
    assert sum(epoch.samples for epoch in plan) == run.samples_seen <= run_samples
    assert run.run_is_over
    assert all(epoch.dropped_samples < epoch.batch_sizes[-1] for epoch in plan)


def test_a_run_of_so_many_samples_has_more_epochs_where_larger_batches_leave_more_of_each_out() -> None:
    """Six epochs of the 24 samples at the configured size; a batch of 16 takes 16 of each."""
    run = schedule_of(lambda epoch, size: 12 if epoch == 1 else 0, 4, 16, epochs=6, samples=24, run_samples=144)
    assert [epoch.samples for epoch in run.plan()] == [24] + [16] * 7
    assert follow(run)[2] == [24] + [16] * 7


def test_a_run_of_so_many_samples_ends_where_no_epoch_has_those_of_a_step() -> None:
    run = schedule_of(lambda epoch, size: 10, 10, 100, samples=25, run_samples=1000)
    assert [epoch.steps for epoch in run.plan()] == [1, 0]


@pytest.mark.parametrize(
    ("increase", "settings"),
    [
        (None, {}),
        (step(), {"max_steps": 4}),
        (step(every=0.5), {"decisions": 2, "accumulation": FixedAccumulation(2)}),
        (None, {"run_samples": 150}),
        (step(), {"run_samples": 250, "replicas": 2}),
        (lambda epoch, size: -3 if epoch else 20, {"run_samples": 137, "decisions": 3}),
    ],
)
def test_the_steps_that_are_left_are_those_that_the_run_takes(increase: Any, settings: dict[str, Any]) -> None:
    run = schedule_of(increase, 5, 60, **settings)
    left = [run.steps_left() for _ in steps_of(run)]
    assert left == list(range(len(left)))[::-1]


def planned(increase: Any, **arguments: Any) -> list[int]:
    """The batch sizes that a plain loop plans before training."""
    return plan_batch_sizes(increase=increase, **{"batch_size": 4, "epochs": 2, "samples": 1000, **arguments})


def test_sizes_of_a_plain_loop_follow_the_increase_function_within_the_maximum() -> None:
    assert planned(step(every=2, gamma=2), epochs=4) == [4, 4, 8, 8]
    assert planned(step(), epochs=4, maximum=10) == [4, 8, 10, 10]
    assert planned(growth.linear(end=16), epochs=4, samples=5) == [4, 5, 5, 5], "no more than there are"
    adds_five = planned(lambda epoch, size: 5 if epoch else 0, epochs=3, maximum=10)
    assert adds_five == [4, 9, 9], "what exceeds the maximum is not added"


def controls(**settings: Any) -> BatchController:
    return BatchController(4, **{"maximum": 8, **settings})


@pytest.mark.parametrize(
    ("make", "settings", "error", "message"),
    [
        (controls, {"maximum": 3}, ValueError, "batch_size=4 must be from 1 to maximum=3"),
        (controls, {"accumulation": KeepGlobal(10)}, ValueError, "batch_size=4 does not work with .*; start with 2"),
        (RunShape, {"epochs": 2, "samples": 0}, ValueError, "samples=0 must be at least 1"),
        (FixedAccumulation, {"batches": 0}, ValueError, "batches=0 must be at least 1"),
        (KeepGlobal, {"samples": 0}, ValueError, "samples=0 must be at least 1"),
        *((planned, {"increase": step(), name: 0}, ValueError, f"{name}=0")
          for name in ("batch_size", "epochs", "samples", "maximum")),
        (planned, {"increase": step(), "epochs": 1.5}, ValueError, "epochs=1.5"),
        (planned, {"increase": step(), "maximum": 3}, ValueError, "maximum=3"),
        *((make, {"increase": step}, IncreaseFunctionError, r"increase=step is a factory.*call it, step\(\)")
          for make in (planned, controls)),
        (controls, {"increase": lambda epoch: 1}, IncreaseFunctionError, "increase=.*cannot be called with"),
        (planned, {"increase": growth.on_plateau()}, IncreaseFunctionError,
         "needs values that are known only during training"),
        (planned, {"increase": lambda epoch, size: 0.5}, IncreaseFunctionError,
         r"<lambda>\(epoch=0, current_batch_size=4\) returned 0.5"),
    ],
)  # fmt: skip
def test_what_makes_no_run_is_an_error_that_names_it(
    make: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**settings)
