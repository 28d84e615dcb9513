"""A glance at what code of the user's changes besides the state that is declared, to say so in one line."""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from adaptive_batching._state import SMALL, State, is_number
from adaptive_batching._tensors import is_plain, same_bits, size_of, version_of

log = logging.getLogger(__name__)

_PLAIN = (bool, int, float, complex, str)
_CONTAINERS = (dict, list, set, collections.deque)
_OF_ANY_MODULE = {*vars(nn.Module())}
_MOST_NAMED = 5


@contextlib.contextmanager
def reporting(state: State, *others: Any) -> Iterator[None]:
    """Warn in one line, once, of attributes that have changed on exit, as nobody has put them back.

    They are those of modules and losses of ``state``, of its trainer, and of ``others``. Compared is what they show:
    numbers, sizes of containers, tensors.
    """
    if state.reported.is_done:
        yield
        return
    state.reported.is_done = True
    before = _seen(state, others)
    yield
    after = _seen(state, others)
    changes = []
    for name, value in before.items():
        if change := _in_words(name, value, after.get(name)):
            changes.append(change)
    if changes:
        more = f" and {len(changes) - _MOST_NAMED} more" if len(changes) > _MOST_NAMED else ""
        log.warning(
            "your code has run outside training steps, in checks or a probe, and these side effects were not undone: "
            "%s%s. If they matter, %s", ", ".join(changes[:_MOST_NAMED]), more, state.how_to_declare,
        )  # fmt: skip


def _seen(state: State, others: tuple[Any, ...]) -> dict[str, Any]:
    roots: list[tuple[str, Any]] = [("model", model) for model in state.models]
    roots += [*state.losses.items(), ("trainer", state.trainer)]
    roots += [(type(other).__name__, other) for other in others]
    roots += [
        (f"{name}.{attribute}", value)
        for name, root in roots
        for attribute, value in getattr(root, "__dict__", {}).items()
        if isinstance(value, nn.Module)
    ]
    owners: dict[int, tuple[str, Any]] = {}
    for name, root in roots:
        owners.setdefault(id(root), (name, root))
        for path, module in root.named_modules() if isinstance(root, nn.Module) else ():
            owners.setdefault(id(module), (f"{name}.{path}", module))
    seen, listed = {}, {*map(id, state.listed)}
    for name, owner in owners.values():
        for attribute, value in [*getattr(owner, "__dict__", {}).items()]:
            is_listed = id(owner) in listed or id(value) in listed
            is_declared = owner is state.trainer and is_number(value)  # which we set ourselves, too
            if not (is_listed or is_declared) and attribute not in _OF_ANY_MODULE:
                seen[f"{name}.{attribute}"] = _glance(value)
    return seen


def _glance(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_small = is_plain(value) and size_of(value) <= SMALL
        return value.detach().clone() if is_small else (id(value), version_of(value))
    return [len(value)] if isinstance(value, _CONTAINERS) else value if type(value) in _PLAIN else None


def _in_words(name: str, before: Any, now: Any) -> str:
    """Say how an attribute has changed; empty if it has not, or is another kind of thing now."""
    if type(before) is not type(now) or before is None:
        return ""
    if isinstance(now, list):
        by = now[0] - before[0]
        return f"{name} grew by {by}" if by > 0 else f"{name} lost {-by}" if by else ""
    if isinstance(now, torch.Tensor):
        return "" if same_bits(now, before) else f"{name} has other values"
    if isinstance(now, tuple):
        return "" if before == now else f"{name} has other values"
    return "" if before == now else f"{name} went from {before!r:.40} to {now!r:.40}"
