"""Memory that a traced step takes at any batch size, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from adaptive_batching._plan.devices import Outside
from adaptive_batching._plan.verdict import Verdict, judge
from adaptive_batching._trace.reserved import NO_SET_UP, Reserved, SetUp, reserved_by_default, reserved_for
from adaptive_batching._trace.traced_step import KINDS, OTHER, WEIGHTS, TracedStep

SET_UP = "set-up"
"""The moment before the first step, while weights are loaded."""


@dataclass(frozen=True)
class Need:
    """Memory and work of a step at one batch size."""

    batch_size: int
    peak_bytes: int
    """Of tensors."""

    resting_bytes: int
    """Of tensors, between steps."""

    moment: str
    """Part of the step that the peak falls into, or :data:`SET_UP`."""

    kinds: dict[str, int]
    """Bytes of each kind at the peak."""

    reserved: Reserved
    flops: int
    """Of a forward and backward, and an optimizer step."""

    recomputed_flops: int
    """Part of ``flops`` for activations that are computed again."""

    attention_flops: int
    """Part of ``flops`` that grows with the square of the length."""


@dataclass(frozen=True)
class Forecast:
    """A step at any batch size; methods raise TraceError if the order of allocations depends on the batch size."""

    step: TracedStep
    outside: Sequence[Outside]
    set_up: SetUp = NO_SET_UP
    forwards: int = 1
    """Forwards that the step has, each with its backward; floating-point operations are told of one."""

    def need(self, batch_size: int) -> Need:
        record = self.step.at(batch_size)
        peak, (moment, kinds) = max(record.log), record.at_peak()
        reserved = reserved_for(record, self.set_up)
        if self.set_up.most_bytes > peak:
            resting = zip(record.kinds[: record.num_resting], record.sizes, strict=False)
            weights = sum(size for kind, size in resting if kind == WEIGHTS)
            peak, moment = self.set_up.most_bytes, SET_UP
            kinds = {**dict.fromkeys(KINDS, 0), WEIGHTS: weights, OTHER: peak - weights}
        reserved = Reserved(**{name: max(size, self.set_up.most_bytes) for name, size in asdict(reserved).items()})
        return Need(
            batch_size, peak, record.log[0], moment, kinds, reserved, record.flops // self.forwards,
            record.recomputed_flops // self.forwards, record.attention_flops // self.forwards,
        )  # fmt: skip

    def most_bytes(self, batch_size: int) -> int:
        """Return what a step takes at ``batch_size`` by default settings, with the most outside the allocator."""
        return self._reserved(batch_size) + sum(each.most for each in self.outside)

    def judge(self, need: Need, memory_bytes: int | None) -> Verdict:
        return judge(need.reserved, self.outside, memory_bytes)

    def largest(self, memory_bytes: int) -> int:
        """Return the largest batch size that fits with all that the allocator reserves by default; 0 if none does."""
        budget = memory_bytes - sum(each.most for each in self.outside)
        if self.set_up.most_bytes > budget:
            return 0
        high = self.step.curve.largest_within(budget)  # a lower bound of what is reserved
        if not high or self._reserved(high) <= budget:
            return high or 0
        low, above = 0, high
        guess = self.step.curve.largest_within(budget * self.step.curve.peak_bytes(high) // self._reserved(high)) or 0
        while above - low > 1:
            middle = guess if low < guess < above else (low + above) // 2
            guess = 0 if middle == guess else guess
            if self._reserved(middle) <= budget:
                low, guess = middle, middle + 1
            else:
                above = middle
        # As blocks are rounded, a size can fit where the one below it does not.
        while larger := [n for n in (low + 1, low + 2) if n < high and self._reserved(n) <= budget]:
            low = max(larger)
        return low

    def _reserved(self, batch_size: int) -> int:
        return reserved_by_default(self.step.at(batch_size), self.set_up)
