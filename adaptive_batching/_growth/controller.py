"""Batch sizes that an increase function decides on, within what memory, the data and accumulation allow."""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass

from adaptive_batching._growth.increase import (
    GrowthState,
    IncreaseFunction,
    IncreaseFunctionError,
    _as_component,
    check_signature,
    is_planned,
    takes_state,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FixedAccumulation:
    """Every optimizer step takes ``batches`` batches; the global batch grows with the batch size."""

    batches: int = 1

    def __post_init__(self) -> None:
        if self.batches < 1:
            raise ValueError(f"batches={self.batches} must be at least 1")

    @property
    def least(self) -> int:
        """The smallest possible size."""
        return 1

    def batches_at(self, batch_size: int) -> int:
        """Return the batches of an optimizer step."""
        return self.batches

    def window(self, batch_size: int) -> int:
        """Return the samples of an optimizer step on one replica."""
        return batch_size * self.batches

    def allowed(self, batch_size: int) -> int:
        """Return the largest possible size that is at most ``batch_size``."""
        return batch_size

    def room(self, samples: int) -> int | None:
        """Return the largest size for which ``samples`` fill an optimizer step; None for no limit."""
        return self.allowed(samples // self.batches)

    @property
    def why_not(self) -> str:
        """Why a size is not possible, in words that follow it; empty where all are from :attr:`least` on."""
        return ""


@dataclass(frozen=True)
class KeepGlobal:
    """Every optimizer step takes ``samples`` samples on one replica; larger batches need fewer of them."""

    samples: int
    least = 1

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples={self.samples} must be at least 1")

    def batches_at(self, batch_size: int) -> int:
        return self.samples // batch_size

    def window(self, batch_size: int) -> int:
        return self.samples

    def allowed(self, batch_size: int) -> int:
        """Return the largest possible size that is at most ``batch_size``: a divisor of the samples of a step."""
        return next(size for size in range(min(batch_size, self.samples), 0, -1) if self.samples % size == 0)

    def room(self, samples: int) -> int | None:
        return None

    @property
    def why_not(self) -> str:
        return f"does not divide the global batch {self.samples}"


Accumulation = FixedAccumulation | KeepGlobal


@dataclass(frozen=True)
class Decision:
    epoch: float
    previous: int
    batch_size: int
    reason: str
    warning: str = ""  # why the size is not the one asked for, if the user should know


class BatchController:
    """Hold the current batch size and decide on the next.

    Args:
        batch_size: The size before the first decision of this run.
        maximum: The largest size allowed; ``batch_size <= maximum``.
        maximum_reason: Where the maximum comes from, for messages.
        increase: The increase function; None keeps the size.
        name: The increase function's name in messages.
        accumulation: The batches of an optimizer step, which say what sizes are possible.
        ask: Calls what asks the increase function, and returns its answer: on the first of several ranks, for instance.

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
        accumulation: Accumulation = FixedAccumulation(),
        ask: Callable[[Callable[[], int]], int] = lambda asked: asked(),
    ) -> None:
        if not 1 <= batch_size <= maximum:
            raise ValueError(f"batch_size={batch_size} must be from 1 to maximum={maximum}")
        if (allowed := accumulation.allowed(batch_size)) != batch_size:
            raise ValueError(f"batch_size={batch_size} does not work with {accumulation}; start with {allowed}")
        if increase is not None:
            check_signature(f"increase={name or getattr(increase, '__qualname__', repr(increase))}", increase)
        self.batch_size, self.maximum, self.maximum_reason = batch_size, maximum, maximum_reason
        self.name, self.accumulation = name, accumulation
        self._increase, self._ask = increase, ask
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
        """Ask the increase function and apply its answer where the sum stays within the maximum, and above zero.

        Args:
            state: The run so far.
            room: The largest size that the rest of the epoch has samples for; None for no limit.

        Raises:
            IncreaseFunctionError: If the function raises or returns anything but a whole number or None.
        """
        previous = self.batch_size
        function = self._increase
        increase = 0 if function is None else self._ask(lambda: self._answer(function, state))
        asked = max(previous + increase, self.accumulation.least)
        wanted = self.accumulation.allowed(asked)
        note = warning = ""
        if asked != previous + increase:
            note = f" (asked for {increase}; {asked} is the smallest)"
        elif wanted != asked:
            note = f" (asked for {increase}: {asked} {self.accumulation.why_not})"
        if wanted == previous:
            reason, warning = f"kept{note}", note.strip()
        elif wanted > self.maximum:
            reason = f"kept: {wanted} would exceed {self.maximum}"
            warning = f"{self.name} asked for {wanted}, but the maximum is {self.maximum} ({self.maximum_reason})"
        elif room is not None and wanted > room:
            reason = f"kept: {self.name} asked for {wanted}, but the rest of the epoch has samples for only {room}"
        else:
            change = f"added {wanted - previous}" if wanted > previous else f"took {previous - wanted} away"
            reason = f"{self.name} {change}{note}"
            self.batch_size = wanted
        return Decision(state.epoch, previous, self.batch_size, reason, warning)

    def announce(self, decision: Decision) -> None:
        """Log a decision that takes effect, and the first that gives less than was asked for."""
        if decision.batch_size != decision.previous:
            log.info(
                "batch size %s from %d to %d at epoch %g (maximum %d)",
                "grows" if decision.batch_size > decision.previous else "shrinks", decision.previous,
                decision.batch_size, decision.epoch, self.maximum,
            )  # fmt: skip
        elif decision.warning and not self._warned:
            self._warned = True
            log.warning("batch size stays at %d at epoch %g: %s", decision.previous, decision.epoch, decision.warning)
        elif not decision.warning and decision.reason != "kept":
            log.info("batch size stays at %d at epoch %g: %s", decision.previous, decision.epoch, decision.reason)

    def _answer(self, increase: IncreaseFunction, state: GrowthState) -> int:
        call = f"batch_increase_function {self.name}(epoch={state.epoch:g}, current_batch_size={self.batch_size})"
        extra = {"state": state} if takes_state(increase) else {}
        try:
            answer = increase(state.epoch, self.batch_size, **extra)
        except Exception as error:
            raise IncreaseFunctionError(f"{call} raised {type(error).__name__}: {error}") from error
        if answer is None:  # as from a function that returns a number only where the batch is to change
            return 0
        try:
            number = None if isinstance(answer, bool) else operator.index(answer)  # numpy's and torch's, too
        except TypeError:
            number = None
        if number is None:
            remedy = "it must return how many samples to add: a whole number, or None for none"
            if callable(answer):
                remedy = f"it is a factory: write {_as_component(self.name)}, with its arguments"
            raise IncreaseFunctionError(f"{call} returned {answer!r}; {remedy}")
        return number
