"""Tokens a second, hours and cost of a run, from the seconds of a step, and how far to trust them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from adaptive_batching._dry_run.time.seconds import LIMITS, StepSeconds
from adaptive_batching._dry_run.time.step_work import Operation, StepWork

ONE_DEVICE, SEVERAL, FOUR_BITS, CONVOLUTIONS, SMALL = (
    "one device", "several devices", "4-bit weights", "convolutions", "limited by the host",
)  # fmt: skip
UNCOUNTED = ("linalg_", "_linalg_", "lu_", "cholesky", "triangular_solve", "_fft_", "_cudnn_rnn", "_cudnn_ctc")
"""Beginnings of names of operations of which only the bytes are counted, and which take longer."""
_DEQUANTIZES = ("dequantize", "nf4")


ELSEWHERE = 0.375
"""The same of a card that no run was on: what was predicted for programs on an H200, before any had run there, was so
far off at most, of 13 that were not waiting for the host (`benchmarks/results/on_a_card_forecast_before.json`)."""


@dataclass(frozen=True)
class Accuracy:
    """Of runs of one kind: how far their published seconds are from those that are predicted."""

    rows: int
    nine_in_ten: float
    """The error, as a share, that the next run of the kind stays within nine times in ten; of fewer than nine rows the
    largest error."""

    cards: tuple[str, ...]
    """The names of the cards that were used, in alphabetical order."""

    measured: Mapping[str, float] = field(default_factory=dict)
    """The same error on other cards, of programs that `benchmarks/on_a_card.py` ran there."""

    def knows(self, card: str) -> bool:
        return card in self.cards or card in self.measured

    def share_on(self, card: str) -> float:
        """Return the error, as a share, that the next run on a card stays within nine times in ten."""
        if card in self.cards:
            return self.nine_in_ten
        return max(self.nine_in_ten, self.measured.get(card, ELSEWHERE))


AGAINST_PUBLISHED = {
    ONE_DEVICE: Accuracy(
        66, 0.122, ("A100-40GB", "A100-80GB", "L40S", "RTX 4070 Ti Super", "RTX 4090"),
        measured={"H100": 0.203, "H200": 0.203},  # few ran on the H100, within 6 %; the processor is the same
    ),
    SEVERAL: Accuracy(19, 0.118, ("A100-40GB", "A100-80GB", "H100 HBM2e")),
    FOUR_BITS: Accuracy(8, 0.085, ("A100-80GB",)),
    CONVOLUTIONS: Accuracy(4, 0.244, ("RTX 3090",)),
}  # fmt: skip
"""By kind of run; `benchmarks/dry_run.py` measures again. Convolutions are of torch 1.12, others of 2.4 and later."""


@dataclass(frozen=True)
class RunLength:
    """How much is to be trained; at most one of the first three is given."""

    epochs: float | None = None
    steps: int | None = None
    tokens: float | None = None
    price: float | None = None
    """Of an hour of one GPU, in any currency."""


NO_LENGTH = RunLength()


@dataclass(frozen=True)
class Forecast:
    """Time and throughput of a step on all devices together."""

    step: StepSeconds
    card: str
    """The card's name."""

    kind: str
    devices: int
    samples: int
    tokens: int
    """Padding included; 0 if inputs are not tokens."""

    steps_in_epoch: float | None = None
    on_slow_host: float = 0.0
    """Seconds of a step where the host is as slow as one that was measured; 0 where its speed is known."""

    uncounted: Mapping[str, int] = field(default_factory=dict)
    """Operations that take longer than is counted, and how often they run."""

    @property
    def accuracy(self) -> Accuracy | None:
        """The accuracy of such runs; None if none was published."""
        return AGAINST_PUBLISHED.get(self.kind)

    @property
    def between(self) -> tuple[float, float] | None:
        """Seconds of a step between which nine in ten such runs lie; None if none was published."""
        if self.accuracy is None:
            return None
        share = self.accuracy.share_on(self.card)
        return self.step.seconds / (1 + share), self.step.seconds / (1 - share)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step.seconds

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.step.seconds

    def hours(self, length: RunLength) -> float | None:
        """Return the hours of a whole run; None if its length is not known."""
        steps: float | None = length.steps
        if length.tokens is not None and self.tokens:
            steps = length.tokens / self.tokens
        if length.epochs is not None and self.steps_in_epoch is not None:
            steps = length.epochs * self.steps_in_epoch
        return None if steps is None else steps * self.step.seconds / 3600

    def cost(self, length: RunLength) -> float | None:
        hours = self.hours(length)
        return None if hours is None or length.price is None else hours * self.devices * length.price

    def shares(self) -> list[tuple[str, float]]:
        """Return what limits the step, with the share of its seconds, the largest first; what is nothing left out."""
        shares = [(LIMITS[name], seconds / self.step.seconds) for name, seconds in self.step.limits.items()]
        return sorted(((name, share) for name, share in shares if share >= 0.005), key=lambda one: -one[1])


def kind_of(work: StepWork, step: StepSeconds, ranks: int) -> str:
    """Return the kind of a run, by whose published rows its accuracy is known."""
    flops = {"convolution": 0.0, "product": 0.0}
    for number in work.order:
        one = work.operations[number]
        if one.kind in flops:
            flops[one.kind] += one.flops
    if flops["convolution"] > flops["product"]:
        return CONVOLUTIONS
    if ranks > 1:
        return SEVERAL
    if any(_is_dequantizing(one) for one in work.operations):
        return FOUR_BITS
    return SMALL if step.limit == "host" else ONE_DEVICE


def uncounted_in(work: StepWork) -> dict[str, int]:
    """Return the operations that take longer than is counted, with how often they run."""
    names = Counter(work.operations[number].name for number in work.order)
    return {name: times for name, times in names.items() if name.startswith(UNCOUNTED) and "norm" not in name}


def _is_dequantizing(one: Operation) -> bool:
    return any(part in one.name for part in _DEQUANTIZES)


def cheapest_and_fastest(
    forecasts: Sequence[Forecast | None], lengths: Sequence[RunLength]
) -> tuple[int | None, int | None]:
    """Return the numbers of the forecasts that cost and that take least, of those that are there.

    A step may have more tokens on a larger card. Where the length of a run is not given in epochs or tokens, what
    counts is therefore the time for as many tokens, or for as many samples where there are no tokens.
    """
    there = {n: (one, lengths[n]) for n, one in enumerate(forecasts) if one is not None}
    hours = {n: None if length.steps else one.hours(length) for n, (one, length) in there.items()}
    amounts = dict.fromkeys(there, 1)
    for unit in ("samples", "tokens"):
        if all(getattr(one, unit) for one, _ in there.values()):
            amounts = {n: getattr(one, unit) for n, (one, _) in there.items()}
    by_amount = {n: one.step.seconds / amounts[n] for n, (one, _) in there.items()}
    took = {n: of_run or by_amount[n] for n, of_run in hours.items()} if all(hours.values()) else by_amount
    costs = {n: took[n] * one.devices * length.price for n, (one, length) in there.items() if length.price is not None}
    return min(costs, key=lambda n: costs[n], default=None), min(took, key=lambda n: took[n], default=None)


def in_seconds(seconds: float) -> str:
    """Write seconds with three digits, in the unit that people read."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
