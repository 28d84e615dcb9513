from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batching._growth.course import Course, learning_rate_scale
from adaptive_batching._growth.epoch import FixedAccumulation, InParts, KeepGlobal, RunShape
from adaptive_batching._growth.increase import BatchController, GrowthState, IncreaseFunction, IncreaseFunctionError
from adaptive_batching.growth import fixed_increase, replace_lr_decay, step
from tests.support.examples import STATE


def decide(controller: BatchController, epochs: int) -> list[int]:
    sizes = []
    for epoch in range(epochs):
        decision = controller.decide(at(epoch))
        controller.announce(decision)
        sizes.append(decision.batch_size)
    return sizes


def at(epoch: int) -> GrowthState:
    return dataclasses.replace(STATE, epoch=epoch)


def test_growth_stays_within_the_maximum_and_warns_once_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    controller = BatchController(4, 9, "memory", fixed_increase(3), "f")
    assert decide(controller, 5) == [4, 7, 7, 7, 7]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "10" in warnings[0] and "9" in warnings[0] and "memory" in warnings[0]


def test_a_smaller_increase_is_taken_after_a_larger_one_was_refused() -> None:
    answers = iter([10, 2])
    assert decide(BatchController(4, 7, increase=lambda epoch, size: next(answers)), 2) == [4, 6]


@pytest.mark.parametrize("answer", [1.0, True, None, math.nan, -1, "2", np.float32(2), [1]])
def test_what_is_no_number_of_samples_is_refused_with_name_epoch_and_size(answer: Any) -> None:
    controller = BatchController(4, 100, increase=lambda epoch, size: answer, name="pkg.f")
    with pytest.raises(IncreaseFunctionError, match=r"pkg\.f\(epoch=3, current_batch_size=4\) returned .*>= 0"):
        controller.decide(at(3))
    assert controller.batch_size == 4


def test_integers_of_other_libraries_are_accepted() -> None:
    assert BatchController(4, 100, increase=lambda epoch, size: np.int64(2)).decide(STATE).batch_size == 6


def test_an_error_in_the_function_names_it_and_keeps_its_cause() -> None:
    def fails(epoch: int, current_batch_size: int) -> int:
        raise KeyError("missing")

    with pytest.raises(IncreaseFunctionError, match=r"f\(epoch=2, current_batch_size=4\) raised KeyError") as error:
        BatchController(4, 8, increase=fails, name="f").decide(at(2))
    assert isinstance(error.value.__cause__, KeyError)


def course(increase: IncreaseFunction | None, size: int, maximum: int, **shape: Any) -> Course:
    shape = {"epochs": 3, "samples": 100, **shape}
    if "accumulation" in shape:
        shape["accumulation"] = FixedAccumulation(shape["accumulation"])
    return Course(BatchController(size, maximum, increase=increase, name="f"), RunShape(**shape))


def test_a_function_of_two_arguments_is_asked_once_before_training_and_every_answer_is_kept() -> None:
    calls: list[tuple[float, int]] = []

    def record(epoch: float, current_batch_size: int) -> int:
        calls.append((epoch, current_batch_size))
        return 1

    planned = course(record, 4, 100, decisions=2)
    sizes = [epoch.batch_sizes for epoch in planned.plan()]
    assert sizes == [[5, 6], [7, 8], [9, 10]]
    assert calls == [(0, 4), (0.5, 5), (1, 6), (1.5, 7), (2, 8), (2.5, 9)]
    assert follow(planned)[0] == sizes
    assert len(calls) == 6


def test_a_function_that_takes_state_is_asked_while_training_with_what_is_known_then() -> None:
    seen: list[Any] = []

    def record(epoch: float, current_batch_size: int, state: Any) -> int:
        seen.append((state.epoch, state.samples_seen, state.steps, state.losses))
        return current_batch_size

    run = course(record, 10, 40, replicas=2)
    assert [epoch.batch_sizes for epoch in run.plan()] == [[10]] * 3
    assert not seen
    sizes, *_ = follow(run, lambda: {"losses": (1.5,)})
    assert sizes == [[20], [40], [40]]
    assert seen == [(0, 0, 0, (1.5,)), (1, 200, 5, (1.5,)), (2, 360, 7, (1.5,))]
    assert run.history == [(0, 20), (1, 40)]


def follow(run: Course, observe: Any = dict) -> tuple[list[list[int]], list[int], list[int], list[int]]:
    """Sizes, optimizer steps, samples of one replica, and schedule steps of each epoch, as a loader would give them."""
    sizes, steps, samples, schedule = [], [], [], []
    for epoch in range(run.shape.epochs):
        run.start_epoch(epoch, observe)
        sizes.append([run.controller.batch_size])
        steps.append(0)
        schedule.append(0)
        left = run.shape.samples
        while not run.epoch_is_over:
            left -= run.controller.batch_size * run.accumulation
            assert left >= 0, "no sample is seen twice"
            schedule[-1] += run.take_step()
            steps[-1] += 1
            if run.decide_if_due(observe) is not None and sizes[-1][-1] != run.controller.batch_size:
                sizes[-1].append(run.controller.batch_size)
        samples.append(run.shape.samples - left)
    return sizes, steps, samples, schedule


shapes = st.fixed_dictionaries(
    {
        "epochs": st.integers(1, 4), "samples": st.integers(1, 3000), "accumulation": st.integers(1, 4),
        "replicas": st.integers(1, 3), "max_steps": st.one_of(st.none(), st.integers(1, 60)),
        "decisions": st.integers(1, 10),
    }
)  # fmt: skip


@given(
    shape=shapes, size=st.integers(1, 64), maximum=st.integers(1, 512),
    increases=st.lists(st.integers(0, 40), min_size=1, max_size=12), early=st.booleans(),
)  # fmt: skip
def test_what_is_planned_is_what_happens(
    shape: dict[str, Any], size: int, maximum: int, increases: list[int], early: bool
) -> None:
    most = shape["samples"] // shape["accumulation"]
    if size > min(most, maximum):
        return
    reference_steps = most // size
    if shape["max_steps"] is not None:
        reference_steps = min(reference_steps, shape["max_steps"])
    shape |= {"reference_steps": reference_steps, "reference_samples": size * shape["accumulation"]}
    answers: dict[float, int] = {}

    def increase(epoch: float, current_batch_size: int) -> int:
        return answers.setdefault(epoch, increases[len(answers) % len(increases)])

    if early:
        run = course(increase, size, min(most, maximum), **shape)
    else:
        run = course(lambda epoch, current_batch_size, state: increase(epoch, 0), size, min(most, maximum), **shape)
    plan = run.plan()
    sizes, steps, samples, schedule = follow(run)
    if early:
        assert [epoch.batch_sizes for epoch in plan] == sizes
        assert [epoch.steps for epoch in plan] == steps
        assert [epoch.samples for epoch in plan] == [n * shape["replicas"] for n in samples]
    assert all(n >= 1 for n in steps), "no epoch is empty"
    assert schedule == [reference_steps] * shape["epochs"], "the schedule ends each epoch where the stock run's does"
    if shape["max_steps"] is None:
        for seen, in_epoch in zip(samples, sizes, strict=True):
            assert shape["samples"] - seen < in_epoch[-1] * shape["accumulation"], "less than a step is dropped"
    else:
        assert max(steps) <= shape["max_steps"]


def steps_of(run: Course, number: int, *, resumed: bool = False) -> Iterator[tuple[int, int, int, Any, int]]:
    """Yield epoch, size, schedule steps, progress and next size of each optimizer step from the epoch ``number`` on."""
    for epoch in range(number, run.shape.epochs):
        if epoch > number or not resumed:
            run.start_epoch(epoch)
        while not run.epoch_is_over:
            size, moved = run.controller.batch_size, run.take_step()
            run.decide_if_due()
            yield epoch, size, moved, run.progress(), run.controller.batch_size


@given(
    shape=shapes, size=st.integers(1, 64), maximum=st.integers(1, 512),
    increases=st.lists(st.integers(0, 40), min_size=1, max_size=12), where=st.integers(0, 1000), early=st.booleans(),
)  # fmt: skip
def test_a_course_that_is_resumed_within_an_epoch_is_that_of_the_whole_run(
    shape: dict[str, Any], size: int, maximum: int, increases: list[int], where: int, early: bool
) -> None:
    most = shape["samples"] // shape["accumulation"]
    if size > min(most, maximum):
        return
    steps = min(most // size, shape["max_steps"] or most)
    shape |= {"reference_steps": steps, "reference_samples": size * shape["accumulation"]}

    def increase(epoch: float, current_batch_size: int) -> int:
        return increases[int(epoch * shape["decisions"]) % len(increases)]

    def asked_while_training(epoch: float, current_batch_size: int, state: Any) -> int:
        return increase(epoch, 0)

    def a_course(batch_size: int) -> Course:
        return course(increase if early else asked_while_training, batch_size, min(most, maximum), **shape)

    whole = list(steps_of(a_course(size), 0))
    stopped = where % len(whole)
    epoch, _, _, progress, batch_size = whole[stopped]
    if progress is None:  # at the end of an epoch
        return
    run = a_course(batch_size)
    assert run.resume(epoch, progress) == 0
    if early:
        planned = sum(planned.steps for planned in run.plan(epoch))
        assert planned - progress["steps"] == len(whole) - stopped - 1
    assert list(steps_of(run, epoch, resumed=True)) == whole[stopped + 1 :]


def test_a_course_goes_on_with_other_devices_and_sizes_at_the_same_sample() -> None:
    four = {"replicas": 4, "samples": 100, "reference_steps": 10, "reference_samples": 10}
    run = course(None, 10, 10, **four)
    run.start_epoch(0)
    for _ in range(3):
        run.take_step()
    progress = run.progress()
    assert progress == {"samples": 120, "steps": 3, "schedule": [3, 10]}
    fewer = course(None, 20, 20, replicas=2, samples=200, reference_steps=20, reference_samples=10)
    assert fewer.resume(0, progress) == 0
    assert (fewer.seen_in_epoch, fewer.steps_per_epoch, fewer.take_step()) == (60, 3 + 7, 2)
    larger = course(None, 80, 80, **four)
    assert larger.resume(0, progress) == 7, "the rest of the schedule"
    assert larger.epoch_is_over


@given(
    samples=st.integers(1, 5000), batch=st.integers(1, 64), growth=st.integers(1, 16), accumulation=st.integers(1, 4),
    max_steps=st.one_of(st.none(), st.integers(1, 50)),
)  # fmt: skip
def test_the_schedule_neither_ends_early_nor_late_nor_goes_back(
    samples: int, batch: int, growth: int, accumulation: int, max_steps: int | None
) -> None:
    def steps_of(size: int) -> int:
        steps = samples // size // accumulation
        return min(steps, max_steps or steps)

    reference, grown = steps_of(batch), batch * growth
    if not reference or not steps_of(grown):
        return
    run = course(
        None, grown, grown, epochs=1, samples=samples, max_steps=max_steps,
        accumulation=accumulation,
        reference_steps=reference, reference_samples=batch * accumulation,
    )  # fmt: skip
    run.start_epoch(0)
    positions = [0]
    while not run.epoch_is_over:
        positions.append(positions[-1] + run.take_step())
    assert len(positions) == steps_of(grown) + 1
    assert positions[-1] == reference
    assert positions == sorted(positions)
    if growth == 1:
        assert positions == list(range(reference + 1)), "a constant batch moves it one step at a time, as stock"
    if max_steps is None:
        seen = [min(done * growth, reference) for done in range(len(positions) - 1)]
        assert positions[:-1] == seen, "the rate depends on the samples seen alone"


def test_within_an_epoch_the_batch_grows_only_as_far_as_its_rest_has_samples() -> None:
    run = course(step(every=0.25, gamma=2), 10, 100, epochs=2, decisions=4)
    first, second = run.plan()
    assert first.batch_sizes == [10, 20, 40]
    assert (first.steps, first.samples) == (3 + 1 + 1, 30 + 20 + 40)
    assert second.batch_sizes == [100]


def test_the_plan_tells_the_learning_rate_at_the_end_of_each_epoch() -> None:
    rates = [1 - i / 30 for i in range(31)]
    controller = BatchController(10, 100, increase=step(every=1, gamma=2))
    shape = RunShape(epochs=3, samples=100, reference_steps=10, reference_samples=10)
    run = Course(controller, shape, rates, lambda window: learning_rate_scale("sqrt", window / 10, 1.9))
    ends = [epoch.last_lr for epoch in run.plan()]
    assert ends == pytest.approx([rates[10], rates[20] * math.sqrt(2), 0])
    run.start_epoch(2)
    assert run.lr_scale == 1.9, "capped"


def test_a_planned_function_knows_the_scheduled_rate() -> None:
    rates = [0.0, 0.5, 1.0, *(1.0 * 0.5**i for i in range(1, 9))]  # warms up in two steps, then halves with each
    controller = BatchController(10, 200, increase=replace_lr_decay(alpha=4))
    shape = RunShape(epochs=1, samples=200, decisions=10, reference_steps=20, reference_samples=10)
    [epoch] = Course(controller, shape, rates).plan()
    assert epoch.batch_sizes[:2] == [10, 40]


def test_growth_can_wait_for_the_warm_up_to_end() -> None:
    rates = [*(i / 15 for i in range(16)), *(1 - i / 15 for i in range(1, 16))]  # the peak is in the middle of epoch 1
    shape = RunShape(epochs=3, samples=100, reference_steps=10, reference_samples=10)

    def sizes(**how: Any) -> list[list[int]]:
        controller = BatchController(10, 100, increase=step(every=1, gamma=2))
        return [epoch.batch_sizes for epoch in Course(controller, shape, rates, **how).plan()]

    assert sizes() == [[10], [20], [40]]
    assert sizes(grows_in_warmup=False) == [[10], [10], [40]]


def test_a_global_batch_that_is_kept_is_accumulated_from_fewer_batches() -> None:
    controller = BatchController(2, 12, increase=step(every=0.5, gamma=2), accumulation=KeepGlobal(12))
    run = Course(controller, RunShape(epochs=2, samples=48, accumulation=KeepGlobal(12), decisions=2))
    assert [epoch.batch_sizes for epoch in run.plan()] == [[2, 4], [6, 12]]  # 8 does not divide 12
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
    shape = RunShape(epochs=3, samples=samples, accumulation=accumulation, decisions=3, run_samples=run_samples)

    def new_course() -> Course:
        increase = step(every=0.4, gamma=gamma)
        return Course(BatchController(size, maximum, increase=increase, accumulation=accumulation), shape)

    plan, run, steps = new_course().plan(), new_course(), []
    for epoch in range(shape.epochs):
        if run.run_is_over:
            break
        run.start_epoch(epoch)
        steps.append(0)
        while not run.epoch_is_over:
            assert run.controller.batch_size % parts == 0
            run.take_step()
            steps[-1] += 1
            run.decide_if_due()
    assert [epoch.steps for epoch in plan] == steps and min(steps) >= 1
    assert sum(epoch.samples for epoch in plan) == run.samples_seen <= run_samples
    assert run.run_is_over or len(steps) == shape.epochs
    assert all(epoch.dropped_samples < epoch.batch_sizes[-1] for epoch in plan)


def test_the_rate_follows_the_batch_as_asked() -> None:
    assert [learning_rate_scale(rule, 9, 4) for rule in ("none", "sqrt", "linear")] == [1, 3, 4]


def test_a_course_without_a_schedule_resumes_within_an_epoch() -> None:
    def steps_of(course: Course, number: int, *, resumed: bool = False, at_most: int = 10**9) -> list[int]:
        windows: list[int] = []
        if not resumed:
            course.start_epoch(number)
        while not course.epoch_is_over and len(windows) < at_most:
            course.take_step()
            windows.append(course.window)
        return windows

    shape = RunShape(epochs=2, samples=30)
    whole = Course(BatchController(4, 16, increase=lambda epoch, size: 4 * min(epoch, 1)), shape)
    expected = [steps_of(whole, number) for number in range(2)]
    interrupted = Course(BatchController(4, 16), shape)
    before = steps_of(interrupted, 0, at_most=3)
    stored = json.loads(json.dumps(interrupted.progress()))
    course = Course(BatchController(4, 16, increase=lambda epoch, size: 4 * min(epoch, 1)), shape)
    assert course.resume(0, stored) == 0
    assert [before + steps_of(course, 0, resumed=True), steps_of(course, 1)] == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BatchController(8, 4), "batch_size=8 must be from 1 to maximum=4"),
        (lambda: BatchController(4, 16, accumulation=KeepGlobal(10)), "batch_size=4 does not go with .*; start with 2"),
        (lambda: RunShape(epochs=2, samples=0), "samples=0 must be at least 1"),
        (lambda: RunShape(epochs=2, samples=9, reference_samples=0), "reference_samples=0 must be at least 1"),
        (lambda: FixedAccumulation(0), "batches=0 must be at least 1"),
        (lambda: KeepGlobal(0), "samples=0 must be at least 1"),
    ],
)
def test_numbers_that_make_no_run_are_an_error_that_names_them(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
