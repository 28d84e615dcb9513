"""Batch sizes that a plain loop plans before training."""

from __future__ import annotations

from typing import Any

import pytest

from adaptive_batching import (
    BatchController,
    IncreaseFunctionError,
    growth,
    plan_batch_sizes,
)
from adaptive_batching._growth.increase import IncreaseFunction


def test_sizes_follow_the_increase_function_within_the_maximum() -> None:
    assert plan_batch_sizes(4, growth.step(every=1, gamma=2), epochs=4, samples=1000) == [4, 8, 16, 32]
    assert plan_batch_sizes(4, growth.step(every=2, gamma=2), epochs=4, samples=1000) == [4, 4, 8, 8]
    assert plan_batch_sizes(4, growth.step(), epochs=4, samples=1000, maximum=10) == [4, 8, 10, 10]
    assert plan_batch_sizes(4, growth.linear(end=16), epochs=4, samples=5) == [4, 5, 5, 5], "no more than there are"
    assert plan_batch_sizes(4, growth.constant(), epochs=2, samples=1000) == [4, 4]


def test_what_exceeds_the_maximum_is_not_added() -> None:
    assert plan_batch_sizes(4, lambda epoch, size: 5 if epoch else 0, epochs=3, samples=100, maximum=10) == [4, 9, 9]


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"epochs": 0}, {"samples": 0}, {"maximum": 0}, {"maximum": 3}, {"epochs": 1.5}]
)
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    arguments: dict[str, Any] = {"batch_size": 4, "epochs": 2, "samples": 100, **wrong}
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        plan_batch_sizes(increase=growth.constant(), **arguments)


@pytest.mark.parametrize("increase", [growth.on_plateau(), growth.gradient_noise_scale()])
def test_a_function_that_reads_the_run_is_refused(increase: IncreaseFunction) -> None:
    with pytest.raises(IncreaseFunctionError, match="reads what is known only while training"):
        plan_batch_sizes(4, increase, epochs=2, samples=100)


def test_a_function_that_returns_no_number_is_named() -> None:
    def half(epoch: float, current_batch_size: int) -> float:
        return 0.5

    with pytest.raises(IncreaseFunctionError, match=r"half\(epoch=0, current_batch_size=4\) returned 0.5"):
        plan_batch_sizes(4, half, epochs=2, samples=100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("increase", "message"),
    [
        (growth.step, r"increase=step is a factory.*write step\(\)"),
        (lambda epoch: 1, "increase=.*cannot be called with"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_training(increase: Any, message: str) -> None:
    with pytest.raises(IncreaseFunctionError, match=message):
        plan_batch_sizes(4, increase, epochs=2, samples=100)
    with pytest.raises(IncreaseFunctionError, match=message):
        BatchController(4, 8, increase=increase)
