"""Rows that do not depend on each other, such as those of an evaluation, in parts as large as fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from adaptive_batching._snapshot import StepState
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.runner import Outcome, StepRunner
from adaptive_batching._step.split import samples_within
from adaptive_batching._step.work import Part, Work

Result = TypeVar("Result")


class AutoBatcher(Work[range, Part, Sequence[Any]]):
    """Runs rows whose results do not depend on each other, and returns one result for each.

    A part that runs out of memory runs again in two, and those after it are no larger until many have run: no row is
    lost, and none counts twice. One that has fitted before first runs again as it was, and then with an eighth less.

    ``discard`` drops what a part leaves behind that broke off, and releases its memory if no ``device`` is given. A
    part has at most ``max_tokens`` and ``most`` rows. With ``has_fitted``, so many have been seen to fit. ``remedy`` is
    for a row that does not fit. What a forward on ``device`` changes of ``state`` is put back before rows run again.
    """

    what, noun = "them", "row"

    def __init__(
        self,
        max_tokens: int,
        discard: Callable[[], None] = lambda: None,
        *,
        most: int | None = None,
        has_fitted: bool = False,
        recovers: bool = True,
        remedy: str = "allow fewer tokens",
        device: torch.device | None = None,
        state: StepState | None = None,
    ) -> None:
        self.device, self.state = device, state
        self._max_tokens, self._most = max_tokens, most
        self._discard, self._remedy = discard, remedy
        self._runner = StepRunner(
            self, TokenLimit(), recovers=recovers, largest_that_ran=max_tokens if has_fitted else 0
        )

    @property
    def limit(self) -> TokenLimit:
        """The limit that was learned from running out of memory."""
        return self._runner.limit

    def run(self, lengths: Sequence[int], forward: Callable[[range], Sequence[Result]]) -> list[Result]:
        """Return what ``forward`` gives for each row, in their order; ``lengths`` are their tokens, the longest first.

        ``forward`` runs a range of the rows, each padded to the longest of them, and returns a result for each. If
        memory runs out and rows cannot run in smaller parts, raise DoesNotFitError.
        """
        self._lengths, self._forward = lengths, forward
        results: list[Result] = []
        try:
            while len(results) < len(lengths):
                self._runner.begin()
                self._runner.add(range(len(results), len(lengths)))
                [(part, answers)] = self._runner.end()
                assert len(answers) == len(part.samples), (len(answers), part)
                results += answers
        finally:
            del self._forward  # which may hold what it has computed
        return results

    def run_once(self, run: Callable[[], Result]) -> Outcome[Result]:
        """Run something as a whole, and drop what it leaves behind if it runs out of memory."""
        return self._runner.run_once([run])

    def split(self, groups: Sequence[range], max_tokens: int | None) -> Iterator[list[Part]]:
        """Yield one part of the rows that are left: as many as fit."""
        [rows] = groups
        length = self._lengths[rows.start]
        limits = [len(rows), samples_within(self._max_tokens, length), self._most]
        limits.append(None if max_tokens is None else max_tokens // length)
        part = rows[: max(min(limit for limit in limits if limit is not None), 1)]
        yield [Part(part, len(part) * length)]

    def runs(self, parts: Sequence[Part]) -> list[Callable[[], Sequence[Any]]]:
        return [partial(self._forward, range(part.samples[0], part.samples[-1] + 1)) for part in parts]

    def forget(self) -> None:
        self._discard()

    def length(self, sample: int) -> int:
        return self._lengths[sample]

    def shorter(self, part: Part) -> str:
        return f"; {self.less_memory()}"

    def less_memory(self) -> str:
        return self._remedy
