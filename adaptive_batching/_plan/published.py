"""Peaks that torchtune's README and pull requests publish of GPUs, and what was planned for the same runs.

``benchmarks/published_memory.py`` plans them again, and says where each comes from; its result file has the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_GB_IN_GIB = 10**9 / 2**30  # torchtune logged GB until pull request 1348


@dataclass(frozen=True)
class Peak:
    """A published peak of tensors."""

    name: str
    published_gib: float
    planned_gib: float

    @property
    def error(self) -> float:
        """Share of the published peak by which the planned one is larger."""
        return self.planned_gib / self.published_gib - 1


PEAKS = (
    Peak("full, packed", 60.0, 59.94),
    Peak("and compiled", 51.0, 51.08),
    Peak("and chunked cross entropy", 42.9, 43.0),
    Peak("and activation checkpointing", 24.9, 24.88),
    Peak("and optimizer in the backward pass", 23.1, 23.18),
    Peak("and activation offloading", 21.8, 21.87),
    Peak("and 8-bit AdamW", 17.6, 15.98),
    Peak("LoRA", 8.5, 8.89),
    Peak("QLoRA", 4.6, 5.0),
    Peak("8B full, low memory, RTX 4090", 18.9, 19.08),
    Peak("8B LoRA, RTX 4090", 16.2, 16.23),
    Peak("8B LoRA, RTX A6000", 30.3, 30.25),
    Peak("8B QLoRA, RTX 4090", 7.4, 7.81),
    Peak("70B full, 8 A100, CPU offload", 13.9, 13.94),
    Peak("70B LoRA, 8 A100", 27.6, 30.22),
    Peak("Llama 2 7B full, low memory", 20.2 * _GB_IN_GIB, 18.77),
    Peak("Llama 2 7B LoRA, RTX 4090", 21.3 * _GB_IN_GIB, 18.67),
)


@dataclass(frozen=True)
class Band:
    """How far planned peaks were from published ones."""

    peaks: int
    half_within: float
    all_within: float

    def __str__(self) -> str:
        half, whole = (math.ceil(100 * error) for error in (self.half_within, self.all_within))
        return f"of {self.peaks} published peaks, half were within {half} %, all within {whole} %"


def error_band(peaks: Sequence[Peak] = PEAKS) -> Band:
    errors = [abs(peak.error) for peak in peaks]
    return Band(len(errors), round(statistics.median(errors), 3), round(max(errors), 3))
