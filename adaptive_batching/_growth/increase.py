"""Increase functions: their signature, what they may read, and how a config names one.

An increase function has the signature ``(epoch, current_batch_size) -> int`` and returns how many samples to add: a
negative number takes some away, and 0 or None keeps the size. It is called at the start of every epoch with an ``int``;
if ``increase_every`` is a fraction, also at these parts of an epoch with a ``float``: 1.25 is a quarter into the second
epoch.

A function that accepts a third argument called ``state`` gets a :class:`GrowthState`. All others are assumed to depend
on their arguments alone, and are called for the whole run before training begins, so that it is known up front. A
function that takes ``state`` is called during training, unless it is marked as :func:`planned`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import itertools
import logging
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adaptive_batching._values import AdaptiveBatchingError, nearest_path

log = logging.getLogger(__name__)

IncreaseFunction = Callable[..., int | None]

_FACTORIES = "adaptive_batching._growth.schedules"
_GROWTH = "adaptive_batching.growth"


class IncreaseFunctionError(AdaptiveBatchingError, ValueError):
    """Raised for an increase function that cannot be used, or that does not return a number of samples."""


@dataclass(frozen=True)
class GrowthState:
    """State of a run when it decides on a batch size.

    The fields without a default are also known before training, when functions marked as :func:`planned` are called.

    Attributes:
        epoch: Epochs that the run has completed, including the fraction of the current one.
        total_epochs: Epochs of the whole run; of one that ends after so many samples, those at the configured size.
        batch_size: Current number of samples in a batch on one device.
        initial_batch_size: Number of samples in a batch on one device when the run began.
        maximum: Upper bound of ``batch_size``.
        global_batch_size: Number of samples that the optimizer currently sees in a step.
        samples_seen: Samples that the optimizer has seen so far.
        steps: Optimizer steps taken so far.
        lr_decay: Scheduled learning rate as a fraction of its highest value so far; 1 without a schedule or during
            warm-up.
        losses: Mean training loss of the samples between two decisions, one value per decision so far.
        val_losses: Loss of the last validation before each decision so far that had one since the decision before it.
        history: (epoch, new batch size) of each change of ``batch_size``, including the initial size.
    """

    epoch: float
    total_epochs: int
    batch_size: int
    initial_batch_size: int
    maximum: int
    global_batch_size: int
    samples_seen: int
    steps: int
    lr_decay: float
    losses: tuple[float, ...] = ()
    val_losses: tuple[float, ...] = ()
    history: tuple[tuple[float, int], ...] = ()


def planned(function: IncreaseFunction) -> IncreaseFunction:
    """Mark a function that takes ``state`` but reads only what is known before training, so that it is called then."""
    function.planned = True  # type: ignore[attr-defined]
    return function


def takes_state(function: IncreaseFunction) -> bool:
    try:
        return "state" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False


def is_planned(function: IncreaseFunction) -> bool:
    """Return True if a function is called for the whole run before training."""
    return not takes_state(function) or getattr(function, "planned", False)


def reads_val_loss(function: IncreaseFunction) -> bool:
    return getattr(function, "reads_val_loss", False)


class AskedOnce:
    """Keeps the answers of an increase function, which is asked once for each epoch however often a run is planned.

    A function that reads a clock or counts its calls then trains the sizes that were planned. One that takes ``state``
    is asked each time: it reads the length of the run, which planning may find.
    """

    def __init__(self) -> None:
        self._answers: dict[tuple[float, int], int | None] = {}

    def note(self, sizes: Sequence[int]) -> None:
        """Take for answers what was trained: the size before the first epoch, and that of each epoch that has begun."""
        for epoch, (before, size) in enumerate(itertools.pairwise(sizes)):
            self._answers[epoch, before] = size - before

    def function(self, increase: IncreaseFunction) -> IncreaseFunction:
        """Return ``increase`` with the answers that are known."""
        if takes_state(increase):
            return increase

        @functools.wraps(increase)
        def asked(epoch: float, current_batch_size: int) -> int | None:
            at = epoch, current_batch_size
            if at not in self._answers:
                self._answers[at] = increase(epoch, current_batch_size)
            return self._answers[at]

        return asked


def path_of(function: Callable[..., Any]) -> str:
    """Return the dotted path of a function, of the factory that made it, or of the class of what else can be called."""
    named = function if hasattr(function, "__qualname__") else type(function)
    module = _GROWTH if named.__module__ == _FACTORIES else named.__module__
    return f"{module}.{named.__qualname__.partition('.<locals>')[0]}"


def resolve(value: str | Mapping[str, Any] | Callable[..., int | None]) -> tuple[str, IncreaseFunction]:
    """Import the increase function that a config names, and return its name in messages, and the function.

    ``value`` is ``"pkg.module.function"``, ``{"_component_": "pkg.module.factory", ...arguments}``, or the function.
    """
    if callable(value):
        check_signature(f"batch_increase_function={path_of(value)!r}", value)
        return path_of(value), value
    path = value if isinstance(value, str) else value["_component_"]
    key = f"batch_increase_function={path!r}"
    try:
        function = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        meant = _meant(path)
        remedy = "write the dotted path of a function in a module that the working directory or the environment has"
        if meant:
            as_factory = meant.startswith(_GROWTH) and isinstance(value, str)
            remedy = f"did you mean {_as_component(meant) if as_factory else repr(meant)}?"
        raise IncreaseFunctionError(f"{key} cannot be imported ({error}); {remedy}") from error
    if not callable(function):
        raise IncreaseFunctionError(f"{key} is not callable (type {type(function).__name__}); name a function")
    if isinstance(value, str) and getattr(function, "__module__", None) == _FACTORIES:
        raise IncreaseFunctionError(f"{key} is a factory; write {_as_component(path)}, with its arguments, if any")
    if not isinstance(value, str):
        arguments = {k: v for k, v in value.items() if k != "_component_"}
        if not _is_increase_function(function, arguments):
            function = _from_factory(key, function, arguments)
        elif arguments:  # torchtune adds a path on the command line to the arguments that a YAML has for another
            dropped = ", ".join(arguments)
            log.warning("%s is the increase function itself, not a factory; ignoring its arguments: %s", key, dropped)
    try:
        check_signature(key, function)
    except IncreaseFunctionError as error:
        if not isinstance(value, str):
            raise
        raise IncreaseFunctionError(
            f"{error}; if it is a factory, write {_as_component(path)}, with its arguments"
        ) from None
    return path, function


def _as_component(path: str) -> str:
    return f"{{_component_: {path}}} (on a command line, batch_increase_function._component_={path})"


def _meant(path: str) -> str:
    """Return the path of a function whose name is near that in ``path``; empty if there is none."""
    module, _, name = path.rpartition(".")
    return nearest_path(f"{_GROWTH}.{name}" if module in ("", "growth", "adaptive_batching") else path)


def _is_increase_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    """Return True if ``function`` takes an epoch and a batch size, rather than ``arguments`` as a factory would."""
    if getattr(function, "__module__", None) == _FACTORIES:
        return False
    try:
        signature = inspect.signature(function)
        if list(signature.parameters)[:2] == ["epoch", "current_batch_size"]:
            return True
        signature.bind(0, 1, **{"state": None} if takes_state(function) else {})
    except (TypeError, ValueError):
        return False
    if any(name in signature.parameters for name in arguments):
        return False
    try:
        signature.bind(**arguments)
    except TypeError:
        return True
    return False


def _from_factory(key: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> IncreaseFunction:
    used = f"{key}, used as a factory (_component_),"
    signature: inspect.Signature | None = None
    with contextlib.suppress(TypeError, ValueError):  # some builtins have none
        signature = inspect.signature(factory)
    if signature is not None:
        _check_arguments(used, signature, arguments)
    try:
        function = factory(**arguments)
    except Exception as error:
        raise IncreaseFunctionError(
            f"{used} failed with the arguments {arguments}: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise IncreaseFunctionError(
            f"{used} returned {function!r}; it must return a function (epoch, current_batch_size) -> int. For a plain "
            f"function write the path without _component_"
        )
    return function  # type: ignore[no-any-return]


def _check_arguments(used: str, signature: inspect.Signature, arguments: Mapping[str, Any]) -> None:
    """Raise IncreaseFunctionError if a factory does not take these arguments, with what was meant."""
    parameters = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind != parameter.VAR_POSITIONAL
    }
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    takes = ", ".join(parameters) or "none"
    for name in () if takes_any else arguments.keys() - parameters.keys():
        close = difflib.get_close_matches(name, parameters, n=1)
        remedy = (
            f"did you mean {close[0]!r}?"
            if close
            else f"take it out, on the command line with ~batch_increase_function.{name}"
        )
        raise IncreaseFunctionError(f"{used} has no argument {name!r}, but: {takes}; {remedy}")
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind != parameter.VAR_KEYWORD
    ]
    if missing := [name for name in required if name not in arguments]:
        raise IncreaseFunctionError(
            f"{used} needs {', '.join(map(repr, missing))}; write batch_increase_function.{missing[0]}=..., or a plain "
            "function (epoch, current_batch_size) -> int without _component_"
        )


def check_signature(key: str, function: Callable[..., Any]) -> None:
    """Raise IncreaseFunctionError if ``function`` cannot be called as increase functions are, or is their factory."""
    if getattr(function, "__module__", None) == _FACTORIES and "<locals>" not in function.__qualname__:
        raise IncreaseFunctionError(
            f"{key} is a factory that returns an increase function: call it, {function.__name__}(), with its "
            "arguments, if any"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature; the first call will tell
        return
    try:
        signature.bind(0, 1, **{"state": None} if takes_state(function) else {})
    except TypeError as error:
        raise IncreaseFunctionError(
            f"{key} has the signature {signature} and cannot be called with (epoch, current_batch_size), with or "
            f"without state: {error}"
        ) from None
