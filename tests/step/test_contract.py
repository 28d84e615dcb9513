"""What a runner promises to every host: a place of the fault, how often, and on which of how many ranks.

Ranks are threads here, which agree on numbers as processes do; ``tests/loop/two_ranks.py`` has processes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._ranks.agree import OtherRankError, Ranks
from adaptive_batching._step.data_parallel import DataParallel
from adaptive_batching._step.failed_part import FailedPart
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._step.work import Part
from tests.support.toy_work import ToyWork

STEPS = [[[9, 2, 5], [3, 8]], [[4, 4, 4, 4], [7]], [[6], [1, 2, 3]]]
"""Batches of each optimizer step."""

PLACES, LAST = ("forward", "backward", "after all parts"), 10**9


class Meeting:
    """Where ranks that are threads exchange values."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)


class ThreadRanks(Ranks):
    """A rank that meets the others in this process."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(alone=True)
        self.rank, self.size, self._meeting = rank, len(meeting.values), meeting

    def gather(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait()
        values = [*self._meeting.values]
        self._meeting.barrier.wait()
        return values

    def largest(self, value: float) -> float:
        return float(max(self.gather(value)))


class Batches(ToyWork):
    """The batches of a step, each in parts of its own."""

    def split(self, samples: list[list[int]]) -> Iterator[list[Part]]:  # type: ignore[override]
        for batch in samples:
            yield from super().split(batch)


class Learning(Batches):
    """Has a weight whose gradient tells which samples have counted, and fails as it is told to."""

    def __init__(self, fail: Callable[[str, Sequence[int]], None]) -> None:
        super().__init__(self._learn)
        self.weight = nn.Parameter(torch.zeros(12, dtype=torch.double))
        self.trained, self._fail = [self.weight], fail

    def _learn(self, samples: Sequence[int]) -> int:
        values = self.weight[torch.tensor(samples)]
        self._fail("forward", samples)
        values.register_hook(lambda gradient: self._fail("backward", samples))
        values.sum().backward()
        return len(samples)


class Fault:
    """Runs out of memory at a place of a rank, so many times in the second step, with more than ``fits`` samples."""

    def __init__(self, place: str, times: int, fits: int = 0, error: type[Exception] = torch.OutOfMemoryError) -> None:
        self._place, self._left, self._fits, self._error = place, times, fits, error
        self.armed = False

    def __call__(self, place: str, samples: Sequence[int]) -> None:
        if self.armed and place == self._place and self._left and len(samples) > self._fits:
            self._left -= 1
            raise self._error("CUDA out of memory")


def never() -> Fault:
    return Fault("", 0)


def train(ranks: Ranks, fault: Fault) -> tuple[list[list[float]], StepRunner[Any, Any, Any]]:
    """Run all steps on a rank; return the gradient of each, in which samples are counted."""
    work = Learning(fault)
    parallel = DataParallel(ranks, work.parameters)
    prepare = parallel.prepare_sum

    def prepare_sum() -> None:
        fault("after all parts", range(LAST))
        prepare()

    parallel.prepare_sum = prepare_sum  # type: ignore[method-assign]
    runner: StepRunner[Any, Any, Any] = StepRunner(work, parallel)
    found = []
    for number, batches in enumerate(STEPS):
        fault.armed = number == 1
        ran = [sample for part, _ in runner.step(batches) if part.weight != 0 for sample in part.samples]
        assert sorted(ran) == sorted(itertools.chain(*batches)), "each sample once"
        assert work.weight.grad is not None
        found.append(work.weight.grad.tolist())
        work.weight.grad = None
    return found, runner


def on_ranks(faults: Sequence[Fault], run: Callable[[Ranks, Fault], Any] = train) -> list[Any]:
    """Run on as many ranks as faults; an error is what a rank has found."""

    def outcome(rank: Ranks, fault: Fault) -> Any:
        try:
            return run(rank, fault)
        except Exception as error:
            return error

    if len(faults) == 1:
        return [outcome(Ranks(alone=True), faults[0])]
    meeting = Meeting(len(faults))
    with ThreadPoolExecutor(len(faults)) as pool:
        running = [pool.submit(outcome, ThreadRanks(rank, meeting), fault) for rank, fault in enumerate(faults)]
        return [each.result() for each in running]


WHERE = {"one rank": [True], "one of two": [False, True], "both of two": [True, True]}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_runs_out_of_memory_has_the_gradient_of_the_undisturbed_one(
    place: str, times: int, where: str
) -> None:
    fails = WHERE[where]
    [(expected, _)] = on_ranks([never()])
    found = on_ranks([Fault(place, times) if each else never() for each in fails])
    for gradients, runner in found:
        assert gradients == expected
        assert runner.num_recoveries == times
        assert runner.limit.max_tokens == found[0][1].limit.max_tokens, "the same on every rank"
    assert (found[0][1].limit.max_tokens is None) == (times == 1), "what has run before runs again as it was"


@pytest.mark.parametrize("where", WHERE)
def test_parts_become_as_small_as_they_have_to(where: str) -> None:
    [(expected, _)] = on_ranks([never()])
    found = on_ranks([Fault("forward", LAST, fits=1) if each else never() for each in WHERE[where]])
    for gradients, runner in found:
        assert gradients == expected
        assert 1 <= runner.num_recoveries == found[0][1].num_recoveries <= 4
        assert runner.limit.max_tokens == found[0][1].limit.max_tokens < 8, "one of 4 tokens"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("place", PLACES[:2])
def test_a_sample_that_does_not_fit_alone_ends_all_ranks(place: str, where: str) -> None:
    fails = WHERE[where]
    found = on_ranks([Fault(place, LAST) if each else never() for each in fails])
    for error, fails_here in zip(found, fails, strict=True):
        assert isinstance(error, DoesNotFitError)
        here, elsewhere = "1 sample of up to ", "out of memory on another rank"
        assert (here if fails_here else elsewhere) in str(error)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("place", PLACES)
def test_another_error_is_no_recovery_and_reaches_all_ranks(place: str, where: str) -> None:
    fails = WHERE[where]
    found = on_ranks([Fault(place, 1, error=KeyError) if each else never() for each in fails])
    for error, fails_here in zip(found, fails, strict=True):
        assert isinstance(error, KeyError if fails_here else OtherRankError), error
        assert fails_here or str(error).startswith("on rank 1, KeyError")


class Nothing:
    """The state of a computation that changes nothing."""

    def save(self) -> None: ...

    def put_back(self) -> None: ...

    def end(self) -> None: ...


def test_samples_that_run_again_as_they_were_meet_the_same_random_numbers() -> None:
    def drawn(times: int) -> tuple[list[list[float]], float]:
        def draw(samples: Sequence[int]) -> list[float]:
            numbers: list[float] = torch.rand(len(samples)).tolist()
            fault("forward", samples)
            return numbers

        torch.manual_seed(0)
        fault = Fault("forward", times)
        work = Batches(draw, device=torch.device("cpu"))
        work.state = Nothing()  # type: ignore[assignment]
        runner: StepRunner[Any, Any, Any] = StepRunner(work)
        results: list[list[float]] = []
        for number, batches in enumerate(STEPS):
            fault.armed = number == 1
            results += [result for _, result in runner.step(batches)]
        assert runner.num_recoveries == times
        return results, torch.rand(1).item()

    assert drawn(1) == drawn(0)


def failing(work: type[Learning] = Learning, place: str = "forward", **settings: Any) -> StepRunner[Any, Any, Any]:
    """Return a runner that runs out of memory."""
    fault = Fault(place, 1)
    fault.armed = True
    return StepRunner(work(fault), **settings)


def test_where_recovery_is_off_the_error_says_what_to_set() -> None:
    with pytest.raises(DoesNotFitError, match=r"set adaptive_batching\.recover_from_oom=True"):
        failing(recovers=False).step([[4, 4]])


def test_a_host_may_say_that_a_part_is_final() -> None:
    class Updates(Learning):
        def failed(self, part: Part) -> FailedPart:
            return replace(super().failed(part), has_updated=True)

    with pytest.raises(DoesNotFitError, match=r"had updated parameters .*resume from the last checkpoint"):
        failing(Updates, "backward").step([[4, 4]])
