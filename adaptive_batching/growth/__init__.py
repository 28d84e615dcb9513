"""Growth of the batch while training: increase functions, who asks them, and the course of a run.

The functions below are those that a config names, as ``adaptive_batching.growth.step``.
"""

from adaptive_batching.growth.schedules import (
    constant,
    cosine,
    fixed_increase,
    goodput,
    gradient_noise_scale,
    late_switch,
    linear,
    multistep,
    norm_test,
    on_plateau,
    polynomial,
    replace_lr_decay,
    staged,
    step,
)

__all__ = [
    "constant",
    "cosine",
    "fixed_increase",
    "goodput",
    "gradient_noise_scale",
    "late_switch",
    "linear",
    "multistep",
    "norm_test",
    "on_plateau",
    "polynomial",
    "replace_lr_decay",
    "staged",
    "step",
]
