"""The size of a micro-batch that running out of memory has taught not to exceed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)


class TokenLimit:
    """The most padded tokens of a micro-batch, as running out of memory has taught it.

    There is none until a micro-batch runs out of memory. Each time one does, it falls to half of that one. After a
    number of steps without, it doubles, but never to what has failed twice; once beyond what failed, it is lifted. With
    each failure after the first it stays down for twice as many steps, so that a run of any length has few of them.

    Args:
        steps_to_recover: Clean steps after which it is raised for the first time.
    """

    def __init__(self, steps_to_recover: int = 50) -> None:
        self.max_tokens: int | None = None
        self.num_recoveries = 0
        self._steps_to_recover = steps_to_recover
        self._clean_steps = 0
        self._failed: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is to hold."""
        return {
            "max_tokens": self.max_tokens,
            "num_recoveries": self.num_recoveries,
            "clean_steps": self._clean_steps,
            "steps_to_recover": self._steps_to_recover,
            "failed": self._failed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.max_tokens, self.num_recoveries = state["max_tokens"], state["num_recoveries"]
        self._clean_steps, self._failed = state["clean_steps"], list(state["failed"])
        self._steps_to_recover = state["steps_to_recover"]

    def keep(self) -> None:
        """A micro-batch ran out of memory, and is to run again as it was."""
        self.num_recoveries += 1

    def shrink(self, tokens: int, *, fitted_before: bool = False) -> None:
        """A micro-batch of ``tokens`` padded tokens ran out of memory: take half, or where as many have fitted before,
        an eighth less."""
        self.num_recoveries += 1
        if fitted_before:
            self.lower(tokens)
        else:
            self._fall_to(tokens // 2, tokens)

    def lower(self, tokens: int) -> None:
        """Micro-batches of ``tokens`` padded tokens have fitted just so, at the price of time; take an eighth less."""
        self._fall_to(tokens - max(tokens // 8, 1), tokens)

    def _fall_to(self, max_tokens: int, failed: int) -> None:
        if self._failed:
            self._steps_to_recover *= 2
        self._failed.append(failed)
        self._clean_steps = 0
        self.max_tokens = max(max_tokens, 1)

    def note_clean_step(self) -> None:
        """An optimizer step ended without running out of memory."""
        if self.max_tokens is None:
            return
        self._clean_steps += 1
        if self._clean_steps < self._steps_to_recover:
            return
        self._clean_steps = 0
        wanted = 2 * self.max_tokens
        if len(self._failed) > 1:
            wanted = min(wanted, sorted(self._failed)[1] - 1)
        elif self.max_tokens >= max(self._failed, default=0):  # what failed had its second chance
            log.info("micro-batches may take any number of padded tokens again, from %d", self.max_tokens)
            self.max_tokens = None
            return
        if wanted > self.max_tokens:
            log.info("micro-batches may take %d padded tokens again, from %d", wanted, self.max_tokens)
            self.max_tokens = wanted
