"""A batch of equal parts, each of which has a backward pass of its own: what a probe of one is asked. Pure.

The probe finds the largest part, and a batch has as many parts as configured, however large they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from adaptive_batching._growth.controller import FixedAccumulation
from adaptive_batching._probe.sizing import Sizes, Sizing


@dataclass(frozen=True)
class InParts(FixedAccumulation):
    """Every optimizer step takes ``batches`` batches, each a multiple of ``parts``."""

    parts: int = 1

    @property
    def least(self) -> int:
        return self.parts

    def allowed(self, batch_size: int) -> int:
        return batch_size // self.parts * self.parts

    @property
    def why_not(self) -> str:
        return f"is no multiple of the {self.parts} parts of a batch"


def sizing_of_part(sizing: Sizing, parts: int, *, run_samples: int, holds_gradients: bool) -> Sizing:
    """Return what is asked of a probe of one of the equal ``parts`` of a batch; its sizes are those of a part.

    Args:
        sizing: What would be asked if a batch were one part.
        parts: Of a batch.
        run_samples: Samples after which the run ends, be it within an epoch.
        holds_gradients: True if a forward runs while gradients are held for another reason than those of the settings.
    """
    request, upper, reason = sizing.request, sizing.request.upper, sizing.request.upper_reason
    if sizing.settings.resizes and run_samples < upper:
        upper, reason = run_samples, f"the {run_samples} samples of the run"
    request = replace(
        request, upper=upper // parts, upper_reason=reason,
        include=None if request.include is None else min(request.include, upper) // parts,
        in_parts=request.in_parts or holds_gradients,
    )  # fmt: skip
    return replace(sizing, request=request, batch_size=sizing.batch_size // parts)


def sizes_of_batch(sizes: Sizes, parts: int) -> Sizes:
    """Return the sizes of a batch from those of one of its equal ``parts``."""
    return replace(sizes, batch_size=sizes.batch_size * parts, maximum=sizes.maximum * parts)
