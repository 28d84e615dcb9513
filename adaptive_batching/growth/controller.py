"""Who decides on a batch size: an increase function, within a maximum. Standard library only."""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adaptive_batching.growth.increase import (
    GrowthState,
    IncreaseFunction,
    IncreaseFunctionError,
    is_planned,
    takes_state,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """A batch size, and why."""

    epoch: float
    """Where it is made, in epochs."""

    previous: int
    batch_size: int
    reason: str
    warning: str = ""
    """Why it is not what was asked for, where the user should know."""


class BatchController:
    """Holds the current batch size and decides on the next.

    Args:
        batch_size: The size before the first decision of this run.
        maximum: No size exceeds it; ``batch_size <= maximum``.
        maximum_reason: Where the maximum comes from, for messages.
        increase: The increase function; None keeps the size.
        name: What messages call the increase function.
        divides: Every size divides this number, the global batch where that is to stay; None: any size will do.
        ask: Calls the function; on several ranks it lets one of them do so.
    """

    def __init__(
        self,
        batch_size: int,
        maximum: int,
        maximum_reason: str = "",
        increase: IncreaseFunction | None = None,
        name: str = "",
        divides: int | None = None,
        ask: Callable[[Callable[[], Any]], Any] = lambda call: call(),
    ) -> None:
        assert 1 <= batch_size <= maximum, (batch_size, maximum)
        assert divides is None or divides % batch_size == 0, (batch_size, divides)
        self.batch_size = batch_size
        self.maximum = maximum
        self.maximum_reason = maximum_reason
        self.name = name
        self._increase = increase
        self._divides = divides
        self._ask_one = ask
        self._warned = False

    @property
    def decides_early(self) -> bool:
        """Whether all decisions can be made before training."""
        return self._increase is None or is_planned(self._increase)

    def without_growth(self) -> BatchController:
        """A copy that keeps its size."""
        kept = copy.copy(self)
        kept._increase = None
        return kept

    def decide(self, state: GrowthState, room: int | None = None) -> Decision:
        """Ask the increase function and apply its answer where the sum stays within the maximum.

        Args:
            state: What is known of the run.
            room: The largest size that the rest of the epoch has samples for; None: no matter.

        Raises:
            IncreaseFunctionError: If the function raises or returns anything but a whole number >= 0.
        """
        previous = self.batch_size
        increase = self._ask(state) if self._increase is not None else 0
        wanted = previous + increase
        note = ""
        if self._divides is not None and self._divides % wanted:
            note = f" (asked for {increase}: {wanted} does not divide the global batch {self._divides})"
            wanted = largest_divisor(self._divides, at_most=wanted)

        def keep(reason: str, warning: str = "") -> Decision:
            return Decision(state.epoch, previous, previous, f"kept{reason}", warning)

        if wanted == previous:
            return keep(note, note.strip())
        if wanted > self.maximum:
            warning = f"{self.name} asked for {wanted}, and the maximum is {self.maximum} ({self.maximum_reason})"
            return keep(f": {wanted} would exceed {self.maximum}", warning)
        if room is not None and wanted > room:
            return keep(f": {self.name} asked for {wanted}, and the rest of the epoch has samples for {room}")
        self.batch_size = wanted
        return Decision(state.epoch, previous, wanted, f"{self.name} added {wanted - previous}{note}")

    def announce(self, decision: Decision) -> None:
        """Log a decision that takes effect, and the first that gives less than was asked for."""
        if decision.batch_size != decision.previous:
            log.info(
                "batch size %d -> %d at epoch %g (limit %d)",
                decision.previous, decision.batch_size, decision.epoch, self.maximum,
            )  # fmt: skip
        elif decision.warning and not self._warned:
            self._warned = True
            log.warning("batch size stays at %d at epoch %g: %s", decision.previous, decision.epoch, decision.warning)
        elif not decision.warning and decision.reason != "kept":
            log.info("batch size stays at %d at epoch %g: %s", decision.previous, decision.epoch, decision.reason)

    def _ask(self, state: GrowthState) -> int:
        call = f"batch_increase_function {self.name}(epoch={state.epoch:g}, current_batch_size={self.batch_size})"
        increase = self._increase
        assert increase is not None
        known = {"state": state} if takes_state(increase) else {}
        try:
            answer = self._ask_one(lambda: increase(state.epoch, self.batch_size, **known))
        except Exception as error:
            raise IncreaseFunctionError(f"{call} raised {type(error).__name__}: {error}") from error
        remedy = "it must return how many samples to add, a whole number >= 0"
        if isinstance(answer, bool):
            raise IncreaseFunctionError(f"{call} returned {answer!r}; {remedy}")
        try:
            number = operator.index(answer)  # int and the integer types of numpy and torch, but no float
        except TypeError:
            raise IncreaseFunctionError(f"{call} returned {answer!r}; {remedy}") from None
        if number < 0:
            raise IncreaseFunctionError(f"{call} returned {answer!r}; {remedy} (a batch never shrinks)")
        return number


def largest_divisor(number: int, *, at_most: int) -> int:
    """The largest divisor of ``number`` that is no more than ``at_most``; both at least 1."""
    return next(size for size in range(min(at_most, number), 0, -1) if number % size == 0)
