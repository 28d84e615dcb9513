"""Losses of groups of samples and of all of them together, which tell what a loss is a mean over.

Four groups run alone and together, in training mode, with weights that are slightly changed: with those as they are, a
policy may equal its reference, or all losses be the logarithm of the vocabulary, and much looks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from adaptive_batching._step.judge import WithoutChance, error_of_sum, perturbed

Sample = TypeVar("Sample")
Batch = TypeVar("Batch")
T = TypeVar("T")


def in_groups(samples: Sequence[Sample], kind_of: Callable[[Sample], Any], *, most: int = 7) -> list[list[Sample]]:
    """Return up to four groups of one to three of ``samples``, which come in the order of their preference.

    As many as possible differ in ``kind_of``: their length, their labels, and the number of these.
    """
    first_of_kind: dict[Any, Sample] = {}
    others: list[Sample] = []
    for sample in samples:
        kind = kind_of(sample)
        if kind in first_of_kind:
            others.append(sample)
        else:
            first_of_kind[kind] = sample
    chosen = [*first_of_kind.values(), *others][: min(most, len(samples), 7)]
    sizes = {0: [], 1: [1], 2: [1, 1], 3: [1, 2], 4: [1, 1, 2], 5: [1, 1, 1, 2], 6: [1, 1, 2, 2], 7: [1, 1, 2, 3]}
    groups, start = [], 0
    for size in sizes[len(chosen)]:
        groups.append(chosen[start : start + size])
        start += size
    return groups


@dataclass(frozen=True)
class Losses(Generic[T]):
    """Results of running groups of samples and their union, with slightly perturbed weights."""

    of_groups: list[T]
    of_union: T

    rounding: float
    """The error of a sum that rounding explains."""

    draws: set[str]
    """Functions that have drawn random numbers, by name, which explain any error (:attr:`WithoutChance.draws`)."""

    def error(self, sums: Callable[[T], Sequence[float]]) -> float:
        """Return the largest error of the sums that ``sums`` makes of what has been given."""
        columns = zip(*map(sums, self.of_groups), sums(self.of_union), strict=True)
        return max((error_of_sum(parts, whole) for *parts, whole in columns), default=0.0)


def losses_of_groups(
    groups: Sequence[list[Sample]],
    run: Callable[[list[Sample]], T],
    parameters: Sequence[nn.Parameter],
    start_over: Callable[[], None],
) -> Losses[T]:
    """Run each group of samples, and all of them together, from the same state.

    ``run`` returns numbers on the host, the loss first.
    """
    together = [sample for group in groups for sample in group]
    found = []
    with WithoutChance() as mode, torch.compiler.set_stance("force_eager"):
        for group in (*groups, together):
            start_over()
            with perturbed(parameters):
                found.append(without_gradients(run, group))
    return Losses(found[:-1], found[-1], mode.rounding[0], mode.draws)


def without_gradients(run: Callable[[Batch], T], samples: Batch) -> T:
    """Run a forward that keeps no activations, unless the loss takes gradients itself, such as a penalty on them."""
    try:
        with torch.no_grad():
            return run(samples)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    return run(samples)
