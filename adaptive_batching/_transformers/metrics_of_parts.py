"""TRL's metrics of a batch, joined from those of its parts: means over samples or tokens, and extremes."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_EXTREMES = {"min": min, "max": max}
_NAME_OF_EXTREME = re.compile(r"(?:^|[/_])(min|max)(?:$|[/_])")
_OVER_ANSWERS = {
    "logits/chosen": [0], "mean_token_accuracy": [0], "logits/rejected": [1], "entropy": [0, 1],
}  # fmt: skip
"""Means over the tokens of answers, of which the chosen ones (0) come first in a batch of pairs."""

Share = tuple[float, float]
"""A sum of values and that of their weights; for an extreme, it and 1."""


def shares(new: Mapping[str, Sequence[float]], counted: Sequence[tuple[Any, float]]) -> dict[str, Share]:
    """Return what parts contribute to each metric: ``new`` has a value of each, and ``counted`` its batch and number.

    The number is that of the losses that a part is the mean of.
    """
    return {key: _share(key, values, counted) for key, values in new.items() if values}


def metric_of(key: str, of_parts: Iterable[Share]) -> float:
    """Return the metric ``key`` from its shares."""
    totals, weights = zip(*of_parts, strict=True)
    if (extreme := _extreme(key)) is not None:
        return float(extreme(totals))
    return math.fsum(totals) / math.fsum(weights)


def _share(key: str, values: Sequence[float], counted: Sequence[tuple[Any, float]]) -> Share:
    if (extreme := _extreme(key)) is not None:
        return float(extreme(values)), 1.0
    weights = [_weight(key, batch, number) for batch, number in counted]
    if len(values) != len(weights) or not any(weights):
        weights = [1.0] * len(values)
    return math.fsum(map(operator.mul, values, weights)), math.fsum(weights)


def _extreme(key: str) -> Any:
    found = _NAME_OF_EXTREME.search(key)
    return None if found is None else _EXTREMES[found[1]]


def _weight(key: str, batch: Any, number: float) -> float:
    if key in _OVER_ANSWERS and "completion_mask" in batch and "labels" not in batch:
        answers = batch["completion_mask"][..., 1:].chunk(2)
        return float(sum(answers[which].sum() for which in _OVER_ANSWERS[key]))
    return number
