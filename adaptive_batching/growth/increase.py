"""What an increase function is, what it may know, and how a config names one.

An increase function has the signature ``(epoch, current_batch_size) -> int`` and returns how many samples to add; 0
adds none. It is asked at the start of every epoch, with an ``int``, and, where ``increase_every`` is a fraction, at
these parts of an epoch as well, with a ``float``: 1.25 is a quarter into the second epoch.

A function that accepts a third argument called ``state`` gets a :class:`GrowthState`. All others are taken to depend on
their arguments alone: they are asked once, for the whole run, before training begins, so that the run is known up
front. One that takes ``state`` is asked while training, unless it is marked as :func:`planned`.

This module imports nothing but the standard library.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

IncreaseFunction = Callable[..., int]

_FACTORIES = "adaptive_batching.growth.schedules"


class IncreaseFunctionError(ValueError):
    """An increase function that cannot be used, or that returned what is no number of samples."""


@dataclass(frozen=True)
class GrowthState:
    """What is known of a run where it decides on a batch size.

    The fields without a default are known before training, too, when functions marked as :func:`planned` are asked.
    """

    epoch: float
    """Epochs that the run has gone through, and the part of this one."""

    total_epochs: int
    """Epochs of the whole run."""

    batch_size: int
    """Samples of a batch on one device, now."""

    initial_batch_size: int
    """Samples of a batch on one device, when the run began."""

    maximum: int
    """The most that ``batch_size`` can be."""

    global_batch_size: int
    """Samples that the optimizer sees in a step, now."""

    samples_seen: int
    """Samples that the optimizer has seen."""

    steps: int
    """Optimizer steps taken."""

    lr_decay: float
    """The scheduled learning rate, as a fraction of its highest so far; 1 without a schedule or while it warms up."""

    losses: tuple[float, ...] = ()
    """Mean training loss of the samples between two decisions, one for each decision so far."""

    noise_scale: float | None = None
    """Gradient noise scale in samples, smoothed; None while it is not known, or not measured."""

    history: tuple[tuple[float, int], ...] = ()
    """Where ``batch_size`` changed, in epochs, and to what; the first size included."""

    seconds_per_step: Callable[[int], float] | None = None
    """What an optimizer step would take at a batch size, in seconds; None while it is not known."""


def planned(function: IncreaseFunction) -> IncreaseFunction:
    """Mark a function that takes ``state``, but only what is known of it before training: it is asked then."""
    function.planned = True  # type: ignore[attr-defined]
    return function


def takes_state(function: IncreaseFunction) -> bool:
    """Whether a function accepts a third argument called ``state``."""
    try:
        return "state" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have none
        return False


def is_planned(function: IncreaseFunction) -> bool:
    """Whether a function is asked before training, for all of it."""
    return not takes_state(function) or getattr(function, "planned", False)


def reads_noise_scale(function: IncreaseFunction) -> bool:
    """Whether a function of :mod:`adaptive_batching.growth` reads the noise scale; of others that is not known."""
    return getattr(function, "reads_noise_scale", False)


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
    if isinstance(value, str) and getattr(found, "__module__", None) == _FACTORIES:
        raise IncreaseFunctionError(f"{key} is a factory; write {{_component_: {path}}}, with its arguments, if any")
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


def _check_signature(key: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none; the first call will tell
        return
    try:
        signature.bind(0, 1, **{"state": None} if takes_state(function) else {})
    except TypeError as error:
        raise IncreaseFunctionError(
            f"{key} has the signature {signature} and cannot be called with (epoch, current_batch_size), or with these "
            f"and state: {error}"
        ) from None
