"""What a host computes in a step, so that :class:`~adaptive_batching._step.runner.StepRunner` can run it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from adaptive_batching._memory.caching_allocator import RETRIES, counted
from adaptive_batching._state import State
from adaptive_batching._step.failed_part import FailedPart, Words
from adaptive_batching._step.limits import TokenLimit

Samples = TypeVar("Samples")


@dataclass(frozen=True)
class Part:
    """Samples of one forward and backward."""

    samples: Sequence[Any]
    tokens: int  # that the forward computes, padding included; where samples have no length, their number
    weight: float | None = None  # in the gradient, as the host counts it; None for that of its samples
    longest: int = 0  # tokens of its longest sample; 0 where samples have no length

    @property
    def is_filler(self) -> bool:
        """True for a part that adds nothing and only gives this rank as many forwards as others."""
        return self.weight == 0


def in_halves(samples: Sequence[Any]) -> list[list[Any]]:
    """Return every other sample and the rest, or the one that there is: parts of a step that has one."""
    return [half for half in ([*samples[::2]], [*samples[1::2]]) if half]


P = TypeVar("P", bound=Part)
R = TypeVar("R")


class Work(ABC, Generic[Samples, P, R]):
    """A host's computation, such as that of a recipe's step: its parts, and what runs them.

    It retries nothing, and neither tells other ranks of a failure nor asks them for one. What it is given at once, such
    as a batch, are ``Samples``; they run as parts ``P``, each of which has a result ``R``.
    """

    device: torch.device | None = None
    """Where parts run; None if the host releases memory itself, in :meth:`forget`."""

    limit: TokenLimit
    """The limit on the tokens of a part, which :meth:`split` keeps to."""

    state: State | None = None
    """State that a forward pass changes besides gradients, and that is put back; None if there is none."""

    rearranges = False
    """True if a single part is another computation than the batch that it is made of, and may be compared with it."""

    # How it computes; what a runner is handed ready to run needs neither split nor runs

    def split(self, samples: Samples) -> Iterable[Sequence[P]]:
        """Yield parts of ``samples`` that are expected to fit, all of those that run in one go together.

        The runner comes for the next when these have run. No part has more tokens than :attr:`limit` allows, other than
        a single sample.
        """
        raise NotImplementedError

    def runs(self, parts: Sequence[P]) -> Sequence[Callable[[], R]]:
        """Return what runs each of the parts: collate, forward and backward."""
        raise NotImplementedError

    def filler(self) -> P:
        """Return a part without weight, for a rank that has fewer than others."""
        raise NotImplementedError

    def may_differ(self, parts: Sequence[P]) -> bool:
        """Return True if other ranks, which answer alike, may have another number of parts."""
        return True

    def compared(self, parts: Sequence[P]) -> list[list[Any]]:
        """Return the samples of parts that an audit may compare with their union, in lists that run apart."""
        return [list(part.samples) for part in parts if not part.is_filler]

    def as_batch(self, lists: Sequence[list[Any]]) -> Sequence[P]:
        """Return lists of samples as parts that are weighted as those of a batch of their own.

        A single list runs as the host would run it without us.
        """
        raise NotImplementedError

    def number(self, results: Sequence[R]) -> float:
        """Return the number of losses in results, which has to add up as well; 0 where nothing is divided by it."""
        return 0.0

    def tokens(self, samples: list[Any]) -> int:
        """Return the tokens of samples that run together, with padding."""
        raise NotImplementedError

    def tokens_in_one(self, samples: list[Any]) -> int:
        """Return the tokens of samples as an audit runs them together."""
        return self.tokens(samples)

    def extent(self, sample: Any) -> int:
        """Return a sample's size for padding: those of equal extent need none where they run together."""
        return self.length(sample) or 0

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return all whose gradients are dropped if a part runs out of memory."""
        return ()

    def forget(self) -> None:
        """Drop what a part that broke off has left behind, besides gradients."""

    def put_back(self) -> None:
        """Restore what parts have changed besides gradients, random numbers and ``state``, before they run again."""

    def num_retries(self) -> int:
        """Return how often this rank's allocator has had to empty its cache to find room."""
        return 0 if self.device is None else counted(self.device, RETRIES)

    def batch_dependent_module(self) -> str | None:
        """Name what is known to compute over the batch, so that parts do not add up to it; None if nothing is."""
        return None

    # What messages say

    @abstractmethod
    def length(self, sample: Any) -> int | None:
        """Return the tokens of a sample; None if samples have no length."""

    @abstractmethod
    def words(self) -> Words:
        """Return how messages name samples, and what they say helps."""

    def failed(self, part: P) -> FailedPart:
        """Return what is known of a part that ran out of memory."""
        unit = "padded tokens" if part.longest else "samples"
        return FailedPart(part.tokens, len(part.samples), part.longest or None, unit)
