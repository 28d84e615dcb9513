"""Attention within samples that lie end to end in one row, for models and loops of your own."""

from adaptive_batching._attention import SampleBounds, attend_within_samples

__all__ = ["SampleBounds", "attend_within_samples"]
