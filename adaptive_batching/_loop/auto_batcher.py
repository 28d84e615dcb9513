"""Rows that do not depend on each other, such as those of an evaluation, in parts as large as fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from adaptive_batching._step.failed_part import FailedPart, Words
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._step.work import Part, Work

Result = TypeVar("Result")


class AutoBatcher(Work[range, Part, Sequence[Any]]):
    """Runs rows whose results do not depend on each other, and returns one result for each.

    A part that runs out of memory runs again in two, and those after it are no larger until many have run: no row is
    lost, and none counts twice. One of a size that has run before first runs again as it was, and then with an eighth
    less.

    ``remedy`` is for a row that does not fit. What a forward on ``device`` changes of ``state`` is put back before rows
    run again.
    """

    def __init__(self, device: torch.device, *, remedy: str) -> None:
        self.device, self.limit = device, TokenLimit()
        self._words = Words(remedy, noun="row", everything="them")
        self._runner = StepRunner(self)

    def run(self, lengths: Sequence[int], forward: Callable[[range], Sequence[Result]]) -> list[Result]:
        """Return what ``forward`` gives for each row, in their order; ``lengths`` are their tokens, the longest first.

        ``forward`` runs a range of the rows, each padded to the longest of them, and returns a result for each. If
        memory runs out and rows cannot run in smaller parts, raise DoesNotFitError.
        """
        self._lengths, self._forward = lengths, forward
        results: list[Result] = []
        try:
            while len(results) < len(lengths):
                [(part, answers)] = self._runner.step(range(len(results), len(lengths)))
                assert len(answers) == len(part.samples), (len(answers), part)
                results += answers
        finally:
            del self._forward  # which may hold what it has computed
        return results

    def split(self, samples: range) -> Iterator[list[Part]]:
        """Yield one part of the rows that are left: as many as fit."""
        length = self._lengths[samples.start]
        part = samples[: self.limit.samples(length, len(samples))]
        yield [Part(part, len(part) * length, longest=length)]

    def runs(self, parts: Sequence[Part]) -> list[Callable[[], Sequence[Any]]]:
        return [partial(self._forward, range(part.samples[0], part.samples[-1] + 1)) for part in parts]

    def length(self, sample: int) -> int:
        return self._lengths[sample]

    def words(self) -> Words:
        return self._words

    def failed(self, part: Part) -> FailedPart:
        return replace(super().failed(part), shorten="")  # the remedy says how
