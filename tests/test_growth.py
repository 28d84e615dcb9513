from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batching.growth import (
    BatchController,
    IncreaseFunctionError,
    double_every,
    fixed_increase,
    reference_steps,
    resolve,
)


def add_two(epoch: int, current_batch_size: int) -> int:
    return 2


def one_argument(epoch: int) -> int:
    return 1


def broken_factory(every: int) -> None:
    raise RuntimeError("no")


not_callable = 3


def sizes(controller: BatchController, epochs: int) -> list[int]:
    return [controller.start_epoch(epoch).batch_size for epoch in range(epochs)]


def test_the_function_is_called_at_every_epoch_the_first_included() -> None:
    calls = []

    def record(epoch: int, current_batch_size: int) -> int:
        calls.append((epoch, current_batch_size))
        return 1

    assert sizes(BatchController(4, 100, increase=record), 3) == [5, 6, 7]
    assert calls == [(0, 4), (1, 5), (2, 6)]


def test_growth_stays_within_the_maximum_and_warns_once_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    controller = BatchController(4, 9, "memory", fixed_increase(3), "f")
    assert sizes(controller, 5) == [4, 7, 7, 7, 7]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "10" in warnings[0] and "9" in warnings[0] and "memory" in warnings[0]


def test_a_smaller_increase_is_taken_after_a_larger_one_was_refused() -> None:
    answers = iter([10, 2])
    assert sizes(BatchController(4, 7, increase=lambda epoch, size: next(answers)), 2) == [4, 6]


def test_shipped_functions() -> None:
    assert sizes(BatchController(2, 100, increase=fixed_increase(3)), 4) == [2, 5, 8, 11]
    assert sizes(BatchController(2, 100, increase=fixed_increase(3, epochs=[0, 2])), 4) == [5, 5, 8, 8]
    assert sizes(BatchController(2, 100, increase=double_every(1)), 4) == [2, 4, 8, 16]
    assert sizes(BatchController(2, 100, increase=double_every(2)), 5) == [2, 2, 4, 4, 8]


@pytest.mark.parametrize("arguments", [{"every": 0}, {"every": "2"}, {"every": True}])
def test_shipped_functions_check_their_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="every="):
        double_every(**arguments)
    with pytest.raises(ValueError, match="increase=-1"):
        fixed_increase(-1)
    with pytest.raises(ValueError, match="epochs=-1"):
        fixed_increase(1, epochs=[2, -1])


@pytest.mark.parametrize("answer", [1.0, True, None, math.nan, -1, "2", np.float32(2), [1]])
def test_what_is_no_number_of_samples_is_refused_with_name_epoch_and_size(answer: object) -> None:
    controller = BatchController(4, 100, increase=lambda epoch, size: answer, name="pkg.f")  # type: ignore[arg-type, return-value]
    with pytest.raises(IncreaseFunctionError, match=r"pkg\.f\(epoch=3, current_batch_size=4\) returned .*>= 0"):
        controller.start_epoch(3)
    assert controller.batch_size == 4


def test_integers_of_other_libraries_are_accepted() -> None:
    assert BatchController(4, 100, increase=lambda epoch, size: np.int64(2)).start_epoch(0).batch_size == 6  # type: ignore[arg-type, return-value]


def test_an_error_in_the_function_names_it_and_keeps_its_cause() -> None:
    def fails(epoch: int, current_batch_size: int) -> int:
        raise KeyError("missing")

    with pytest.raises(IncreaseFunctionError, match=r"f\(epoch=2, current_batch_size=4\) raised KeyError") as error:
        BatchController(4, 8, increase=fails, name="f").start_epoch(2)
    assert isinstance(error.value.__cause__, KeyError)


def test_functions_and_factories_are_resolved_by_dotted_path() -> None:
    assert resolve("tests.test_growth.add_two")[1](0, 4) == 2
    name, function = resolve({"_component_": "adaptive_batching.growth.double_every", "every": 3})
    assert name == "adaptive_batching.growth.double_every"
    assert function(3, 5) == 5


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_package.f", "cannot be imported"),
        ("tests.test_growth.no_such_function", "cannot be imported"),
        ("not a path", "cannot be imported"),
        ("tests.test_growth.not_callable", "not callable but of type int"),
        ("tests.test_growth.one_argument", r"cannot be called with \(epoch, current_batch_size\)"),
        ({"_component_": "tests.test_growth.broken_factory", "every": 2}, "failed with the arguments"),
        ({"_component_": "adaptive_batching.growth.double_every", "evry": 2}, "evry"),
        ({"_component_": "builtins.dict"}, "must return a function"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_training(value: Any, message: str) -> None:
    with pytest.raises(IncreaseFunctionError, match=message):
        resolve(value)


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
    positions = [
        reference_steps(
            done,
            steps=steps_of(grown),
            samples_per_step=grown * accumulation,
            reference_steps=reference,
            reference_samples_per_step=batch * accumulation,
        )
        for done in range(steps_of(grown) + 1)
    ]
    assert positions[0] == 0
    assert positions[-1] == reference
    assert positions == sorted(positions)
    if growth == 1:
        assert positions == list(range(reference + 1)), "a constant batch moves it one step at a time, as stock"
    if max_steps is None:
        seen = [min(done * growth, reference) for done in range(len(positions) - 1)]
        assert positions[:-1] == seen, "the rate depends on the samples seen alone"
