"""Limit on the size of a micro-batch, learned from running out of memory, and how a step runs again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

# The allocator may have to start over when sizes change, and once more to settle; doing so step after step makes
# training crawl.
_RETRIES_IN_ROW_TO_SHRINK = 3


class TokenLimit:
    """Limit on the padded tokens of a micro-batch, learned from running out of memory.

    There is no limit until a micro-batch runs out of memory. Each time one does, the limit falls to half of that
    micro-batch. After ``steps_to_recover`` clean steps the limit doubles, but never to a size that has failed twice;
    once beyond what failed, it is lifted. Each failure after the first doubles the number of clean steps required, so
    that a run of any length has few failures.
    """

    def __init__(self, steps_to_recover: int = 50) -> None:
        self.max_tokens: int | None = None
        self.num_recoveries = 0
        self.largest_that_ran = 0
        """Padded tokens of the largest micro-batch known to fit."""

        self._steps_to_recover = steps_to_recover
        self._clean_steps = 0
        self._failed: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "num_recoveries": self.num_recoveries,
            "clean_steps": self._clean_steps,
            "steps_to_recover": self._steps_to_recover,
            "failed": self._failed,
            "largest_that_ran": self.largest_that_ran,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.max_tokens, self.num_recoveries = state["max_tokens"], state["num_recoveries"]
        self._clean_steps, self._failed = state["clean_steps"], list(state["failed"])
        self._steps_to_recover = state["steps_to_recover"]
        self.largest_that_ran = state.get("largest_that_ran", 0)

    def note(self, tokens: int) -> None:
        self.largest_that_ran = max(self.largest_that_ran, tokens)

    def keep(self) -> None:
        """Record that a micro-batch ran out of memory and will run again unchanged."""
        self.num_recoveries += 1

    def shrink(self, tokens: int, *, fitted_before: bool = False) -> None:
        """Lower the limit after ``tokens`` ran out of memory: to half, or an eighth less if as many fitted before."""
        self.num_recoveries += 1
        if fitted_before:
            self.lower(tokens)
        else:
            self._fall_to(tokens // 2, tokens)

    def lower(self, tokens: int) -> None:
        """Lower the limit to an eighth less than ``tokens`` padded tokens, which fitted only at the price of time."""
        self._fall_to(tokens - max(tokens // 8, 1), tokens)

    def _fall_to(self, max_tokens: int, failed: int) -> None:
        if self._failed:
            self._steps_to_recover *= 2
        self._failed.append(failed)
        self._clean_steps = 0
        self.max_tokens = max(max_tokens, 1)

    def note_clean_step(self) -> None:
        if self.max_tokens is None:
            return
        self._clean_steps += 1
        if self._clean_steps < self._steps_to_recover:
            return
        self._clean_steps = 0
        wanted = 2 * self.max_tokens
        if len(self._failed) > 1:
            wanted = min(wanted, sorted(self._failed)[1] - 1)
        elif self.max_tokens >= max(self._failed, default=0):  # the size that failed has had its second chance
            log.info("limit on padded tokens per micro-batch lifted, was %d", self.max_tokens)
            self.max_tokens = None
            return
        if wanted > self.max_tokens:
            log.info("limit on padded tokens per micro-batch raised to %d, was %d", wanted, self.max_tokens)
            self.max_tokens = wanted


class Attempts:
    """Attempts at the samples of an optimizer step, and how they run again after one has run out of memory.

    If as many tokens have run before, memory may only have been scattered, or something else have taken some: the
    samples first run again as they were, and if that fails, with an eighth less. Otherwise they run with half.

    Where the allocator has had to empty its cache to find room in several steps in a row, later ones are to run with an
    eighth less; a step that runs again as it was counts as one of these.

    ``limit`` knows what has run, before a resume as well; a probe has run ``largest_that_ran`` padded tokens.
    """

    def __init__(self, limit: TokenLimit, largest_that_ran: int = 0) -> None:
        self.failures = 0
        """How often the current step, or part of it, has run out of memory."""

        self.shrank = False
        """True if anything of the current step has run in smaller micro-batches since."""

        self._limit = limit
        limit.note(largest_that_ran)
        self._retried = False
        self._tokens_retried = 0
        self._retried_in_row = 0

    def start_step(self) -> None:
        """Begin with the samples of the next step, or of a part of it that can run again by itself."""
        self.failures = 0

    def note(self, tokens: int) -> None:
        self._limit.note(tokens)

    def note_retry(self, tokens: int, *, can_be_cut: bool) -> None:
        """Record that the allocator had to empty its cache in this step, whose largest micro-batch has ``tokens``."""
        self._retried = True
        self._tokens_retried = max(self._tokens_retried, tokens if can_be_cut else 0)

    def has_fitted(self, tokens: int) -> bool:
        """Return True if a micro-batch of ``tokens`` has run before, and has not failed twice in this step."""
        return tokens <= self._limit.largest_that_ran and self.failures < 2

    def fail(self, tokens: int, *, fitted_before: bool, can_be_cut: bool) -> bool:
        """Count a failed micro-batch; return True if its samples run again as they were, False if in smaller ones."""
        self.failures += 1
        if fitted_before and self.failures == 1:
            self._limit.keep()
            self.note_retry(tokens, can_be_cut=can_be_cut)
            return True
        self._limit.shrink(tokens, fitted_before=fitted_before)
        self.shrank = True
        return False

    def count_retries(self) -> int | None:
        """Count a step that has not shrunk, at its end.

        If several in a row emptied the cache, return the tokens that forwards are to stay below; 0 if none can be cut.
        """
        self._retried_in_row = self._retried_in_row + 1 if self._retried else 0
        if self._retried_in_row < _RETRIES_IN_ROW_TO_SHRINK:
            return None
        self._retried_in_row = 0
        return self._tokens_retried

    def end_step(self) -> None:
        """End a step, all of whose samples have run."""
        self.shrank = False
        self._retried = False
        self._tokens_retried = 0

    def lower_for_retries(self, tokens: int, *, unit: str, device: object, advice: str | None) -> None:
        """Lower the limit below the ``tokens`` that :meth:`count_retries` has returned, above 0, and say so."""
        self._limit.lower(tokens)
        more = "" if advice is None else f". It may need less with the environment variable {advice}"
        log.warning(
            "memory of %s is so short that every step frees the allocator's cache to find room (num_alloc_retries); "
            "from now on a forward takes at most %d %s, an eighth less than the largest%s",
            device, self._limit.max_tokens, unit, more,
        )  # fmt: skip
