"""Searches over generated memory curves. Nothing here imports torch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from adaptive_batching._probe.search import CERTAIN_FIT, SEARCHES, CorrectedCurve, settle_for_enough
from adaptive_batching._probe.sizes import NOISE, Measurement, SizesRun, candidate_sizes
from adaptive_batching._step.forward_cost import ForwardTimes
from adaptive_batching._trace.reserved import MAX_STEPS, can_repeat

Peak = Callable[[int], float]
Sizes = list[int] | range


@dataclass
class Device:
    """A device whose training step takes ``peak(b)`` bytes, measured with a relative error of up to ``noise``."""

    peak: Peak
    budget: int
    noise: float = 0.0
    seed: int = 0
    enforced: bool = True  # else what does not fit runs all the same, and is measured
    disturbed: Callable[[int], float] = lambda number: 0.0  # number of the run -> bytes that it takes besides
    runs: list[int] = field(default_factory=list)

    def measure(self, batch_size: int) -> Measurement:
        noise = 1 + self.noise * random.Random(f"{self.seed}-{batch_size}").uniform(-1, 1)
        peak = int(self.peak(batch_size) * noise + self.disturbed(len(self.runs)))
        self.runs.append(batch_size)
        fits = peak <= self.budget
        return Measurement(batch_size, fits, peak if fits or not self.enforced else None)

    def search(
        self, name: str, candidates: Sizes, predict: Peak | None = None, again: bool = False, **options: bool
    ) -> SizesRun:
        sizes = SizesRun(self.measure, candidates, self.budget, self.measure if again else None)
        vars(sizes).update(options)
        curve = CorrectedCurve(sizes, predict)
        run_search(name, curve)
        return sizes


def run_search(name: str, curve: CorrectedCurve) -> None:
    """Search until the answer has run again where it has to."""
    SEARCHES[name](curve)
    while curve.sizes.largest is not None and not curve.sizes.confirm():
        SEARCHES[name](curve)


@st.composite
def curves(draw: st.DrawFn) -> Peak:
    """Convex memory curves: the largest of a few lines, of which some are floors."""
    lines = draw(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 2000)), min_size=1, max_size=4))
    return lambda b: max(base + slope * b for base, slope in lines)


def largest_fit(device: Device, candidates: Sequence[int]) -> int | None:
    return max((b for b in candidates if device.peak(b) <= device.budget), default=None)


@settings(max_examples=500, deadline=None)
@given(
    name=st.sampled_from(sorted(SEARCHES)),
    peak=curves(),
    upper=st.integers(1, 400),
    powers=st.booleans(),
    include=st.integers(1, 400),
    level=st.floats(0, 1.5),
    noise=st.sampled_from([0.0, 0.0, 0.001, 0.05, 0.3]),
    enforced=st.booleans(),
    prediction=st.sampled_from(["none", "exact", "shifted", "half", "triple", "zero", "other"]),
    other=curves(),
)
def test_every_search_ends_and_returns_the_best_size_that_it_proved(
    name: str, peak: Peak, upper: int, powers: bool, include: int, level: float, noise: float,
    enforced: bool, prediction: str, other: Peak,
) -> None:  # fmt: skip
    predictions: dict[str, Peak | None] = {
        "none": None, "exact": peak, "shifted": lambda b: peak(b) + 5000, "half": lambda b: 0.5 * peak(b),
        "triple": lambda b: 3 * peak(b), "zero": lambda b: 0.0, "other": other,
    }  # fmt: skip
    candidates = candidate_sizes(upper, powers_of_two=powers, include=include)
    device = Device(peak, budget=int(level * peak(upper)), noise=noise, enforced=enforced)
    sizes = device.search(name, candidates, predictions[prediction])

    twice = [size for size, times in Counter(device.runs).items() if times > 1]
    assert len(device.runs) <= len(set(device.runs)) + len(twice) and len(twice) <= 2, "once more, where in doubt"
    if noise == 0 and prediction in ("none", "exact"):
        assert not twice or (twice == [1] and sizes.largest is None and prediction == "none")
    assert set(device.runs) <= set(candidates)
    fitted = [m.batch_size for m in sizes.measurements if m.fits]
    assert sizes.largest == max(fitted, default=None), "the largest size that ran and fitted"
    if noise == 0 and not (name == "power_of_two" and not powers):
        assert sizes.largest == largest_fit(device, candidates)


@settings(max_examples=300, deadline=None)
@given(
    peak=curves(), upper=st.integers(1, 400), powers=st.booleans(), level=st.floats(0.2, 1.5),
    number=st.integers(0, 8), more=st.floats(0.05, 3.0), error=st.floats(-0.05, 0.05),
)  # fmt: skip
def test_one_step_that_takes_far_more_than_the_curve_says_costs_no_more_than_noise(
    peak: Peak, upper: int, powers: bool, level: float, number: int, more: float, error: float
) -> None:
    """As a step that runs on top of what a failed one has left, or beside another program."""
    candidates = candidate_sizes(upper, powers_of_two=powers)
    budget = int(level * peak(upper)) + 1
    device = Device(peak, budget, disturbed=lambda run: more * budget if run == number else 0.0)
    sizes = device.search("predict", candidates, lambda b: peak(b) + error * budget, again=True)
    surely = [b for b in candidates if peak(b) <= (1 - 2 * NOISE) * budget]
    assert (sizes.largest or 0) >= max(surely, default=0)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(SEARCHES)), peak=curves(), upper=st.integers(1, 400), powers=st.booleans(),
    level=st.floats(0.2, 1.5), repeat_fails=st.booleans(), left=st.floats(0.3, 2.0),
)  # fmt: skip
def test_a_size_that_has_fitted_is_not_discarded_because_another_has_failed(
    name: str, peak: Peak, upper: int, powers: bool, level: float, repeat_fails: bool, left: float
) -> None:
    """What runs next meets what the failed step has left: it fails as well, and the one after that does not."""
    candidates = candidate_sizes(upper, powers_of_two=powers)
    device = Device(peak, int(level * peak(upper)) + 1)
    largest = largest_fit(device, candidates)
    fitted: set[int] = set()
    residue = 0.0

    def measure(size: int, fails: bool = False) -> Measurement:
        nonlocal residue
        took, has_residue = peak(size) + residue, residue > 0
        fits = took <= device.budget and not fails
        residue = 0.0 if fits or has_residue else left * device.budget
        fitted.update([size] if fits else [])
        return Measurement(size, fits, int(took) if fits else None)

    def again(size: int) -> Measurement:
        return measure(size, fails=repeat_fails and size == largest)

    sizes = SizesRun(measure, candidates, device.budget, again)
    sizes.trusts_prediction = False  # so that every answer runs again
    curve = CorrectedCurve(sizes, peak if name == "predict" else None)
    run_search(name, curve)
    by_far = [b for b in fitted if peak(b) < (1 - NOISE) * device.budget and (b != largest or not repeat_fails)]
    assert (sizes.largest or 0) >= max(by_far, default=0)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(SEARCHES)),
    peak=curves(),
    upper=st.integers(1, 400),
    powers=st.booleans(),
    level=st.floats(0.01, 1.5),
    prediction=st.sampled_from(["none", "exact", "shifted"]),
    trusts=st.booleans(),
)
def test_where_failures_are_to_be_avoided_what_is_known_to_be_too_large_does_not_run(
    name: str, peak: Peak, upper: int, powers: bool, level: float, prediction: str, trusts: bool
) -> None:
    candidates = candidate_sizes(upper, powers_of_two=powers)
    device = Device(peak, budget=int(level * peak(upper)))
    predict = {"none": None, "exact": peak, "shifted": lambda b: peak(b) + 300}[prediction]
    sizes = device.search(name, candidates, predict, avoids_failures=True, trusts_prediction=trusts)
    largest = largest_fit(device, candidates)
    if trusts and prediction != "shifted" and not (name == "power_of_two" and not powers):
        assert sizes.largest == largest
    assert (sizes.largest or 0) <= (largest or 0)
    failed = [m.batch_size for m in sizes.measurements if not m.fits]
    if prediction == "exact" and name == "predict":
        assert not failed or sizes.largest is None
    fitted = sorted(m.batch_size for m in sizes.measurements if m.fits)
    for size in failed:  # nothing showed that it would fail
        known = [b for b in fitted if device.runs.index(b) < device.runs.index(size)][-2:]
        if len(known) == 2:
            b0, b1 = known
            assert device.peak(b1) + (size - b1) * (device.peak(b1) - device.peak(b0)) / (b1 - b0) <= device.budget + 1


@pytest.mark.parametrize("more", [1.0, 1.1, 1.25, 1.5])
@pytest.mark.parametrize("budget", [3000, 7000, 20_000])
def test_a_step_that_takes_more_than_any_trace_sees_fails_nowhere_and_takes_four_steps(
    more: float, budget: int
) -> None:
    device = Device(lambda b: 1000 + 37 * more * b, budget=budget)
    options = dict(avoids_failures=True, trusts_prediction=False)
    sizes = device.search("predict", range(1, 2000), lambda b: 900 + 37.0 * b, again=True, **options)
    largest = largest_fit(device, range(1, 2000))
    assert largest is not None and sizes.largest is not None and 0.75 * largest <= sizes.largest <= largest
    assert all(m.fits for m in sizes.measurements)
    assert len(device.runs) <= 4


@settings(max_examples=300, deadline=None)
@example(peak=float, upper=25, level=1.0, offset=22)
@given(peak=curves(), upper=st.integers(1, 100_000), level=st.floats(0.001, 1.5), offset=st.integers(0, 3000))
def test_an_exact_curve_takes_three_steps_and_one_out_of_memory(
    peak: Peak, upper: int, level: float, offset: int
) -> None:
    device = Device(lambda b: peak(b) + offset, budget=int(level * peak(upper)))
    # The largest size runs uncalibrated where it is predicted to fit by far. An offset that is larger still is no level
    # that is off by a constant, but a prediction that is wrong.
    assume(peak(upper) > CERTAIN_FIT * device.budget or peak(upper) + offset <= device.budget)
    sizes = device.search("predict", candidate_sizes(upper, powers_of_two=False), peak)
    largest = sizes.largest or 0
    failed = {m.batch_size for m in sizes.measurements if not m.fits}
    # An offset that calibration has not seen yet can cost one wrong guess, where a batch of 2 does not fit.
    assert len({*device.runs}) <= 3 or largest <= 2
    assert len(failed) <= 1 or largest <= 2
    # Only what is off the curve by more than noise runs again.
    assert len(device.runs) == len({*device.runs}) or offset > NOISE * device.budget


@pytest.mark.parametrize(
    ("room", "overhead", "trusts", "twice"),
    [(0.002, 1.0, True, False), (0.0005, 1.0, True, True), (0.1, 1.02, True, True), (0.1, 1.0, False, True)],
)
def test_an_answer_runs_twice_unless_it_leaves_room_and_freed_memory_goes_back_at_once(
    room: float, overhead: float, trusts: bool, twice: bool
) -> None:
    def measure(batch_size: int) -> Measurement:
        return Measurement(batch_size, True, int((1 - room) * 10**6), overhead=overhead)

    sizes = SizesRun(measure, [1], 10**6, measure)
    sizes.trusts_prediction = trusts
    assert sizes.run(0) and sizes.confirm()
    assert sum(m.steps for m in sizes.measurements) == (2 if twice else 1)


def test_without_a_prediction_the_secant_takes_few_steps() -> None:
    slope = Device(lambda b: 1000 + 10 * b, budget=5000)
    assert slope.search("predict", range(1, 100_001)).largest == 400 and len(slope.runs) <= 8


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


def coarse_search(
    peak: Peak, upper: int, level: float, predict: Peak | None, smallest: int = 1
) -> tuple[Device, SizesRun, CorrectedCurve]:
    """Return what looks for a size on a device where at least ``smallest`` samples fit."""
    device = Device(peak, int(peak(smallest) + level * (peak(upper) - peak(smallest))) + 1)
    candidates = candidate_sizes(upper, powers_of_two=False, coarse=True)
    sizes = SizesRun(device.measure, candidates, device.budget)
    return device, sizes, CorrectedCurve(sizes, predict)


@settings(max_examples=300, deadline=None)
@given(
    peak=curves(), upper=st.integers(1, 300), level=st.floats(0, 1.5), wanted=st.none() | st.integers(1, 400),
    error=st.floats(-0.1, 0.1),
)  # fmt: skip
def test_what_is_enough_need_not_run_only_where_it_fits_by_far(
    peak: Peak, upper: int, level: float, wanted: int | None, error: float
) -> None:
    def predict(size: int) -> float:  # off by a level, as a trace is
        return peak(size) + error * peak(1)

    device, sizes, curve = coarse_search(peak, upper, level, predict)
    candidates = sizes.candidates
    settled = settle_for_enough(curve, lambda: wanted)
    smallest = [size for size in (1, 2) if size <= upper]
    assert device.runs == (smallest * 2)[: len(device.runs)], "nothing larger has run"
    if settled is not None:
        assert wanted is not None and 3 * settled >= min(wanted, upper)
        assert settled <= 2 or settled < 1.2 * wanted + 1
        assert peak(settled) <= device.budget * CERTAIN_FIT + 1
        return
    SEARCHES["predict"](CorrectedCurve(sizes, predict))
    reachable = sizes.candidates if wanted is not None and len(device.runs) >= min(2, upper) else candidates
    assert sizes.largest == largest_fit(device, reachable)
    if sizes.largest is not None and wanted is not None:
        assert sizes.largest <= max(2, 1.2 * wanted + 1)


@settings(max_examples=300, deadline=None)
@given(
    peak=curves(), upper=st.integers(1, 300), level=st.floats(0, 1.5), suffices=st.integers(1, 300),
    error=st.floats(-0.1, 0.1),
)  # fmt: skip
def test_the_smallest_size_will_do_where_it_shows_that_what_suffices_fits_by_far(
    peak: Peak, upper: int, level: float, suffices: int, error: float
) -> None:
    device, sizes, curve = coarse_search(peak, upper, level, lambda size: peak(size) + error * peak(1))
    settled = settle_for_enough(curve, lambda: None, suffices=suffices)
    by_far = [size for size in sizes.candidates if peak(size) <= CERTAIN_FIT * device.budget]
    if by_far and by_far[-1] >= min(suffices, upper):
        assert (device.runs, settled) == ([1], by_far[-1])
    else:
        assert settled is None, "the search goes on"


@settings(max_examples=300, deadline=None)
@given(
    peak=curves(), upper=st.integers(3, 300), level=st.floats(0, 1.5), wanted=st.integers(3, 400),
    fixed=st.floats(0.001, 1.0), samples=st.floats(1, 10**6), is_traced=st.booleans(),
)  # fmt: skip
def test_trials_that_cost_more_than_the_rest_of_the_run_gains_by_them_are_not_made(
    peak: Peak, upper: int, level: float, wanted: int, fixed: float, samples: float, is_traced: bool
) -> None:
    """Each step has two forwards, of a fixed time and one second for each sample."""
    device, sizes, curve = coarse_search(peak, upper, level, peak if is_traced else None, smallest=2)
    times = ForwardTimes(samples)
    for size, seconds in ((1, 9 + fixed), (1, 1 + fixed), (2, 2 + fixed), (2, 7 + fixed)):  # of two, one had to wait
        times.note(size, seconds)
    settled = settle_for_enough(curve, lambda: wanted, times.is_worth)
    assert device.runs in ([1, 2], [1, 2, 1, 2]) and (settled or 1) <= sizes.candidates[-1]
    assert len(device.runs) == 4 or 3 * (settled or 0) >= sizes.candidates[-1], "what is far from enough runs twice"
    largest = sizes.candidates[-1]
    cost = 3 * 2 * (1.1 * fixed + 0.1 + largest)
    gain = samples * (1.1 * fixed + 0.1) * (1 / (settled or 2) - 1 / largest)
    if settled is not None and 3 * settled < largest:
        assert cost > 0.99 * gain
    if settled is None and sizes.open:
        assert cost < 1.01 * gain


CAN_REPEAT = {
    None: [([0], False), ([0, 0], True), ([1, 1], True)],  # the first step had more room than those after it
    True: [([0, 0], False), ([0, 0, 0], True), ([2, 0, 0], False), ([1, 0, 0], True), ([0, 1, 0, 0], True)],
    False: [([0, 0, 1], True), ([1, 0, 1], False), ([1, 1, 1], False)],
}


@pytest.mark.parametrize("expected", CAN_REPEAT)
def test_a_size_counts_once_two_steps_in_a_row_have_got_by(expected: bool | None) -> None:
    for retries, makes_states in CAN_REPEAT[expected]:
        assert can_repeat(retries, makes_states=makes_states) is expected, retries
    assert can_repeat([1, 1, 0, 0], makes_states=True) is True


@given(st.lists(st.integers(0, 2), min_size=MAX_STEPS, max_size=MAX_STEPS), st.booleans())
def test_it_is_known_after_few_steps_whether_training_can_repeat_them(retries: list[int], makes_states: bool) -> None:
    assert can_repeat(retries, makes_states=makes_states) is not None


@dataclass
class Straining:
    """A device on which sizes from ``beyond`` on strain the allocator in every step but the first."""

    beyond: int
    freed: Peak = lambda size: 0
    per_sample: int = 12
    """Bytes of a sample in the steps that repeat; 12 in the first, and predicted."""
    budget: int = 2000

    def first(self, size: int) -> Measurement:
        peak = 100 + 12 * size
        fits = peak <= self.budget
        return Measurement(size, fits, peak if fits else None, overhead=1.1, makes_states=True)

    def again(self, size: int) -> Measurement:
        if size < self.beyond:
            return Measurement(size, True, 100 + self.per_sample * size, overhead=1.1)
        return Measurement(size, True, self.budget, overhead=1.1, retries=1, freed_bytes=int(self.freed(size)))

    def search(self) -> SizesRun:
        sizes = SizesRun(self.first, range(1, 400), self.budget, self.again, self.first)
        curve = CorrectedCurve(sizes, lambda size: 100.0 + 12 * size)
        run_search("predict", curve)
        return sizes


def test_steps_that_repeat_correct_the_curve_where_only_they_strain_the_allocator() -> None:
    """Where each answer that failed was forgotten, the first took a size for each from 158 down to 132."""
    sizes = Straining(beyond=132).search()
    assert sizes.largest == 131 and len(sizes.measurements) <= 12
    # Blocks that are kept take 3 more for each sample, as the allocator shows by what it gives back.
    known = Straining(beyond=127, freed=lambda size: 100 + 15 * size - 2000, per_sample=15).search()
    unknown = Straining(beyond=127, per_sample=15).search()
    assert known.largest == unknown.largest == 126
    assert len(known.measurements) < len(unknown.measurements) and len(known.measurements) <= 4
