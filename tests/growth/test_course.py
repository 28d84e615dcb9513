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
from adaptive_batching._growth.epoch import FixedAccumulation, InParts, KeepGlobal, RunShape
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batching import growth, plan_batch_sizes
from adaptive_batching._growth.course import Course, learning_rate_scale
from adaptive_batching._growth.increase import BatchController, GrowthState, IncreaseFunction, IncreaseFunctionError
from adaptive_batching.growth import fixed_increase, replace_lr_decay, step
from tests.support.examples import STATE


def at(epoch: int) -> GrowthState:
    return dataclasses.replace(STATE, epoch=epoch)


def decided(controller: BatchController, epochs: int) -> list[int]:
    sizes = []
    for epoch in range(epochs):
        controller.announce(controller.decide(at(epoch)))
        sizes.append(controller.batch_size)
    return sizes


def test_growth_stays_within_the_maximum_and_warns_once_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    assert decided(BatchController(4, 9, "memory", fixed_increase(3), "f"), 5) == [4, 7, 7, 7, 7]
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "10" in warning and "9" in warning and "memory" in warning


def test_a_smaller_increase_is_taken_after_a_larger_one_was_refused() -> None:
    answers = iter([10, 2])
    assert decided(BatchController(4, 7, increase=lambda epoch, size: next(answers)), 2) == [4, 6]


@pytest.mark.parametrize("answer", [1.0, 0.5, True, None, math.nan, -1, "2", np.float32(2), [1]])
def test_what_is_no_number_of_samples_is_refused_with_name_epoch_and_size(answer: Any) -> None:
    controller = BatchController(4, 100, increase=lambda epoch, size: answer, name="pkg.f")
    with pytest.raises(IncreaseFunctionError, match=r"pkg\.f\(epoch=3, current_batch_size=4\) returned .*>= 0"):
        controller.decide(at(3))
    assert controller.batch_size == 4


def test_integers_of_other_libraries_are_accepted() -> None:
    assert decided(BatchController(4, 100, increase=lambda epoch, size: np.int64(2)), 1) == [6]


def test_an_error_in_the_function_names_it_and_keeps_its_cause() -> None:
    def fails(epoch: int, current_batch_size: int) -> int:
        raise KeyError("missing")

    with pytest.raises(IncreaseFunctionError, match=r"f\(epoch=2, current_batch_size=4\) raised KeyError") as error:
        BatchController(4, 8, increase=fails, name="f").decide(at(2))
    assert isinstance(error.value.__cause__, KeyError)


def course(increase: IncreaseFunction | None, size: int, maximum: int, **settings: Any) -> Course:
    """A course with these settings, of its own and of the shape of its run."""
    how = {name: settings.pop(name) for name in ("rates", "scale", "grows_in_warmup") if name in settings}
    shape = RunShape(**{"epochs": 3, "samples": 100, **settings})
    controller = BatchController(size, maximum, increase=increase, name="f", accumulation=shape.accumulation)
    return Course(controller, shape, **how)


def sizes_of(run: Course) -> list[list[int]]:
    return [epoch.batch_sizes for epoch in run.plan()]


def steps_of(
    run: Course, number: int = 0, *, resumed: bool = False, observe: Any = dict
) -> Iterator[tuple[int, int, int, Any, int]]:
    """Yield epoch, size, schedule steps, progress and next size of each optimizer step from the epoch ``number`` on."""
    for epoch in range(number, run.shape.epochs):
        if run.run_is_over:
            return
        if epoch > number or not resumed:
            run.start_epoch(epoch, observe)
        while not run.epoch_is_over:
            size, moved = run.controller.batch_size, run.take_step()
            run.decide_if_due(observe)
            yield epoch, size, moved, run.progress(), run.controller.batch_size


def follow(run: Course, observe: Any = dict) -> tuple[list[list[int]], list[int], list[int], list[int]]:
    """Sizes, optimizer steps, samples of one replica, and schedule steps of each epoch, as a loader would give them."""
    epochs = range(run.shape.epochs)
    sizes: list[list[int]] = [[] for _ in epochs]
    steps, samples, schedule = [0 for _ in epochs], [0 for _ in epochs], [0 for _ in epochs]
    for epoch, size, moved, _, _ in steps_of(run, observe=observe):
        if sizes[epoch][-1:] != [size]:
            sizes[epoch].append(size)
        steps[epoch] += 1
        samples[epoch] += run.shape.accumulation.window(size)
        schedule[epoch] += moved
    assert max(samples) <= run.shape.samples, "no sample is seen twice"
    return sizes, steps, samples, schedule


def test_a_function_of_two_arguments_is_asked_once_before_training_and_every_answer_is_kept() -> None:
    calls: list[tuple[float, int]] = []

    def record(epoch: float, current_batch_size: int) -> int:
        calls.append((epoch, current_batch_size))
        return 1

    run = course(record, 4, 100, decisions=2)
    assert sizes_of(run) == follow(run)[0] == [[5, 6], [7, 8], [9, 10]]
    assert calls == [(0, 4), (0.5, 5), (1, 6), (1.5, 7), (2, 8), (2.5, 9)]


def test_a_function_that_takes_state_is_asked_while_training_with_what_is_known_then() -> None:
    seen: list[Any] = []

    def record(epoch: float, current_batch_size: int, state: Any) -> int:
        seen.append((state.epoch, state.samples_seen, state.steps, state.losses))
        return current_batch_size

    run = course(record, 10, 40, replicas=2)
    assert sizes_of(run) == [[10]] * 3 and not seen
    assert follow(run, lambda: {"losses": (1.5,)})[0] == [[20], [40], [40]]
    assert seen == [(0, 0, 0, (1.5,)), (1, 200, 5, (1.5,)), (2, 360, 7, (1.5,))]
    assert run.history == [(0, 20), (1, 40)]


@st.composite
def runs(draw: st.DrawFn) -> tuple[dict[str, Any], int, int, list[int]]:
    """Shape, first size, maximum and increases of a run whose stock epochs have a step at least."""
    accumulation = draw(st.integers(1, 4))
    samples = draw(st.integers(accumulation, 3000))
    most = samples // accumulation
    size = draw(st.integers(1, min(64, most)))
    max_steps = draw(st.one_of(st.none(), st.integers(1, 60)))
    shape = {
        "epochs": draw(st.integers(1, 4)), "samples": samples, "accumulation": FixedAccumulation(accumulation),
        "replicas": draw(st.integers(1, 3)), "max_steps": max_steps, "decisions": draw(st.integers(1, 10)),
        "reference_steps": min(most // size, max_steps or most), "reference_samples": size * accumulation,
    }  # fmt: skip
    maximum = draw(st.integers(size, max(size, min(most, 512))))
    return shape, size, maximum, draw(st.lists(st.integers(0, 40), min_size=1, max_size=12))


@given(made_up=runs(), early=st.booleans())
def test_what_is_planned_is_what_happens(made_up: Any, early: bool) -> None:
    shape, size, maximum, increases = made_up
    answers: dict[float, int] = {}

    def increase(epoch: float, current_batch_size: int) -> int:
        return answers.setdefault(epoch, increases[len(answers) % len(increases)])

    run = course(increase if early else lambda epoch, size, state: increase(epoch, 0), size, maximum, **shape)
    plan = run.plan()
    sizes, steps, samples, schedule = follow(run)
    if early:
        assert [(epoch.batch_sizes, epoch.steps) for epoch in plan] == list(zip(sizes, steps, strict=True))
        assert [epoch.samples for epoch in plan] == [n * shape["replicas"] for n in samples]
    assert all(n >= 1 for n in steps), "no epoch is empty"
    expected = [shape["reference_steps"]] * shape["epochs"]
    assert schedule == expected, "the schedule ends each epoch where the stock run's does"
    if shape["max_steps"] is None:
        for seen, in_epoch in zip(samples, sizes, strict=True):
            assert shape["samples"] - seen < run.shape.accumulation.window(in_epoch[-1]), "less than a step is dropped"
    else:
        assert max(steps) <= shape["max_steps"]


@given(made_up=runs(), where=st.integers(0, 1000), early=st.booleans(), has_schedule=st.booleans())
def test_a_course_that_is_resumed_within_an_epoch_is_that_of_the_whole_run(
    made_up: Any, where: int, early: bool, has_schedule: bool
) -> None:
    shape, size, maximum, increases = made_up
    if not has_schedule:
        shape = {**shape, "reference_steps": 0}

    def increase(epoch: float, current_batch_size: int) -> int:
        return increases[int(epoch * shape["decisions"]) % len(increases)]

    def asked_while_training(epoch: float, current_batch_size: int, state: Any) -> int:
        return increase(epoch, 0)

    def a_course(batch_size: int) -> Course:
        return course(increase if early else asked_while_training, batch_size, maximum, **shape)

    whole = list(steps_of(a_course(size)))
    stopped = where % len(whole)
    epoch, _, _, progress, batch_size = whole[stopped]
    if progress is None:  # at the end of an epoch
        return
    run = a_course(batch_size)
    assert run.resume(epoch, json.loads(json.dumps(progress))) == 0
    if early:
        planned = sum(planned.steps for planned in run.plan(epoch))
        assert planned - progress["steps"] == len(whole) - stopped - 1
    assert list(steps_of(run, epoch, resumed=True)) == whole[stopped + 1 :]


def test_a_course_goes_on_with_other_devices_and_sizes_at_the_same_sample() -> None:
    four = {"replicas": 4, "samples": 100, "reference_steps": 10, "reference_samples": 10}
    run = course(None, 10, 10, **four)
    _, _, (_, _, _, progress, _) = itertools.islice(steps_of(run), 3)
    assert progress == {"samples": 120, "steps": 3, "schedule": [3, 10]}
    fewer = course(None, 20, 20, replicas=2, samples=200, reference_steps=20, reference_samples=10)
    assert fewer.resume(0, progress) == 0
    assert (fewer.seen_in_epoch, fewer.steps_per_epoch, fewer.take_step()) == (60, 3 + 7, 2)
    larger = course(None, 80, 80, **four)
    assert larger.resume(0, progress) == 7, "the rest of the schedule"
    assert larger.epoch_is_over


@given(
    samples=st.integers(1, 5000), batch=st.integers(1, 64), times=st.integers(1, 16), accumulation=st.integers(1, 4),
    max_steps=st.one_of(st.none(), st.integers(1, 50)),
)  # fmt: skip
def test_the_schedule_neither_ends_early_nor_late_nor_goes_back(
    samples: int, batch: int, times: int, accumulation: int, max_steps: int | None
) -> None:
    reference, steps = (samples // size // accumulation for size in (batch, batch * times))
    if max_steps is not None:
        reference, steps = min(reference, max_steps), min(steps, max_steps)
    if not steps:
        return
    run = course(
        None, batch * times, batch * times, epochs=1, samples=samples, max_steps=max_steps,
        accumulation=FixedAccumulation(accumulation),
        reference_steps=reference, reference_samples=batch * accumulation,
    )  # fmt: skip
    positions = [0]
    for _, _, moved, _, _ in steps_of(run):
        positions.append(positions[-1] + moved)
    assert len(positions) == steps + 1
    assert positions[-1] == reference
    assert positions == sorted(positions)
    if times == 1:
        assert positions == list(range(reference + 1)), "a constant batch moves it one step at a time, as stock"
    if max_steps is None:
        seen = [min(done * times, reference) for done in range(steps)]
        assert positions[:-1] == seen, "the rate depends on the samples seen alone"


def test_within_an_epoch_the_batch_grows_only_as_far_as_its_rest_has_samples() -> None:
    first, second = course(step(every=0.25, gamma=2), 10, 100, epochs=2, decisions=4).plan()
    assert first.batch_sizes == [10, 20, 40]
    assert (first.steps, first.samples) == (3 + 1 + 1, 30 + 20 + 40)
    assert second.batch_sizes == [100]


def test_the_plan_tells_the_learning_rate_at_the_end_of_each_epoch() -> None:
    rates = [1 - i / 30 for i in range(31)]
    run = course(
        step(every=1, gamma=2), 10, 100, reference_steps=10, reference_samples=10, rates=rates,
        scale=lambda window: learning_rate_scale("sqrt", window / 10, 1.9),
    )  # fmt: skip
    assert [epoch.last_lr for epoch in run.plan()] == pytest.approx([rates[10], rates[20] * math.sqrt(2), 0])
    run.start_epoch(2)
    assert run.lr_scale == 1.9, "capped"


def test_a_planned_function_knows_the_scheduled_rate() -> None:
    rates = [0.0, 0.5, 1.0, *(1.0 * 0.5**i for i in range(1, 9))]  # warms up in two steps, then halves with each
    shape = {"epochs": 1, "samples": 200, "decisions": 10, "reference_steps": 20, "reference_samples": 10}
    [sizes] = sizes_of(course(replace_lr_decay(alpha=4), 10, 200, rates=rates, **shape))
    assert sizes[:2] == [10, 40]


@pytest.mark.parametrize(("how", "sizes"), [({}, [[10], [20], [40]]), ({"grows_in_warmup": False}, [[10], [10], [40]])])
def test_growth_can_wait_for_the_warm_up_to_end(how: dict[str, bool], sizes: list[list[int]]) -> None:
    rates = [*(i / 15 for i in range(16)), *(1 - i / 15 for i in range(1, 16))]  # the peak is in the middle of epoch 1
    run = course(step(every=1, gamma=2), 10, 100, reference_steps=10, reference_samples=10, rates=rates, **how)
    assert sizes_of(run) == sizes


def test_a_global_batch_that_is_kept_is_accumulated_from_fewer_batches() -> None:
    run = course(step(every=0.5, gamma=2), 2, 12, epochs=2, samples=48, accumulation=KeepGlobal(12), decisions=2)
    assert sizes_of(run) == [[2, 4], [6, 12]]  # 8 does not divide 12
    assert all(epoch.steps == 4 for epoch in run.plan())
    run.start_epoch(1)
    assert run.accumulation == 2


@given(
    run_samples=st.integers(1, 400), samples=st.integers(1, 150), start=st.integers(1, 8), parts=st.integers(1, 4),
    gamma=st.floats(1.1, 4),
)  # fmt: skip
def test_a_run_of_so_many_samples_ends_when_less_than_a_step_is_left_and_as_planned(
    run_samples: int, samples: int, start: int, parts: int, gamma: float
) -> None:
    accumulation = InParts(parts)
    size, maximum = start * parts, accumulation.allowed(min(samples, run_samples))
    if size > maximum:
        return
    shape = {"samples": samples, "accumulation": accumulation, "decisions": 3, "run_samples": run_samples}
    run = course(step(every=0.4, gamma=gamma), size, maximum, **shape)
    plan = run.plan()
    followed = [(epoch, size) for epoch, size, *_ in steps_of(run)]
    assert all(size % parts == 0 for _, size in followed)
    assert [epoch.steps for epoch in plan] == list(Counter(epoch for epoch, _ in followed).values())
    assert sum(epoch.samples for epoch in plan) == run.samples_seen <= run_samples
    assert run.run_is_over or len(plan) == 3
    assert all(epoch.dropped_samples < epoch.batch_sizes[-1] for epoch in plan)


def test_the_rate_follows_the_batch_as_asked() -> None:
    assert [learning_rate_scale(rule, 9, 4) for rule in ("none", "sqrt", "linear")] == [1, 3, 4]


def planned(increase: Any, **arguments: Any) -> list[int]:
    """The batch sizes that a plain loop plans before training."""
    return plan_batch_sizes(increase=increase, **{"batch_size": 4, "epochs": 2, "samples": 1000, **arguments})


def test_sizes_of_a_plain_loop_follow_the_increase_function_within_the_maximum() -> None:
    assert planned(step(every=1, gamma=2), epochs=4) == [4, 8, 16, 32]
    assert planned(step(every=2, gamma=2), epochs=4) == [4, 4, 8, 8]
    assert planned(step(), epochs=4, maximum=10) == [4, 8, 10, 10]
    assert planned(growth.linear(end=16), epochs=4, samples=5) == [4, 5, 5, 5], "no more than there are"
    assert planned(growth.constant()) == [4, 4]
    adds_five = planned(lambda epoch, size: 5 if epoch else 0, epochs=3, maximum=10)
    assert adds_five == [4, 9, 9], "what exceeds the maximum is not added"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BatchController(8, 4), "batch_size=8 must be from 1 to maximum=4"),
        (lambda: BatchController(4, 16, accumulation=KeepGlobal(10)), "batch_size=4 does not go with .*; start with 2"),
        (lambda: RunShape(epochs=2, samples=0), "samples=0 must be at least 1"),
        (lambda: RunShape(epochs=2, samples=9, reference_samples=0), "reference_samples=0 must be at least 1"),
        (lambda: FixedAccumulation(0), "batches=0 must be at least 1"),
        (lambda: KeepGlobal(0), "samples=0 must be at least 1"),
        (lambda: planned(step(), batch_size=0), "batch_size=0"),
        (lambda: planned(step(), epochs=0), "epochs=0"),
        (lambda: planned(step(), epochs=1.5), "epochs=1.5"),
        (lambda: planned(step(), samples=0), "samples=0"),
        (lambda: planned(step(), maximum=0), "maximum=0"),
        (lambda: planned(step(), maximum=3), "maximum=3"),
    ],
)
def test_numbers_that_make_no_run_are_an_error_that_names_them(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("ask", [planned, lambda increase: BatchController(4, 8, increase=increase)])
@pytest.mark.parametrize(
    ("increase", "message"),
    [(step, r"increase=step is a factory.*write step\(\)"), (lambda epoch: 1, "increase=.*cannot be called with")],
)
def test_what_cannot_be_asked_is_refused_before_training(ask: Any, increase: Any, message: str) -> None:
    with pytest.raises(IncreaseFunctionError, match=message):
        ask(increase)


@pytest.mark.parametrize(
    ("increase", "message"),
    [
        (growth.on_plateau(), "reads what is known only while training"),
        (growth.gradient_noise_scale(), "reads what is known only while training"),
        (lambda epoch, size: 0.5, r"<lambda>\(epoch=0, current_batch_size=4\) returned 0.5"),
    ],
)
def test_what_is_unknown_before_training_or_no_number_is_not_planned(increase: Any, message: str) -> None:
    with pytest.raises(IncreaseFunctionError, match=message):
        planned(increase)
