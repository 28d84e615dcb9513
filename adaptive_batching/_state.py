"""The state that is put back after user code has run outside a step that counts: what is declared, and nothing else.

Nothing is searched for. Whatever else the code changes stays changed; :mod:`adaptive_batching._undeclared` reports it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batching._device import RandomState
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._tensors import hash_of, is_plain, plain_parts, same_bits, size_of, version_of
from adaptive_batching._values import ConfigError

rehearsing = False
"""True within a :func:`rehearsal`, for those who count what a program runs."""

SMALL = 2**20
"""Bytes of a tensor that is copied in each step, whether or not earlier ones have changed it."""

_COPIED_PARAMETERS = 2**28  # bytes of parameters that a rehearsal copies, the smallest first; others are only compared
_NUMBERS = {bool, int, float, complex, type(None)}
_HOW_TO_DECLARE = (
    "pass the objects that hold them in state=[...], with state_dict and load_state_dict, or keep the values in "
    "buffers of a module"
)


class Reported:
    """Shared by the states of a run, in which undeclared side effects are reported once."""

    is_done = False


class State:
    """The declared state, which user code may change. A step saves it, and puts it back before its samples run again.

    Declared are the modules of models and losses with their parameters, gradients, buffers and training modes; numbers
    and small tensors that are attributes of a trainer, and of modules with buffers, which they may describe; generators
    of random numbers; and what is listed.

    Args:
        models: The models that run.
        losses: Functions by their names. Their modules are the object itself, which may be one whose method it is, and
            attributes of that object.
        draws: Collate functions and data sets, whose attributes may be generators of random numbers.
        trainer: Has models as attributes.
        listed: Objects with ``state_dict`` and ``load_state_dict``.
        how_to_declare: What to do about a change that is not declared, in words.
        reported: Shared by states of one run; None for one of its own.

    Raises:
        ConfigError: If a listed object has no such methods.
    """

    def __init__(
        self,
        models: Iterable[nn.Module] = (),
        *,
        losses: Mapping[str, Any] | None = None,
        draws: Iterable[Any] = (),
        trainer: Any = None,
        listed: Iterable[Any] = (),
        how_to_declare: str = _HOW_TO_DECLARE,
        reported: Reported | None = None,
    ) -> None:
        self.how_to_declare = how_to_declare
        self.models, self.draws, self.trainer, self.listed = [*models], [*draws], trainer, [*listed]
        self.losses = {name: owner_of(function) for name, function in (losses or {}).items()}
        for each in self.listed:
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise ConfigError(
                    f"state has {each!r:.60}, of {type(each).__name__}, which has no state_dict and load_state_dict to "
                    "be put back by; give the class these two methods"
                )
        self._large: dict[int, tuple[torch.Tensor, bool]] = {}  # of the last step, by number: if that has changed it
        self._constant: dict[int, Kept] | None = None  # small ones that the first step has left as they were, by number
        self._saved: Saved | None = None
        self.reported = Reported() if reported is None else reported
        """Its ``is_done`` is True once undeclared side effects have been looked for."""

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of models and losses."""
        roots: list[Any] = [*self.models, *_vars(self.trainer).values()]
        for owner in self.losses.values():
            roots += [owner, *_vars(owner).values()]
        found: dict[nn.Module, None] = {}
        for root in roots:
            if isinstance(root, nn.Module) and root not in found:
                found.update(dict.fromkeys(root.modules()))
        return [*found]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, also attributes of a loss or a trainer, such as a temperature that is learned."""
        owners = (*self.losses.values(), self.trainer)
        found: list[Any] = [each for owner in owners for each in _vars(owner).values()]
        found += [each for module in self.modules for each in module._parameters.values()]
        return list({id(each): each for each in found if isinstance(each, nn.Parameter)}.values())

    def save(self) -> None:
        """Save what a step may change besides gradients and random numbers of the process.

        Large tensors are copied if the last step has changed them, small ones in every step. Small ones that the first
        step has left unchanged have a copy on the host, which is used until something writes to them. Parameters that
        are not trained count if they are few, such as codebooks: many are the weights below adapters, or a reference.
        """
        self._saved = Saved(self)
        for kept in self._saved.kept:
            tensor, has_changed = self._large.get(id(kept.tensor), (None, True))
            constant = (self._constant or {}).get(id(kept.tensor))
            if has_changed and not (constant is not None and kept.take_copies(constant)):
                kept.copy(on_host=self._constant is None or (kept.is_large and tensor is None))

    def put_back(self) -> None:
        if self._saved is not None:
            self._saved.put_back()

    def end(self, *, put_back: bool = False) -> None:
        """Forget what was saved; the step stands, unless it is ``put_back``."""
        if self._saved is not None:
            self._large = {}
            for kept in self._saved.kept:
                if kept.is_large:
                    self._large[id(kept.tensor)] = kept.tensor, kept.has_changed
            if self._constant is None and self._saved.kept:
                small = [kept for kept in self._saved.kept if not kept.is_large and not kept.tensor.is_inference()]
                # A normalization writes to its running mean without counting that in the tensor's version.
                uncounted = {id(each) for one in self.modules if hasattr(one, "running_mean") for each in one.buffers()}
                constant = [kept for kept in small if id(kept.tensor) not in uncounted and not kept.has_changed]
                self._constant = {id(kept.tensor): kept for kept in constant}
        if put_back:
            self.put_back()
        self._saved = None


class Saved:
    """A record of the declared state as it is now, to put it back later.

    Args:
        state: What is declared.
        parameters: Those whose values are kept; None for those that are not trained, if these are little of all.
        optimizers: Have states and groups that are kept.
        elsewhere: Tensors whose values somebody else puts back.
    """

    def __init__(
        self,
        state: State,
        parameters: Iterable[nn.Parameter] | None = None,
        *,
        optimizers: Iterable[Optimizer] = (),
        elsewhere: Iterable[torch.Tensor] = (),
    ) -> None:
        self._modes: list[tuple[nn.Module, bool]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._numbers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._tensors: list[Any] = []
        weights: list[nn.Parameter | None] = []
        for module in state.modules:
            self._modes.append((module, module.training))
            weights += module._parameters.values()
            if module._buffers:
                self._note(module._buffers)
                self._note_numbers(vars(module))
        if state.trainer is not None:
            self._note_numbers(vars(state.trainer))
        for optimizer in optimizers:
            self._note_numbers(vars(optimizer))
            self._note((optimizer.state, optimizer.param_groups))
        is_checked = parameters is not None  # a step is not: hashes of all frozen weights would take long
        if parameters is None:
            of_all = [each for each in weights if each is not None]
            frozen = [each for each in of_all if not each.requires_grad]
            are_few = frozen and 2 * sum(map(size_of, frozen)) < sum(map(size_of, of_all))
            parameters = frozen if are_few else []
        skipped = set(map(id, elsewhere))
        self._compared: list[tuple[nn.Parameter, int]] = []
        left = _COPIED_PARAMETERS
        for parameter in sorted(parameters, key=size_of):
            left -= 0 if id(parameter) in skipped else size_of(parameter)
            if left >= 0:
                self._tensors.append(parameter)
            elif is_checked:
                self._compared.append((parameter, hash_of(parameter)))
        tensors = {id(each): each for each in self._tensors if id(each) not in skipped}
        self.kept = [Kept(each) for each in tensors.values()]
        """Tensors that get back their places; their values as well once they are copied."""

        self._put_back_draws = _generators_of(state.draws)
        self._listed = [(each, _copied(each.state_dict())) for each in state.listed]

    def _note_numbers(self, space: dict[str, Any]) -> None:
        """Note attributes that are numbers or small tensors."""
        numbers: dict[str, Any] = {}
        for name, value in space.copy().items():  # a thread may add some
            if is_number(value):
                numbers[name] = value
                if isinstance(value, torch.Tensor):
                    self._tensors.append(value)
        self._numbers.append((space, numbers))

    def _note(self, value: Any) -> None:
        """Note what containers hold, and the tensors within, other than parameters."""
        if isinstance(value, torch.Tensor):
            self._tensors += [] if isinstance(value, nn.Parameter) else [value]
        elif isinstance(value, (dict, list, tuple)):
            if not isinstance(value, tuple):
                self._containers.append((value, list(value.items()) if isinstance(value, dict) else list(value)))
            for each in value.values() if isinstance(value, dict) else value:
                self._note(each)

    def put_back(self) -> None:
        for module, training in self._modes:
            module.training = training
        for container, entries in self._containers:
            container.clear()
            (container.update if isinstance(container, dict) else container.extend)(entries)
        for space, numbers in self._numbers:
            for name in [*space]:  # a new flag may say that a library has set hooks, which stay
                if name not in numbers and type(space[name]) is not bool and is_number(space[name]):
                    del space[name]
            for name, value in numbers.items():
                if value is not None or is_number(space.get(name)):  # an object made in place of None stays
                    space[name] = value
        for kept in self.kept:
            kept.put_back()
        self._put_back_draws()
        for each, saved in self._listed:
            each.load_state_dict(_copied(saved))

    def check(self) -> None:
        """Raise ConfigError if a parameter has changed that is too large to be put back."""
        changed = [parameter for parameter, before in self._compared if hash_of(parameter) != before]
        if changed:
            raise ConfigError(
                f"a forward pass changes parameters of the model ({len(changed)}, the first of shape "
                f"{tuple(changed[0].shape)}), so that each part of a batch would meet another model; change them "
                "between steps, or train without adaptive batching"
            )


class Kept:
    """A tensor and where its memory was; with copies, also its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.parts, self.is_large = tensor, plain_parts(tensor), size_of(tensor) > SMALL
        self._alias = tensor.detach() if is_plain(tensor) else None
        self._requires_grad, self._version = tensor.requires_grad, version_of(tensor)
        self._places = [(part.data_ptr(), part.shape) for part in self.parts]
        self._copies: list[torch.Tensor] = []
        self._are_older = False  # the copies
        self._hash = 0

    def take_copies(self, older: Kept) -> bool:
        """Take the copies of another time; return False if the tensor was written to since, or its memory moved."""
        if (self._version, self._places) != (older._version, older._places):
            return False
        self._copies, self._are_older = older._copies, True
        return True

    def copy(self, *, on_host: bool) -> None:
        self._hash = hash_of(self.tensor) if self.is_large else 0
        try:
            self._copies = [part.detach().to("cpu" if on_host else part.device, copy=True) for part in self.parts]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._copies = [part.detach().to("cpu", copy=True) for part in self.parts]

    @property
    def has_changed(self) -> bool:
        """True if bits have changed; of large tensors, also if they were written to, which ``.data`` does not show.

        For the same reason copies of an earlier step may be stale, and count only if something was written since.
        """
        is_written = version_of(self.tensor) != self._version
        if self.is_large:
            return is_written or (bool(self._copies) and hash_of(self.tensor) != self._hash)
        return (is_written or not self._are_older) and not all(map(same_bits, self.parts, self._copies))

    def put_back(self) -> None:
        tensor, alias = self.tensor, self._alias
        if alias is not None and (tensor.data_ptr(), tensor.shape) != (alias.data_ptr(), alias.shape):
            tensor.data = alias
        if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        if self._copies and self.has_changed:  # a write to others would break a backward that is still to come
            for part, saved in zip(self.parts, self._copies, strict=True):
                with torch.inference_mode(part.is_inference()), torch.no_grad():
                    part.copy_(saved)


@contextlib.contextmanager
def rehearsal(state: State, device: torch.device, trained: Sequence[nn.Parameter] = ()) -> Iterator[Callable[[], None]]:
    """Run code of the user's inside, outside its own step, and put back what is declared: all of it passes here.

    Gives a function that puts it back already, to run again from the same state, random numbers included. Gradients of
    ``trained`` and of the modules are laid aside, so that a backward inside makes its own. Samples that the code gets
    are for the caller to copy.

    Raises:
        ConfigError: If the code changes parameters that are too large to be put back.
    """
    parameters = list({id(parameter): parameter for parameter in (*trained, *state.parameters)}.values())
    saved, random_state = Saved(state, parameters), RandomState(device)
    for kept in saved.kept:
        kept.copy(on_host=True)
    gradients = [(parameter, parameter.grad) for parameter in parameters]

    def start_over() -> None:
        saved.put_back()
        random_state.put_back()
        torch.clear_autocast_cache()  # copies of weights that are put back, or without a graph, in a caller's context
        for parameter in parameters:
            parameter.grad = None

    for parameter in parameters:
        parameter.grad = None
    global rehearsing
    around, rehearsing = rehearsing, True
    try:
        yield start_over
    finally:
        rehearsing = around
        start_over()
        for parameter, gradient in gradients:
            parameter.grad = gradient
    saved.check()


@contextlib.contextmanager
def draws_put_back(*owners: Any) -> Iterator[None]:
    """Put back generators of random numbers that collate functions or data sets have as attributes."""
    put_back = _generators_of(owners)
    try:
        yield
    finally:
        put_back()


def parameters_of(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return the parameters of ``model``, and those that ``optimizers`` have from elsewhere, such as a loss's own."""
    found = dict.fromkeys(model.parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.update(dict.fromkeys(group["params"]))
    return [*found]


def owner_of(function: Any) -> Any:
    """Return the object that computes: that of a method, and what a partial function calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return function.__self__ if isinstance(function, types.MethodType) else function


def _vars(owner: Any) -> dict[str, Any]:
    return {} if isinstance(owner, type) else getattr(owner, "__dict__", {})


def is_number(value: Any) -> bool:
    """Return True for a number or a small tensor."""
    return type(value) in _NUMBERS or (isinstance(value, torch.Tensor) and size_of(value) <= SMALL)


def _generators_of(owners: Iterable[Any]) -> Callable[[], None]:
    """Return what puts back generators that are attributes of ``owners`` now, and drops those made in place of None."""
    states: list[tuple[dict[str, Any], str, Any, Any]] = []
    for owner in owners:
        while owner is not None:
            arguments = owner.keywords if isinstance(owner, functools.partial) else {}
            for space in (arguments, _vars(owner_of(owner))):
                for name, value in space.items():
                    access = _access(value)
                    if value is None or access is not None:
                        states.append((space, name, access, None if access is None else access[0]()))
            owner = getattr(owner, "dataset", None)  # of which it is a subset

    def put_back() -> None:
        for space, name, access, state in states:
            if access is not None:
                access[1](state)
            elif _access(space.get(name)) is not None:
                space[name] = None

    return put_back


def _access(value: Any) -> Any:
    """Return what reads and what sets the state of a generator of random numbers; None for anything else."""
    numpy_random = sys.modules.get("numpy.random")  # numpy is optional
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
        return value.getstate, value.setstate
    if numpy_random is not None and isinstance(value, numpy_random.RandomState):
        return value.get_state, value.set_state
    if numpy_random is not None and isinstance(value, numpy_random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


def _copied(value: Any) -> Any:
    """Return a copy that shares nothing; ``copy.deepcopy`` takes no tensors that have a graph."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else copy.deepcopy(value)
