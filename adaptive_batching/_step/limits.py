"""The limit on the tokens of a forward pass: the user's own, and one learned from running out of memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from adaptive_batching._step.split import samples_within

log = logging.getLogger(__name__)


class TokenLimit:
    """Limit on the padded tokens of a forward: the smaller of what the user allows and what has been learned.

    Nothing is learned until a forward runs out of memory. Each time one does, the learned limit falls to half of its
    tokens. After ``steps_to_recover`` clean steps it doubles, but never to a size that has failed twice; once beyond
    what failed, it is lifted. Each failure after the first doubles the number of clean steps required, so that a run of
    any length has few failures.
    """

    def __init__(self, bound: int | None = None, *, steps_to_recover: int = 50) -> None:
        self.bound = bound
        """Tokens that the user, or a probe, allows; None for any number."""

        self.learned: int | None = None
        """Tokens that are left after what has run out of memory; None if nothing has."""

        self.num_recoveries = 0
        self._largest_that_ran = 0  # padded tokens of the largest forward known to fit
        self._steps_to_recover = steps_to_recover
        self._clean_steps = 0
        self._failed: list[int] = []

    @property
    def max_tokens(self) -> int | None:
        """Tokens that a forward holds at most; None for no limit."""
        if self.bound is None or self.learned is None:
            return self.learned if self.bound is None else self.bound
        return min(self.bound, self.learned)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learned; the bound is the user's."""
        return {
            "learned": self.learned, "num_recoveries": self.num_recoveries, "clean_steps": self._clean_steps,
            "steps_to_recover": self._steps_to_recover, "failed": self._failed,
            "largest_that_ran": self._largest_that_ran,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.learned, self.num_recoveries = state["learned"], state["num_recoveries"]
        self._clean_steps, self._failed = state["clean_steps"], list(state["failed"])
        self._steps_to_recover = state["steps_to_recover"]
        self._largest_that_ran = state["largest_that_ran"]

    def samples(self, length: int, most: int) -> int:
        """Return how many samples of ``length`` tokens a forward holds, up to ``most``; at least 1."""
        return most if self.max_tokens is None else min(samples_within(self.max_tokens, length), most)

    def has_fitted(self, tokens: int) -> bool:
        """Return True if a forward of as many padded tokens is known to fit."""
        return tokens <= self._largest_that_ran

    def note(self, tokens: int) -> None:
        """Take note of a forward that has run, or that a probe has seen to fit."""
        self._largest_that_ran = max(self._largest_that_ran, tokens)

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
        self.learned = max(max_tokens, 1)

    def note_clean_step(self) -> None:
        if self.learned is None:
            return
        self._clean_steps = (self._clean_steps + 1) % self._steps_to_recover
        if self._clean_steps:
            return
        wanted = 2 * self.learned
        if len(self._failed) > 1:
            wanted = min(wanted, sorted(self._failed)[1] - 1)
        elif self.learned >= max(self._failed, default=0):  # the size that failed has had its second chance
            log.info("lifted the limit of %d padded tokens per micro-batch", self.learned)
            self.learned = None
            return
        if wanted > self.learned:
            log.info("raised the limit on padded tokens per micro-batch from %d to %d", self.learned, wanted)
            self.learned = wanted
