"""Functions that say how the batch grows; a config names them, as ``adaptive_batching.growth.step``."""

from adaptive_batching._growth.schedules import (
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
