"""Growing the batch from epoch to epoch.

An increase function has the signature ``(epoch: int, current_batch_size: int) -> int`` and returns how many samples
to add at the start of that epoch; 0 adds none. This module resolves and checks such functions, applies them within a
maximum, and ships the first few. It imports nothing but the standard library.
"""

from __future__ import annotations

import inspect
import logging
import operator
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

IncreaseFunction = Callable[[int, int], int]


class IncreaseFunctionError(ValueError):
    """An increase function that cannot be used, or that returned what is no number of samples."""


def fixed_increase(increase: int, epochs: list[int] | None = None) -> IncreaseFunction:
    """Add ``increase`` samples at the start of each of ``epochs``; None: of every epoch but the first.

    Raises:
        ValueError: If ``increase`` is negative or an epoch is.
    """
    _require("increase", increase, at_least=0)
    for epoch in epochs or []:
        _require("epochs", epoch, at_least=0)

    def increase_at(epoch: int, current_batch_size: int) -> int:
        due = epoch > 0 if epochs is None else epoch in epochs
        return increase if due else 0

    return increase_at


def double_every(every: int = 1) -> IncreaseFunction:
    """Double the batch at the start of every ``every``-th epoch: epochs ``every``, ``2 * every``, ...

    Raises:
        ValueError: If ``every`` is less than 1.
    """
    _require("every", every, at_least=1)

    def double(epoch: int, current_batch_size: int) -> int:
        return current_batch_size if epoch > 0 and epoch % every == 0 else 0

    return double


def resolve(value: str | Mapping[str, Any]) -> tuple[str, IncreaseFunction]:
    """Import the increase function that a config names.

    Args:
        value: ``"pkg.module.function"``, or ``{"_component_": "pkg.module.factory", ...arguments}``.

    Returns:
        The name to use in messages, and the function.

    Raises:
        IncreaseFunctionError: If the path does not import, is not callable, or takes other arguments.
    """
    path = value if isinstance(value, str) else value["_component_"]
    key = f"batch_increase_function={path!r}"
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise IncreaseFunctionError(
            f"{key} cannot be imported ({error}); write the dotted path of a function in a module that can be "
            f"imported from the working directory or the environment"
        ) from error
    if not callable(found):
        raise IncreaseFunctionError(f"{key} is not callable but of type {type(found).__name__}; name a function")
    if not isinstance(value, str):
        arguments = {k: v for k, v in value.items() if k != "_component_"}
        try:
            found = found(**arguments)
        except Exception as error:
            raise IncreaseFunctionError(
                f"{key} is used as a factory (_component_) and failed with the arguments {arguments}: {error}. Write a "
                f"plain function without _component_; on the command line, a path keeps the YAML's arguments"
            ) from error
        if not callable(found):
            raise IncreaseFunctionError(
                f"{key} is used as a factory (_component_) but returned {found!r}; it must return a function "
                f"(epoch, current_batch_size) -> int. For a plain function write the path without _component_"
            )
    _check_signature(key, found)
    return path, found


@dataclass(frozen=True)
class Decision:
    """The batch size of one epoch, and why."""

    epoch: int
    batch_size: int
    reason: str


class BatchController:
    """Holds the current batch size and decides the next epoch's.

    Args:
        batch_size: The size before the first epoch of this run.
        maximum: No epoch exceeds it; ``batch_size <= maximum``.
        maximum_reason: Where the maximum comes from, for messages.
        increase: The increase function; None keeps the size.
        name: What messages call the increase function.
        divides: Every size divides this number, the global batch where that is to stay; None: any size will do.
    """

    def __init__(
        self,
        batch_size: int,
        maximum: int,
        maximum_reason: str = "",
        increase: IncreaseFunction | None = None,
        name: str = "",
        divides: int | None = None,
    ) -> None:
        assert 1 <= batch_size <= maximum, (batch_size, maximum)
        assert divides is None or divides % batch_size == 0, (batch_size, divides)
        self.batch_size = batch_size
        self.maximum = maximum
        self.maximum_reason = maximum_reason
        self._increase = increase
        self._name = name
        self._divides = divides
        self._warned = False

    def start_epoch(self, epoch: int) -> Decision:
        """Ask the increase function and apply its answer where the sum stays within the maximum.

        Raises:
            IncreaseFunctionError: If the function raises or returns anything but a whole number >= 0.
        """
        previous = self.batch_size
        increase = self._ask(epoch) if self._increase is not None else 0
        wanted = previous + increase
        note = ""
        if self._divides is not None and self._divides % wanted:
            note = f" (asked for {increase}: {wanted} does not divide the global batch {self._divides})"
            wanted = largest_divisor(self._divides, at_most=wanted)
        if wanted == previous:
            reason = "kept" + note
            if note and not self._warned:
                log.warning("batch size stays at %d at epoch %d%s", previous, epoch, note)
                self._warned = True
        elif wanted <= self.maximum:
            self.batch_size = wanted
            reason = f"{self._name} added {wanted - previous}{note}"
            log.info("batch size %d -> %d at epoch %d (limit %d)", previous, wanted, epoch, self.maximum)
        else:
            reason = f"kept: {wanted} would exceed {self.maximum}"
            if not self._warned:
                log.warning(
                    "batch size stays at %d: %s asked for %d at epoch %d, and the maximum is %d (%s)",
                    previous, self._name, wanted, epoch, self.maximum, self.maximum_reason,
                )  # fmt: skip
                self._warned = True
        return Decision(epoch, self.batch_size, reason)

    def _ask(self, epoch: int) -> int:
        call = f"batch_increase_function {self._name}(epoch={epoch}, current_batch_size={self.batch_size})"
        assert self._increase is not None
        try:
            answer = self._increase(epoch, self.batch_size)
        except Exception as error:
            raise IncreaseFunctionError(f"{call} raised {type(error).__name__}: {error}") from error
        remedy = "it must return how many samples to add, a whole number >= 0"
        if isinstance(answer, bool):
            raise IncreaseFunctionError(f"{call} returned {answer!r}; {remedy}")
        try:
            increase = operator.index(answer)  # int and the integer types of numpy and torch, but no float
        except TypeError:
            raise IncreaseFunctionError(f"{call} returned {answer!r}; {remedy}") from None
        if increase < 0:
            raise IncreaseFunctionError(f"{call} returned {answer!r}; {remedy} (a batch never shrinks)")
        return increase


def largest_divisor(number: int, *, at_most: int) -> int:
    """The largest divisor of ``number`` that is no more than ``at_most``; both at least 1."""
    return next(size for size in range(min(at_most, number), 0, -1) if number % size == 0)


def reference_steps(
    steps_done: int, *, steps: int, samples_per_step: int, reference_steps: int, reference_samples_per_step: int
) -> int:
    """How many scheduler steps of the stock run an epoch that is ``steps_done`` steps old has used up.

    The learning rate follows the samples seen: a step of this run uses the rate that the stock run, at the configured
    batch size, would have used for the step's first sample. An epoch's end is always the stock epoch's end, so that
    dropped remainders do not add up. Where an epoch sees more samples than its stock counterpart (the batch grew under
    ``max_steps_per_epoch``), its share of the schedule is spread evenly over them.

    Args:
        steps_done: Optimizer steps done in this epoch, 0 to ``steps``.
        steps: Optimizer steps of this epoch.
        samples_per_step: Samples that one optimizer step of this epoch sees.
        reference_steps: Optimizer steps of a stock epoch.
        reference_samples_per_step: Samples that one optimizer step of the stock run sees.
    """
    assert 0 <= steps_done <= steps, (steps_done, steps)
    if steps_done == steps:
        return reference_steps
    seen = steps_done * samples_per_step
    planned = max(steps * samples_per_step, reference_steps * reference_samples_per_step)
    spread = reference_steps * reference_samples_per_step
    return min(seen * spread // (planned * reference_samples_per_step), reference_steps)


def _check_signature(key: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none; the first call will tell
        return
    try:
        signature.bind(0, 1)
    except TypeError as error:
        raise IncreaseFunctionError(
            f"{key} has the signature {signature} and cannot be called with (epoch, current_batch_size): {error}"
        ) from None


def _require(name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {at_least}")
