"""One snapshot of all that a run of somebody's code can change.

Nothing is listed that may change: a snapshot walks what can be reached from some owners (models, optimizers, a trainer,
a loss function), through attributes, containers, closures and the globals that a function names. It keeps which objects
are where, and the values of tensors, arrays and generators of random numbers.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import Dataset

from adaptive_batching._device import RandomState
from adaptive_batching._kept_values import (
    HasState,
    KeptTensor,
    Place,
    entries_of,
    hash_of,
    holder_of,
    is_as,
    refill,
    same_state,
    shallow,
)
from adaptive_batching._values import ConfigError

rehearsing = False
"""True within a :func:`rehearsal`, for those who count what a program runs."""

# Objects of these are not looked into: they are large, or belong to the process. Of everybody else's they are.
_LIBRARIES = {
    "PIL", "accelerate", "adaptive_batching", "bitsandbytes", "builtins", "concurrent", "datasets",
    "deepspeed", "huggingface_hub", "lightning", "logging", "multiprocessing", "numpy", "omegaconf", "pandas",
    "peft", "queue", "safetensors", "tensorboard", "threading", "tokenizers", "torch", "torchao", "torchtune",
    "tqdm", "transformers", "trl", "wandb",
}  # fmt: skip
_NAMES_OF_DATA = ("dataset", "dataloader", "data_loader")  # which may be lists, and draw when they are read
_COPIED_PARAMETERS = 2**28  # bytes of parameters that are copied, the smallest first; others are only compared
_LONG = 1000  # entries of a container beyond which its tensors are not copied, outside of models and optimizers
_DATA = 20_000  # entries in such containers beyond which they are taken for data
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_THREADS = {"_queue", "_thread", "asyncio", "concurrent", "multiprocessing", "queue", "threading"}
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_SMALL = 2**16  # bytes of a tensor that is copied in each step, whether or not it has changed before
_NOTHING = object()
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


class Snapshot:
    """A record of everything that can be reached from ``owners``, to compare with later and to restore.

    An owner is looked into whatever it is. What it leads to is not if it is a data set, an object of a library other
    than a module, or an optimizer, unless the owner is one, which may wrap another. The largest parameters, beyond
    256 MiB, are not copied, nor are tensors in containers of more than 1,000 entries, other than those of modules and
    optimizers; :meth:`check_uncopied` compares them. Such containers of more than 20,000 are not looked into.

    What another thread can change meanwhile is not kept, as putting it back would undo what that has done: whatever the
    function of a running thread can reach, and attributes of objects that have a thread, a lock, a queue or a pool.
    Modules are, all the same.

    Args:
        owners: Where to begin.
        places: What to look at in addition.
        skipped: Modules that are not looked into.
        elsewhere: Tensors whose values somebody else puts back, such as parameters that an optimizer steps.
        looks_into_long: False to leave out what is in containers of more than 1,000 entries, other than those of
            modules and optimizers.
        is_of_threads: True to note what other threads can reach, which leads to no module and takes no copies.
        looks_into_hooks: True to look into functions that objects and modules have, such as hooks.
        copied: Numbers of tensors of no module that are copied; None for all. Small ones are, in any case.
        copies: Where copies of tensors go: ``"here"``, on the ``"host"``, or ``"nowhere"``, for a caller who keeps the
            values of :attr:`tensors`.
    """

    def __init__(
        self,
        owners: Iterable[Any] = (),
        *,
        places: Iterable[Place] = (),
        skipped: Iterable[nn.Module] = (),
        elsewhere: Iterable[torch.Tensor] = (),
        looks_into_long: bool = True,
        looks_into_hooks: bool = False,
        is_of_threads: bool = False,
        copied: Collection[int] | None = None,
        copies: str = "here",
    ) -> None:
        self._elsewhere = {id(tensor) for tensor in elsewhere}
        self._left_in_long, self._is_in_long = _DATA if looks_into_long else 0, False
        self._copied = copied
        self._looks_into_hooks, self._is_of_threads = looks_into_hooks, is_of_threads
        self._shared = set() if is_of_threads else _shared_with_threads()
        self._follows_optimizers = False  # whose states are large, and which no forward or backward changes
        # Keeps what it has seen alive, so that no other object gets its number.
        self._seen: dict[int, Any] = {id(module): module for module in skipped}
        self._containers: list[tuple[Any, Any, Place | None]] = []
        self._of_modules: list[tuple[nn.Module, dict[str, Any]]] = []  # each with the saved copy of its vars
        self._attributes: list[tuple[MutableMapping[str, Any], str, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._states: list[tuple[HasState, Any, Place | None, int]] = []
        self._kept: list[KeptTensor] = []
        self._versions: list[tuple[torch.Tensor, int]] = []  # of tensors that are not copied
        self._parameters: list[tuple[nn.Parameter, Place | None]] = []
        self._loose: dict[int, nn.Parameter] = {}  # of no module, as far as has been seen
        for owner in owners:
            self._follows_optimizers = isinstance(owner, Optimizer)
            self._look_into(owner)
        if is_of_threads:
            return
        for module, name in places:
            self._look_at_place(module, name)
        self._parameters += [(parameter, None) for key, parameter in self._loose.items() if key not in self._seen]
        self._hashes: list[tuple[nn.Parameter, int]] = []
        left = _COPIED_PARAMETERS
        for parameter, place in sorted(self._parameters, key=lambda pair: pair[0].nbytes):
            if id(parameter) in self._elsewhere:
                continue
            left -= parameter.nbytes
            if left >= 0:
                self._keep(parameter, place)
            else:
                self._hashes.append((parameter, hash_of(parameter)))
        if copies != "nowhere":
            for kept in self._kept:
                if self._is_copied(kept.tensor, kept.place):
                    kept.copy(on_host=copies == "host")

    @property
    def reached(self) -> set[Any]:
        """The numbers of objects, containers and cells, and the globals by number and name, that have been seen."""
        cells, names = (id(cell) for cell, _ in self._cells), ((id(space), name) for space, name, _ in self._attributes)
        return {*self._seen, *cells, *names}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Plain tensors whose values are kept, or are to be."""
        return [part for kept in self._kept for part in kept.parts]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters that have been seen."""
        return [parameter for parameter, _ in self._parameters]

    @property
    def modules(self) -> list[nn.Module]:
        """All modules that have been looked into."""
        return [module for module, _ in self._of_modules]

    def changed(self) -> set[Place]:
        """Return the places of modules where something is no longer as it was."""
        places: set[Place | None] = set()
        for module, saved in self._of_modules:
            for now, before in [(vars(module), saved), (module._buffers, saved["_buffers"])]:
                names = {**before, **now}
                places |= {(module, n) for n in names if before.get(n, _NOTHING) is not now.get(n, _NOTHING)}
        places -= {(module, name) for module, _ in self._of_modules for name in ("_buffers", "_parameters", "_modules")}
        places |= {place for container, saved, place in self._containers if not is_as(container, saved)}
        places |= {place for holder, state, place, _ in self._states if not same_state(holder.get(), state)}
        places |= {kept.place for kept in self._kept if kept.has_changed}
        return {place for place in places if place is not None}

    def written(self) -> set[int]:
        """Return the numbers of tensors and arrays of no module that have been written to."""
        arrays = {number for holder, state, _, number in self._states if not same_state(holder.get(), state)}
        return arrays | {id(kept.tensor) for kept in self._kept if kept.place is None and kept.was_written}

    def check_uncopied(self) -> None:
        """Raise ConfigError if a parameter or another tensor has changed that is not copied."""
        changed = [parameter for parameter, before in self._hashes if hash_of(parameter) != before]
        if changed:
            raise ConfigError(
                f"a forward pass changes parameters of the model ({len(changed)}, the first of shape "
                f"{tuple(changed[0].shape)}), so that each part of a batch would meet another model; change them "
                "between steps, or train without adaptive batching"
            )
        others = [tensor for tensor, version in self._versions if tensor._version != version]
        if others:  # unless they are views of what is put back, as in a state_dict
            known = [*(parameter for parameter, _ in self._parameters), *self.tensors]
            storages = {_storage_of(tensor) for tensor in known}
            others = [tensor for tensor in others if _storage_of(tensor) not in storages]
        if others:
            raise ConfigError(
                f"the loss changes tensors in place in a list or dictionary of more than {_LONG:,} entries "
                f"({len(others)}, the first of shape {tuple(others[0].shape)}), which are too many to be put back "
                "after a trial; keep them in one tensor, or in a module as buffers"
            )

    def put_back(self) -> None:
        """Make everything as it was, but for values of tensors that are not copied."""
        for container, saved, _ in self._containers:
            if not is_as(container, saved):
                refill(container, saved)
        for space, name, value in self._attributes:
            if value is _NOTHING:
                space.pop(name, None)
            elif space.get(name, _NOTHING) is not value:
                space[name] = value
        for cell, value in self._cells:
            cell.cell_contents = value
        for holder, state, *_ in self._states:
            holder.set(state)
        for kept in self._kept:
            kept.put_back()

    def put_back_generators(self) -> None:
        """Make generators of random numbers as they were, and drop those that have been made since in place of None."""
        for holder, state, *_ in self._states:
            holder.set(state)
        for container, saved, _ in self._containers:
            for name in saved if isinstance(saved, dict) else ():
                if saved[name] is None and holder_of(container.get(name)) is not None:
                    container[name] = None

    # What leads where

    def _look_into(self, owner: Any) -> None:
        if isinstance(owner, nn.Module):
            for module in owner.modules():
                self._look_into_module(module)
        elif isinstance(owner, functools.partial):
            self._look_at_or_into(owner)
        elif isinstance(owner, types.MethodType):
            self._look_into(owner.__self__)
            self._look_into(owner.__func__)
        elif isinstance(owner, types.FunctionType):
            self._look_into_function(owner)
        elif hasattr(owner, "__dict__") and not isinstance(owner, _CODE) and id(owner) not in self._seen:
            self._seen[id(owner)] = owner
            self._look_into_object(owner, None)

    def _look_into_module(self, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        space = vars(module)
        saved = {**space, "_buffers": dict(module._buffers)}
        self._of_modules.append((module, saved))
        self._containers.append((space, dict(space), None))
        for name, value in space.items():
            if name == "_buffers":
                self._containers.append((value, dict(value), None))
                for of_buffer, buffer in value.items():
                    self._look_at(buffer, (module, of_buffer))
            elif name == "_parameters":
                # FSDP puts what it has gathered there, and takes it away again.
                if not any(isinstance(parameter, DTensor) for parameter in value.values()):
                    self._containers.append((value, dict(value), None))
                for of_parameter, parameter in value.items():
                    if parameter is not None and id(parameter) not in self._seen:
                        self._seen[id(parameter)] = parameter
                        self._parameters.append((parameter, (module, of_parameter)))
                        for hooks in _HOOKS_OF_TENSORS if self._looks_into_hooks else ():
                            self._look_at(getattr(parameter, hooks, None), None)
            elif name == "_modules":
                self._containers.append((value, dict(value), None))
            else:
                self._look_at(value, (module, name))

    def _look_at_place(self, module: nn.Module, name: str) -> None:
        parameter = module._parameters.get(name)
        if parameter is not None:
            self._keep(parameter, (module, name))
            return
        space = module._buffers if name in module._buffers else vars(module)
        value = space.get(name, _NOTHING)
        self._attributes.append((space, name, value))
        self._look_at(value, (module, name))

    def _look_into_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen[id(function)] = function
        is_of_library = _library_of(function) in _LIBRARIES  # such as a decorator's, around a function of somebody else
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is still empty
                if not is_of_library and id(cell) not in self._shared:
                    self._cells.append((cell, cell.cell_contents))
                if not is_of_library or callable(cell.cell_contents):
                    self._look_at_or_into(cell.cell_contents)
        if is_of_library:
            return
        names = {name for code in _codes_of(function.__code__) for name in code.co_names}
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            is_shared = (id(function.__globals__), name) in self._shared
            if not is_shared and not isinstance(value, (type, types.ModuleType)):
                self._attributes.append((function.__globals__, name, value))
                self._look_at_or_into(value)
        self._look_at(function.__dict__, None)

    def _look_at_or_into(self, value: Any) -> None:
        """Look at what a function uses: also into other functions."""
        if isinstance(value, types.FunctionType):
            self._look_into_function(value)
        elif isinstance(value, types.MethodType):
            self._look_at(value.__self__, None)
            self._look_at_or_into(value.__func__)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._look_at_or_into(part)
        else:
            self._look_at(value, None)

    def _look_into_object(self, value: Any, place: Place | None) -> None:
        kinds = {_library_of(each) for each in vars(value).values()}
        if not self._is_of_threads and (id(value) in self._shared or kinds & _OF_THREADS):
            for each in [each for each in vars(value).values() if isinstance(each, nn.Module)]:
                self._look_at(each, place)
        else:
            self._look_into_attributes(vars(value), place)

    def _look_into_attributes(self, space: dict[str, Any], place: Place | None) -> None:
        self._containers.append((space, dict(space), place))
        for name, value in list(space.items()):
            if not any(data in name for data in _NAMES_OF_DATA):
                self._look_at(value, place)

    def _look_at(self, value: Any, place: Place | None) -> None:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type)) or id(value) in self._seen:
            return
        if isinstance(value, nn.Module) and self._is_of_threads:
            for name, each in vars(value).items():
                if not name.startswith("_"):
                    self._look_at(each, None)
            return
        if id(value) in self._shared:
            if not isinstance(value, _CONTAINERS) and _is_looked_into(value) and hasattr(value, "__dict__"):
                self._seen[id(value)] = value
                self._look_into_object(value, place)
            return
        if isinstance(value, _CONTAINERS):  # first, as there are many
            self._seen[id(value)] = value
            if not isinstance(value, (tuple, frozenset)):
                self._containers.append((value, shallow(value), place))
            self._look_at_entries(value, place)
            return
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._look_into_module(module)
            return
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            if self._looks_into_hooks:
                self._look_at_or_into(value)
            return
        if isinstance(value, nn.Parameter) and place is None:
            if not self._follows_optimizers:  # whose groups name what others put back
                self._loose[id(value)] = value
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Parameter):
            self._parameters.append((value, place))
        elif isinstance(value, torch.Tensor):
            self._keep(value, place)
        elif (holder := holder_of(value)) is not None:
            if self._is_copied(value, place):
                self._states.append((holder, holder.get(), place, id(value)))
        elif isinstance(value, Optimizer):
            if self._follows_optimizers:
                self._look_into_attributes(vars(value), place)
        elif hasattr(value, "__dict__") and _is_looked_into(value):
            self._look_into_object(value, place)

    def _look_at_entries(self, container: Any, place: Place | None) -> None:
        entries, around = entries_of(container), self._is_in_long
        if (around or len(entries) > _LONG) and place is None and not self._follows_optimizers:
            if len(entries) > self._left_in_long:
                return
            self._left_in_long -= len(entries)
            self._is_in_long = True
        for entry in entries:
            self._look_at(entry, place)
        self._is_in_long = around

    def _is_copied(self, value: Any, place: Place | None) -> bool:
        """Return True for a tensor or an array that is small, of a module, or known to change."""
        is_small = place is not None or getattr(value, "nbytes", 0) <= _SMALL
        return self._copied is None or is_small or id(value) in self._copied

    def _keep(self, tensor: torch.Tensor, place: Place | None) -> None:
        if id(tensor) in self._elsewhere:
            return
        if not self._is_in_long or place is not None:
            self._kept.append(KeptTensor(tensor, place))
        elif not tensor.is_inference():  # which has no version
            self._versions.append((tensor, tensor._version))


def _shared_with_threads() -> set[Any]:
    """Return what other threads can reach: what they run, as far as it is not a library's, and what they were given."""
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    if not others:
        return set()
    owners = [owner for thread in others for owner in (thread, type(thread).run)]
    return Snapshot(owners, looks_into_long=False, looks_into_hooks=True, is_of_threads=True).reached


class StepState:
    """The state, gradients aside, that the parts of a step change, restored before they run again.

    It is learned rather than listed.

    In the first step, and in one after :meth:`look_again`, all modules are watched; from then on, what has changed then
    is saved, and whatever else than a module can be reached from ``owners``. Of that, a large tensor is copied once a
    step has written to it. Parameters that are trained are left out, and all of them where most are not.
    """

    def __init__(self, owners: Sequence[Any]) -> None:
        self.owners = owners
        self._places: set[Place] = set()
        self._modules: list[nn.Module] = []
        self._written: set[int] = set()
        self._watches = True
        self._snapshot = Snapshot()

    def look_again(self) -> None:
        """Watch the next step."""
        self._watches = True

    def save(self) -> None:
        if self._watches:
            parameters = _parameters_of(self.owners)
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            # Few that are not may be codebooks, which forwards change; many are weights of LoRA or of a reference.
            left_out = trained if 2 * len(trained) > len(parameters) else parameters
            self._snapshot = Snapshot(self.owners, elsewhere=left_out, copies="host")
        else:
            self._snapshot = Snapshot(
                self.owners, places=self._places, skipped=self._modules, looks_into_long=False, copied=self._written
            )  # fmt: skip

    def put_back(self) -> None:
        self._snapshot.put_back()

    def end(self, *, put_back: bool = False) -> None:
        """Note what has changed, when all parts have run; the step stands, unless it is ``put_back``."""
        if self._watches:
            self._places |= self._snapshot.changed()
            self._modules = self._snapshot.modules
            self._watches = False
        self._written |= self._snapshot.written()
        if put_back:
            self._snapshot.put_back()
        self._snapshot = Snapshot()


@contextlib.contextmanager
def rehearsal(
    owners: Sequence[Any], device: torch.device, trained: Sequence[nn.Parameter] = ()
) -> Iterator[Callable[[], None]]:
    """Run somebody's code inside, outside its own step, so that nothing of it stays: all of it passes here.

    Gives a function that puts everything back already, to run again from the same state, random numbers included.
    Gradients of ``trained`` and of the owners' modules are laid aside, so that a backward inside makes its own. Samples
    that the code gets are for the caller to copy.

    Raises:
        ConfigError: If the code changes parameters that are too large to be put back.
    """
    parameters = list({id(parameter): parameter for parameter in (*trained, *_parameters_of(owners))}.values())
    snapshot, random_state = Snapshot(owners, copies="host"), RandomState(device)
    gradients = [(parameter, parameter.grad) for parameter in parameters]

    def start_over() -> None:
        snapshot.put_back()
        random_state.put_back()
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
    snapshot.check_uncopied()


@contextlib.contextmanager
def draws_put_back(function: Any, model: nn.Module) -> Iterator[None]:
    """Put back the generators of random numbers that ``function`` has, such as a collate function that masks.

    What else it has stays as it is, and ``model``, which it may have, is not looked into.
    """
    snapshot = Snapshot([function], skipped=model.modules(), copies="nowhere")
    try:
        yield
    finally:
        snapshot.put_back_generators()


@contextlib.contextmanager
def without_hooks(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Step ``optimizers`` inside without the hooks that somebody has registered: they count steps, or log them."""
    hooks: list[Any] = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    for wrapped in optimizers:  # Accelerate's and Fabric's wrap one
        for optimizer in (wrapped, getattr(wrapped, "optimizer", None), getattr(wrapped, "_optimizer", None)):
            own = getattr(optimizer, "__dict__", {})
            names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
            hooks += [own[name] for name in names if name in own and all(own[name] is not one for one in hooks)]
    saved = [dict(hook) for hook in hooks]
    for of_one in hooks:
        of_one.clear()
    try:
        yield
    finally:
        for of_one, before in zip(hooks, saved, strict=True):
            of_one.clear()
            of_one.update(before)


def _parameters_of(owners: Iterable[Any]) -> list[nn.Parameter]:
    parameters: list[nn.Parameter] = []
    for value in (value for owner in owners for value in (owner, *getattr(owner, "__dict__", {}).values())):
        if isinstance(value, nn.Module):
            parameters += value.parameters()
        elif isinstance(value, nn.Parameter):  # such as a temperature that a loss learns
            parameters.append(value)
    return list({id(parameter): parameter for parameter in parameters}.values())


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of a wrapper
        return None


def _library_of(value: Any) -> str:
    if isinstance(value, types.FunctionType):  # whose __module__ is that of what it wraps
        module = value.__globals__.get("__name__")
    else:
        module = getattr(type(value), "__module__", None)
    return str(module).partition(".")[0]


def _is_looked_into(value: Any) -> bool:
    """Return False for code, for objects of libraries, and for data: nothing that a step changes, and large."""
    kind = type(value)
    is_data = hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and not isinstance(value, Mapping)
    return not (isinstance(value, (*_CODE, Dataset)) or is_data or _library_of(value) in _LIBRARIES)


def _codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_of(constant)
