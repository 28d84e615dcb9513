"""Decide on batch sizes: ask an increase function, within a maximum. Standard library only."""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adaptive_batching._growth.accumulation import Accumulation, FixedAccumulation, KeepGlobal
from adaptive_batching._growth.increase import (
    GrowthState,
    IncreaseFunction,
    IncreaseFunctionError,
    check_signature,
    is_planned,
    takes_state,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    epoch: float
    """Time of the decision, in epochs."""

    previous: int
    batch_size: int
    reason: str
    warning: str = ""
    """Why the size is not the one asked for, if the user should know."""


class BatchController:
    """Hold the current batch size and decide on the next.

    Args:
        batch_size: The size before the first decision of this run.
        maximum: The largest size allowed; ``batch_size <= maximum``.
        maximum_reason: Where the maximum comes from, for messages.
        increase: The increase function; None keeps the size.
        name: The increase function's name in messages.
        accumulation: Says which sizes are possible.
        ask: Calls the function; on several ranks only one of them does.

    Raises:
        ValueError: If ``batch_size`` is not among the sizes that are possible up to ``maximum``.
        IncreaseFunctionError: If ``increase`` cannot be called with an epoch and a batch size.
    """

    def __init__(
        self,
        batch_size: int,
        maximum: int,
        maximum_reason: str = "",
        increase: IncreaseFunction | None = None,
        name: str = "",
        accumulation: Accumulation = FixedAccumulation(),  # noqa: B008 (immutable)
        ask: Callable[[Callable[[], Any]], Any] = lambda call: call(),
    ) -> None:
        if not 1 <= batch_size <= maximum:
            raise ValueError(f"batch_size={batch_size} must be from 1 to maximum={maximum}")
        if accumulation.allowed(batch_size) != batch_size:
            raise ValueError(
                f"batch_size={batch_size} does not go with {accumulation}; start with "
                f"{accumulation.allowed(batch_size)}"
            )
        if increase is not None:
            check_signature(f"increase={name or getattr(increase, '__qualname__', repr(increase))}", increase)
        self.batch_size = batch_size
        self.maximum = maximum
        self.maximum_reason = maximum_reason
        self.name = name
        self._increase = increase
        self._accumulation = accumulation
        self._ask_one = ask
        self._warned = False

    @property
    def decides_early(self) -> bool:
        """True if all decisions can be made before training."""
        return self._increase is None or is_planned(self._increase)

    def without_growth(self) -> BatchController:
        """Return a copy that keeps its size."""
        kept = copy.copy(self)
        kept._increase = None
        return kept

    def decide(self, state: GrowthState, room: int | None = None) -> Decision:
        """Ask the increase function and apply its answer where the sum stays within the maximum.

        Args:
            state: The run so far.
            room: The largest size that the rest of the epoch has samples for; None for no limit.

        Raises:
            IncreaseFunctionError: If the function raises or returns anything but a whole number >= 0.
        """
        previous = self.batch_size
        increase = self._ask(state) if self._increase is not None else 0
        wanted = previous + increase
        note = ""
        allowed = self._accumulation.allowed(wanted)
        if isinstance(self._accumulation, KeepGlobal) and allowed != wanted:
            note = f" (asked for {increase}: {wanted} does not divide the global batch {self._accumulation.samples})"
        wanted = allowed

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
                "batch size grows from %d to %d at epoch %g; it may reach %d",
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
