"""Rows that do not depend on each other, such as those of an evaluation, in parts as large as fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from adaptive_batching._ranks.agree import ALONE
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.retry import Retry
from adaptive_batching._step.run import Outcome, run_micro_batches
from adaptive_batching._step.split import Capacity

Result = TypeVar("Result")


class AutoBatcher(Retry[range]):
    """Runs rows whose results do not depend on each other, and returns one result for each.

    A part that runs out of memory runs again in two, and those after it are no larger until many have run: no row is
    lost, and none counts twice. One that has fitted before first runs again as it was, and then with an eighth less.

    ``discard`` drops what a part leaves behind that broke off, and really releases its memory. A part has at most
    ``most`` rows. With ``has_fitted``, the capacity has been seen to fit. ``remedy`` is for a row that does not fit.
    """

    what = "them"

    def __init__(
        self,
        capacity: Capacity,
        discard: Callable[[], None],
        *,
        most: int | None = None,
        has_fitted: bool = False,
        recovers: bool = True,
        remedy: str = "allow fewer tokens",
    ) -> None:
        super().__init__(TokenLimit(), enabled=recovers, largest_that_ran=capacity.tokens if has_fitted else 0)
        self._capacity = capacity
        self._discard = discard
        self._most = most
        self._remedy = remedy

    def run(self, lengths: Sequence[int], forward: Callable[[range], Sequence[Result]]) -> list[Result]:
        """Return what ``forward`` gives for each row, in their order; ``lengths`` are their tokens, the longest first.

        ``forward`` runs a range of the rows, each padded to the longest of them, and returns a result for each. If
        memory runs out and rows cannot run in smaller parts, raise DoesNotFitError.
        """
        self._lengths = lengths
        results: list[Result] = []

        def attempt(again: bool) -> list[tuple[list[range], Outcome[Sequence[Result]]]]:
            start, length = len(results), lengths[len(results)]
            limits = [len(lengths) - start, self._capacity.samples(length), self._most]
            limits.append(None if self.limit.max_tokens is None else self.limit.max_tokens // length)
            part = range(start, start + max(min(limit for limit in limits if limit is not None), 1))
            return [([part], run_micro_batches([partial(forward, part)], ALONE, None, self._discard))]

        while len(results) < len(lengths):
            self.start()
            [([part], outcome)] = self.run_until_fits(attempt)
            self.end_step()
            [found] = outcome.results
            assert len(found) == len(part), (len(found), part)
            results += found
        return results

    def size(self, part: range) -> tuple[int, int]:
        return len(part), len(part) * self._lengths[part.start]

    def describe(self, part: range) -> str:
        return f"{len(part)} row{'s' if len(part) > 1 else ''} of up to {self._lengths[part.start]} tokens"

    def shorter(self, part: range) -> str:
        return f"; {self.less_memory()}"

    def less_memory(self) -> str:
        return self._remedy

    def why_never(self, part: range) -> str | None:
        if self._enabled:
            return None
        return f"out of memory with {self.describe(part)}; set adaptive_batching.recover_from_oom=True"
