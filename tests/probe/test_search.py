"""Searches over generated memory curves. Nothing here imports torch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_batching._probe.search import BY_FAR, SEARCHES, WORTH, SizeSearch, find_enough
from adaptive_batching._probe.sizes import Measurement, candidate_sizes
from adaptive_batching._step.forward_times import ForwardTimes
from tests.support.wide import few

Peak = Callable[[int], float]


@dataclass
class Device:
    """A device whose training step takes ``peak(b)`` bytes above ``resting``, with a relative error up to ``noise``."""

    peak: Peak
    room: float
    resting: float = 0.0
    noise: float = 0.0
    seed: int = 0
    enforced: bool = True  # else what does not fit runs all the same, and is measured
    disturbed: Callable[[int], float] = lambda number: 0.0  # number of the run -> bytes that it takes besides
    trains_up_to: float = float("inf")  # largest size whose second step does without emptying the allocator's cache
    runs: list[int] = field(default_factory=list)

    @property
    def budget(self) -> float:
        return self.resting + self.room

    def measure(self, batch_size: int) -> Measurement:
        noise = 1 + self.noise / 2 * random.Random(f"{self.seed}-{len(self.runs)}").uniform(-1, 1)
        peak = int(self.resting + self.peak(batch_size) * noise + self.disturbed(len(self.runs)))
        self.runs.append(batch_size)
        fits = peak <= self.budget
        return Measurement(batch_size, fits, peak if fits or not self.enforced else None)

    def repeat(self, batch_size: int) -> Measurement:
        first = self.measure(batch_size)
        if not first.fits:
            return first
        strains = batch_size > self.trains_up_to
        return first.followed_by(Measurement(batch_size, True, first.peak_bytes, retries=int(strains)))

    def sizes(self, candidates: Sequence[int], *, repeats: bool = False) -> SizeSearch:
        tells_up_to = 0.0 if repeats else 1.0
        return SizeSearch(self.measure, candidates, self.budget, self.resting, self.repeat, 0.01, tells_up_to)

    def search(self, name: str, candidates: Sequence[int], *, repeats: bool = False) -> SizeSearch:
        sizes = self.sizes(candidates, repeats=repeats)
        SEARCHES[name](sizes)
        while sizes.largest is not None and not sizes.confirm():
            SEARCHES[name](sizes)
        return sizes

    def largest_of(self, candidates: Sequence[int]) -> int:
        """Return the largest size that fits and trains; 0 if none does."""
        fits = (b for b in candidates if int(self.resting + self.peak(b)) <= self.budget and b <= self.trains_up_to)
        return max(fits, default=0)


def curve(lines: Sequence[tuple[float, float]]) -> Peak:
    return lambda b: max(base + slope * b for base, slope in lines)


@st.composite
def curves(draw: st.DrawFn) -> Peak:
    """Convex memory curves: the largest of a few lines, of which some are floors."""
    return curve(draw(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 2000)), min_size=1, max_size=4)))


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(SEARCHES)), peak=curves(), upper=st.integers(1, 4096), powers=st.booleans(),
    include=st.integers(1, 400), level=st.floats(0.001, 1.5), resting=st.integers(0, 10**6),
    noise=st.sampled_from([0.0, 0.0, 0.002, 0.01, 0.3]), enforced=st.booleans(), repeats=st.booleans(),
    trains_up_to=st.just(1.0) | st.floats(0, 1),
)  # fmt: skip
def test_every_search_ends_and_returns_the_best_size_that_ran(
    name: str, peak: Peak, upper: int, powers: bool, include: int, level: float, resting: int, noise: float,
    enforced: bool, repeats: bool, trains_up_to: float,
) -> None:  # fmt: skip
    candidates = candidate_sizes(upper, powers_of_two=powers, include=include)
    device = Device(peak, level * peak(upper), resting, noise=noise, enforced=enforced)
    if repeats:
        device.trains_up_to = max(1, trains_up_to * upper)
    found = device.search(name, candidates, repeats=repeats)
    answers = [m for m in found.measurements if m.batch_size == found.largest]
    assert set(device.runs) <= set(candidates)
    assert found.largest is None or (answers[-1].fits and (not repeats or answers[-1].steps > 1))
    if noise == 0 and not (name == "power_of_two" and not powers):
        largest = device.largest_of(candidates)
        assert (found.largest or 0) <= largest
        assert (found.largest or 0) * (1 + WORTH) >= largest - 1 or name != "predict"
        assert found.largest == (largest or None) or name == "predict"
    if noise <= 0.01 and name == "predict":
        strained = repeats and trains_up_to < 1
        assert len(found.measurements) <= (60 if strained else 20)


@pytest.mark.parametrize("enforced", few([True, False], True))
def test_a_line_after_a_floor_takes_six_steps_and_one_error_as_a_rule(enforced: bool) -> None:
    """As nearly all models have: a floor of optimizer and libraries up to four samples, then a line, and no noise."""
    chance = random.Random(1)
    failures, steps = Counter[int](), Counter[int]()
    for _ in range(1000):
        base, slope = chance.uniform(0, 20e6), 10 ** chance.uniform(4, 7)
        peak = curve([(base + slope * chance.uniform(0, 4), 0), (base, slope)])
        candidates = candidate_sizes(chance.choice([64, 1000, 4096]), powers_of_two=chance.random() < 0.5)
        device = Device(peak, chance.uniform(10e6, 80e6), chance.uniform(1e6, 40e6), enforced=enforced)
        largest = device.largest_of(candidates)
        found = device.search("predict", candidates)
        assert (found.largest or 0) * (1 + WORTH) >= largest - 1
        failures[sum(not m.fits for m in found.measurements) - (largest == 0)] += 1
        steps[len(device.runs)] += 1
    assert max(steps) <= 10 and sum(steps[n] for n in range(7)) >= 900, steps
    assert max(failures) <= 3 and failures[-1] + failures[0] >= 800 and failures[2] + failures[3] <= 25, failures


def test_a_size_that_the_line_puts_above_the_budget_never_runs() -> None:
    device = Device(lambda b: 1000 + 37 * b, 20_000)
    found = device.search("predict", range(1, 4097))
    assert 503 <= (found.largest or 0) <= 513 and all(m.fits for m in found.measurements) and len(device.runs) <= 4
    rounded = Device(lambda b: 1000 + 37 * b, 20_000)
    found = rounded.search("predict", candidate_sizes(4096, powers_of_two=True))
    line = found.line()
    assert found.largest == 512 and line is not None and int(line.reach(20_000)) == 513


@settings(max_examples=300, deadline=None)
@given(
    peak=curves(), upper=st.integers(1, 400), powers=st.booleans(), level=st.floats(0.2, 1.5),
    number=st.integers(0, 8), more=st.floats(0.05, 3.0),
)  # fmt: skip
def test_one_step_that_takes_far_more_than_another_is_run_again_where_that_cannot_be(
    peak: Peak, upper: int, powers: bool, level: float, number: int, more: float
) -> None:
    """As a step that runs beside another program."""
    candidates = candidate_sizes(upper, powers_of_two=powers)
    room = level * peak(upper) + 1
    device = Device(peak, room, disturbed=lambda run: more * room if run == number else 0.0)
    found = device.search("predict", candidates)
    assert found.largest is not None or device.largest_of(candidates) == 0
    assert found.largest is None or found.largest <= device.largest_of(candidates)


def test_sizes_that_fit_in_one_step_and_do_not_train_cost_few_others() -> None:
    for answer in (3, 40, 130, 157):
        device = Device(lambda b: 100 + 12 * b, 2000, trains_up_to=answer)
        found = device.search("predict", range(1, 400), repeats=True)
        assert answer / (1 + WORTH) - 1 <= (found.largest or 0) <= answer
        assert len(found.measurements) <= 20


@given(st.integers(1, 10_000))
def test_coarse_candidates_are_at_most_an_eighth_apart_and_hold_the_powers_of_two(upper: int) -> None:
    coarse = candidate_sizes(upper, powers_of_two=False, coarse=True)
    assert coarse[0] == 1 and coarse[-1] == upper
    assert all(b <= max(a + 1, a * 9 / 8) for a, b in pairwise(coarse))
    assert set(candidate_sizes(upper, powers_of_two=True)) <= set(coarse)
    assert len(coarse) <= 8 * upper.bit_length()
    assert candidate_sizes(20, powers_of_two=True) == [1, 2, 4, 8, 16]
    assert candidate_sizes(20, powers_of_two=True, include=6) == [1, 2, 4, 6, 8, 16], "the configured size"
    assert candidate_sizes(4, powers_of_two=True, include=6) == [1, 2, 4]


@settings(max_examples=300, deadline=None)
@given(
    peak=curves(), upper=st.integers(1, 300), level=st.floats(0, 3), resting=st.integers(0, 10**6),
    suffices=st.none() | st.integers(1, 300), wanted=st.none() | st.integers(1, 400), is_worth=st.booleans(),
)  # fmt: skip
def test_what_is_enough_runs_or_fits_by_far_by_what_ran(
    peak: Peak, upper: int, level: float, resting: int, suffices: int | None, wanted: int | None, is_worth: bool
) -> None:
    device = Device(peak, level * peak(upper) + 1, resting)
    sizes = device.sizes(candidate_sizes(upper, powers_of_two=False, coarse=True))
    found = find_enough(sizes, suffices, lambda: wanted, lambda small, large: is_worth)
    if found is None:
        before = len(device.runs)
        SEARCHES["predict"](sizes)
        assert sizes.largest is None or sizes.largest * (1 + WORTH) >= device.largest_of(sizes.candidates) - 1
        assert len(device.runs) == len({*device.runs}) or sizes.largest is None or before == 0
        return
    assert device.resting + peak(found) <= device.budget
    assert found in device.runs or device.resting + peak(found) <= BY_FAR * device.budget
    assert suffices is not None or wanted is not None or upper <= 2
    if suffices is not None:
        assert found >= min(suffices, upper)
    elif is_worth and wanted is not None:
        assert found >= min(wanted, upper)


def test_rows_that_fit_by_far_take_two_steps() -> None:
    device = Device(lambda b: 2.4e9 + 1.1e9 * b, 79e9, 3.2e9)
    sizes = device.sizes(candidate_sizes(64, powers_of_two=False, coarse=True))
    assert find_enough(sizes, 8) == 40 and device.runs == [1, 8], "1.4e9 a sample at most, by the row of 8"
    small = Device(lambda b: 1e6 * b, 79e9, 3.2e9)
    sizes = small.sizes(candidate_sizes(64, powers_of_two=False, coarse=True))
    assert find_enough(sizes, 8) == 64 and small.runs == [1], "all of a step fit by what one sample takes"


def test_trials_that_cost_more_than_the_rest_of_the_run_gains_by_them_are_not_made() -> None:
    """Each step has two forwards, of a fixed time and a second for each sample."""
    for samples, expected in ((10.0, [1, 2]), (1e6, [1, 2, 8])):
        device = Device(lambda b: 40.0 + b, 100)
        times = ForwardTimes(samples)
        times.note(1, 1.5)
        times.note(2, 2.5)
        find_enough(device.sizes(range(1, 300)), None, lambda: 32, times.is_worth)
        assert device.runs[: len(expected)] == expected and (len(device.runs) == 2) == (samples == 10.0)
