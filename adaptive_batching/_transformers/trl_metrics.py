"""The metrics that a TRL trainer logs: put back after checks, and joined over the parts of a batch."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adaptive_batching._ranks.agree import Ranks

_EXTREMES = {"min": min, "max": max}
_NAME_OF_EXTREME = re.compile(r"(?:^|[/_])(min|max)(?:$|[/_])")
_OVER_ANSWERS = {
    "logits/chosen": [0], "mean_token_accuracy": [0], "logits/rejected": [1], "entropy": [0, 1],
}  # fmt: skip
"""Means over the tokens of answers, of which the chosen ones (0) come first in a batch of pairs."""

Contribution = tuple[float, float]
"""A sum of values and that of their weights; for an extreme, it and 1."""


class TrlMetrics:
    """The metrics of a trainer of TRL: means over samples or tokens, and extremes, by mode and name."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._before: dict[str, list[float]] | None = None  # the step; None where nothing is counted in training
        self._tokens_before = 0

    # As a state that is put back

    @property
    def _counted(self) -> list[dict[str, Any]]:
        names = [name for name in ("_metrics", "_stored_metrics") if hasattr(self._trainer, name)]
        return [getattr(self._trainer, name) for name in names]

    def state_dict(self) -> dict[int, Any]:
        return {
            at: {mode: {name: list(values) for name, values in of_mode.items()} for mode, of_mode in counted.items()}
            for at, counted in enumerate(self._counted)
        }

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        for at, counted in enumerate(self._counted):
            for mode in [mode for mode in counted if mode not in state[at]]:
                del counted[mode]
            for mode, values in state[at].items():
                counted[mode].clear()
                counted[mode].update(values)

    # Of an evaluation

    @property
    def _by_mode(self) -> dict[str, dict[str, list[float]]]:
        return getattr(self._trainer, "_metrics", {})

    def lengths(self) -> dict[tuple[str, str], int]:
        """Return how many values there are so far, by mode and name."""
        return {(mode, key): len(values) for mode, each in self._by_mode.items() for key, values in each.items()}

    def join(self, before: Mapping[tuple[str, str], int], counted: Sequence[tuple[Any, float]]) -> None:
        """Make one value of those that parts have added, as TRL logs the mean over batches.

        Args:
            before: The :meth:`lengths` before the parts.
            counted: Batch and number of each part.
        """
        for mode, of_mode in self._by_mode.items():
            for key, values in of_mode.items():
                earlier = values[: before.get((mode, key), 0)]
                new = values[len(earlier) :]
                if len(new) == len(counted):
                    joined = [metric_of(key, [each]) for each in contributions({key: new}, counted).values()]
                    of_mode[key] = [*earlier, *joined]

    # Of a step

    def begin_step(self) -> None:
        """Take note of what there is before the parts of a step."""
        self._before = None
        if "train" in self._by_mode:
            self._before = {key: list(values) for key, values in self._by_mode["train"].items()}
            self._tokens_before = self._trainer._total_train_tokens

    def end_step(self, batches: Sequence[Any], counts: Sequence[float], ranks: Ranks, *, takes_number: bool) -> None:
        """Make what parts have counted since :meth:`begin_step` that of the step on all ranks, as one batch.

        TRL itself gathers in every forward, where a rank that ran out of memory would keep the others waiting.

        Args:
            batches: That have run as parts.
            counts: Of the losses in each.
            ranks: That train together.
            takes_number: True if the loss is a sum that is divided by a number which is given.
        """
        before, trainer = self._before, self._trainer
        if before is None:
            return
        metrics = trainer._metrics["train"]
        new = {key: values[len(before.get(key, ())) :] for key, values in metrics.items() if key != "num_tokens"}
        ran = zip(batches, counts, strict=True)
        counted = [(batch, number) for batch, number in ran if number or takes_number]  # others count nothing
        tokens = trainer._total_train_tokens - self._tokens_before
        here = contributions(new, counted)
        of_ranks, tokens_of_ranks = zip(*ranks.gather((here, tokens)), strict=True)
        for key in here:
            value = metric_of(key, (of_rank[key] for of_rank in of_ranks if key in of_rank))
            metrics[key] = [*before.get(key, ()), value]
        trainer._total_train_tokens = self._tokens_before + sum(tokens_of_ranks)
        metrics["num_tokens"] = [trainer._total_train_tokens]


def contributions(new: Mapping[str, Sequence[float]], counted: Sequence[tuple[Any, float]]) -> dict[str, Contribution]:
    """Return what parts contribute to each metric: ``new`` has a value of each, and ``counted`` its batch and number.

    The number is that of the losses that a part is the mean of.
    """
    return {key: _contribution(key, values, counted) for key, values in new.items() if values}


def metric_of(key: str, of_parts: Iterable[Contribution]) -> float:
    """Return the metric ``key`` from its contributions."""
    totals, weights = zip(*of_parts, strict=True)
    if (extreme := _extreme(key)) is not None:
        return float(extreme(totals))
    return math.fsum(totals) / math.fsum(weights)


def _contribution(key: str, values: Sequence[float], counted: Sequence[tuple[Any, float]]) -> Contribution:
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
