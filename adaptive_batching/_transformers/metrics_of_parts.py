"""TRL's metrics of a batch, joined from those of its parts: means over samples or tokens, and extremes."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._transformers.declared import counted_by_trl
from adaptive_batching._transformers.loss_kind import LossKind

_EXTREMES = {"min": min, "max": max}
_NAME_OF_EXTREME = re.compile(r"(?:^|[/_])(min|max)(?:$|[/_])")
_OVER_ANSWERS = {
    "logits/chosen": [0], "mean_token_accuracy": [0], "logits/rejected": [1], "entropy": [0, 1],
}  # fmt: skip
"""Means over the tokens of answers, of which the chosen ones (0) come first in a batch of pairs."""

Share = tuple[float, float]
"""A sum of values and that of their weights; for an extreme, it and 1."""


class TrlMetrics:
    """The metrics that a TRL trainer records in the parts of a step, from when this is made.

    It is False for other trainers.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        counted = counted_by_trl(trainer)
        self._before = {key: list(values) for key, values in counted["train"].items()} if "train" in counted else None
        self._tokens_before = 0 if self._before is None else trainer._total_train_tokens

    def __bool__(self) -> bool:
        return self._before is not None

    def become_those_of_the_step(
        self, batches: Sequence[Any], numbers: Sequence[float], kind: LossKind, ranks: Ranks
    ) -> None:
        """Make what parts have counted that of the step on all ranks, as one batch.

        TRL itself gathers in every forward, where a rank that ran out of memory would keep the others waiting.

        Args:
            batches: That have run as parts.
            numbers: Of the losses in each.
            kind: What the loss is.
            ranks: That train together.
        """
        before, trainer = self._before, self._trainer
        assert before is not None
        metrics = trainer._metrics["train"]
        new = {key: values[len(before.get(key, ())) :] for key, values in metrics.items() if key != "num_tokens"}
        ran = zip(batches, numbers, strict=True)
        counted = [(batch, number) for batch, number in ran if number or kind.takes_number]  # others count nothing
        tokens = trainer._total_train_tokens - self._tokens_before
        here = shares(new, counted)
        of_ranks, counts = zip(*ranks.gather((here, tokens)), strict=True)
        for key in here:
            value = metric_of(key, (of_rank[key] for of_rank in of_ranks if key in of_rank))
            metrics[key] = [*before.get(key, ()), value]
        trainer._total_train_tokens = self._tokens_before + sum(counts)
        metrics["num_tokens"] = [trainer._total_train_tokens]


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
