"""Peak memory of a training step at any batch size, from the records of two.

Peak memory is not linear in the batch size b. It is the largest value of ``a_t + c_t * b`` over the operations t of the
step, because the optimizer's temporaries, or gradients late in the backward pass, set a floor at small b. With records
at b = 2 and b = 3, the difference of the bytes alive after operation t is c_t, and the whole curve follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adaptive_batching._probe.ledger import StepRecord

TRACED_SIZES = (2, 3)  # not 1: a batch of one takes other views and copies. One apart: a difference is a slope


class TraceError(RuntimeError):
    """Raised if the training step cannot be traced, or if its operations depend on the batch size."""


class PeakMemoryCurve:
    """Peak bytes of a training step as a function of the batch size b: ``max_t (a_t + c_t * b)``."""

    def __init__(self, lower: Sequence[int], upper: Sequence[int], *, kept_bytes: int = 0) -> None:
        """Build the curve from the bytes alive at the two traced sizes: before the step, then after every operation.

        Of the first of ``lower``, an earlier step has made ``kept_bytes``. Raise TraceError if the lengths differ.
        """
        if len(lower) != len(upper):
            small, large = TRACED_SIZES
            raise TraceError(f"the step has {len(lower)} operations at b={small} and {len(upper)} at b={large}")
        slopes_and_bases = {(high - low, _at(0, low, high)) for low, high in zip(lower, upper, strict=True)}
        self._lines: list[tuple[int, int]] = []  # those that no other is above at all sizes
        for slope, base in sorted(slopes_and_bases, reverse=True):
            if not self._lines or base > self._lines[-1][1]:
                self._lines.append((slope, base))
        self._resting_bytes = lower[0] - kept_bytes

    def peak_bytes(self, batch_size: int) -> int:
        return max(base + slope * batch_size for slope, base in self._lines)

    def largest_within(self, budget_bytes: int) -> int | None:
        """Return the largest batch size whose peak is at most ``budget_bytes``; 0 if none is, None if all are."""
        if self.peak_bytes(1) > budget_bytes:
            return 0
        return min(((budget_bytes - base) // slope for slope, base in self._lines if slope > 0), default=None)

    @property
    def resting_bytes(self) -> int:
        """Bytes alive before the first step: parameters, buffers and optimizer states."""
        return self._resting_bytes


class TracedStep:
    """A training step traced at two batch sizes, and what follows for every other."""

    def __init__(self, lower: StepRecord, upper: StepRecord) -> None:
        self.curve = PeakMemoryCurve(lower.log, upper.log, kept_bytes=lower.kept_bytes)
        self._lower, self._upper = lower, upper

    @property
    def is_uniform(self) -> bool:
        """True if storages are allocated and freed in one order at both sizes, so that there is one at any other."""
        lower, upper = self._lower, self._upper
        resting = lower.num_resting == upper.num_resting
        if not lower.kept_bytes:
            resting = lower.sizes[: lower.num_resting] == upper.sizes[: upper.num_resting]
        return resting and lower.events == upper.events and lower.kinds == upper.kinds

    def at(self, batch_size: int) -> StepRecord:
        """Return the record of the step at ``batch_size``; raise TraceError unless it :attr:`is_uniform`."""
        if not self.is_uniform:
            raise TraceError("the order in which memory is allocated and freed depends on the batch size")

        def scaled(lower: Sequence[int], upper: Sequence[int]) -> list[int]:
            return [_at(batch_size, low, high) for low, high in zip(lower, upper, strict=True)]

        lower, upper = self._lower, self._upper
        flops, recomputed, attention = scaled(_work(lower), _work(upper))
        log, sizes = scaled(lower.log, upper.log), scaled(lower.sizes, upper.sizes)
        scratch = {}
        for number, (at, low) in lower.scratch.items():
            high = upper.scratch[number][1]
            scratch[number] = at, low.between(high, batch_size - TRACED_SIZES[0], 1)
            sizes[number] = scratch[number][1].num_bytes
            log[at] += sizes[number] - _at(batch_size, low.in_line, high.in_line)
        return replace(
            lower,
            log=log,
            kept_bytes=log[0] - self.curve.resting_bytes,
            sizes=sizes,
            scratch=scratch,
            flops=flops,
            recomputed_flops=recomputed,
            attention_flops=attention,
        )


def _at(batch_size: int, low: int, high: int) -> int:
    """Return the value at ``batch_size`` on the line through those at the traced sizes."""
    return low + (high - low) * (batch_size - TRACED_SIZES[0])


def _work(record: StepRecord) -> tuple[int, int, int]:
    return record.flops, record.recomputed_flops, record.attention_flops
