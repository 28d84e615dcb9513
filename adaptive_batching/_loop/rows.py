"""Rows that do not depend on each other, such as those of an evaluation, in parts as large as fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from adaptive_batching._micro_batches.cut import Capacity
from adaptive_batching._micro_batches.limits import Attempts, TokenLimit
from adaptive_batching._micro_batches.run import run_micro_batches
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._ranks.agree import ALONE

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Rows:
    """Runs rows whose results do not depend on each other, and returns one result for each.

    A part that runs out of memory runs again in two, and those after it are no larger until many have run: no row is
    lost, and none counts twice. One that has fitted before first runs again as it was, and then with an eighth less.

    ``discard`` drops what a part leaves behind that broke off, and really releases its memory. A part has at most
    ``most`` rows, however short they are. With ``has_fitted``, the capacity has been seen to fit. ``remedy`` says what
    to do where a single row does not fit.
    """

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
        self._capacity = capacity
        self._discard = discard
        self._most = most
        self._recovers = recovers
        self._remedy = remedy
        self._limit = TokenLimit()
        self._attempts = Attempts(self._limit, capacity.tokens if has_fitted else 0)

    @property
    def num_recoveries(self) -> int:
        return self._limit.num_recoveries

    def run(self, lengths: Sequence[int], forward: Callable[[range], Sequence[Result]]) -> list[Result]:
        """Return what ``forward`` gives for each row, in their order; ``lengths`` are their tokens, the longest first.

        ``forward`` runs a range of the rows, each padded to the longest of them, and returns a result for each. If
        memory runs out and rows cannot run in smaller parts, raise DoesNotFitError.
        """
        results: list[Result] = []
        while len(results) < len(lengths):
            self._attempts.start_step()
            results += self._run_part(len(results), lengths, forward)
        return results

    def _run_part(
        self, start: int, lengths: Sequence[int], forward: Callable[[range], Sequence[Result]]
    ) -> Sequence[Result]:
        while True:
            part = range(start, min(start + self._rows_of(lengths[start]), len(lengths)))
            outcome = run_micro_batches([partial(forward, part)], ALONE, None, self._discard)
            if not outcome.failed:
                break
            assert outcome.error is not None
            self._prepare_to_run_again(len(part), lengths[start], outcome.error)
        self._attempts.note(len(part) * lengths[start])
        self._attempts.end_step()
        if self._attempts.failures == 0:
            self._limit.note_clean_step()
        [results] = outcome.results
        assert len(results) == len(part), (len(results), part)
        return results

    def _rows_of(self, length: int) -> int:
        """Return how many rows of up to ``length`` tokens the next part has."""
        limits = [self._capacity.samples(length), self._most]
        limits.append(None if self._limit.max_tokens is None else self._limit.max_tokens // length)
        return max(min(limit for limit in limits if limit is not None), 1)

    def _prepare_to_run_again(self, rows: int, length: int, error: Exception) -> None:
        fitted_before = self._attempts.has_fitted(rows * length)
        what = f"out of memory with {rows} row{'s' if rows > 1 else ''} of up to {length} tokens"
        if not self._recovers:
            raise DoesNotFitError(f"{what}; set adaptive_batching.recover_from_oom=True") from error
        if rows == 1 and not (fitted_before and self._attempts.failures == 0):
            raise DoesNotFitError(f"{what}, which cannot be cut; {self._remedy}") from error
        as_they_were = self._attempts.fail(rows * length, fitted_before=fitted_before, can_be_cut=rows > 1)
        how = "as they were" if as_they_were else f"with at most {self._rows_of(length)} of them at once"
        log.warning("%s; running them again %s (recovery number %d)", what, how, self.num_recoveries)
