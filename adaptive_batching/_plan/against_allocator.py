"""How far plans were from what PyTorch's own allocator takes on the emulated device.

``benchmarks/plan_vs_allocator.py`` measures it again; its result file has every run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Agreement:
    """Runs that were planned and trained, and the largest errors of the plan, as shares of the real figures."""

    rows: int
    max_allocated_error: float
    max_reserved_error: float
    largest_batch_equal: float | None
    """Share of the largest batches that were planned right; None if none were sought."""

    def __str__(self) -> str:
        allocated, reserved = (
            f"{math.ceil(1000 * error) / 10:g} %" for error in (self.max_allocated_error, self.max_reserved_error)
        )
        return (
            f"in {self.rows} runs on PyTorch's own allocator, tensors were within {allocated} of the plan, and what it "
            f"reserves at least, no stream being late, within {reserved}"
        )


AGREEMENT = Agreement(45, 0.0007, 0.0177, 0.992)
