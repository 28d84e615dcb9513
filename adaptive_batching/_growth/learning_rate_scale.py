"""How the learning rate follows the global batch. Pure."""

from __future__ import annotations

import math


def learning_rate_scale(rule: str, optimizer: object, growth: float, at_most: float) -> float:
    """Return the factor of the learning rate where the global batch is ``growth`` times the configured one.

    Linear: Goyal et al. 2017, arXiv:1706.02677, for SGD. Sqrt: Malladi et al. 2022, arXiv:2205.10287, for optimizers
    that normalize gradients, such as Adam.
    """
    if rule == "auto":
        rule = "linear" if "sgd" in type(optimizer).__name__.lower() else "sqrt"
    return min({"none": 1.0, "linear": growth, "sqrt": math.sqrt(growth)}[rule], at_most)
