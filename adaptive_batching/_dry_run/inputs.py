"""The inputs of a script's model: whether those of a step are larger than any before, and which samples they are."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from adaptive_batching._dry_run.process_work import Counts

MOST_BATCHES = 4  # that loaders handed out last: some fetch a batch ahead
ROUNDING = 2 * 2**20  # bytes, to whose multiples the allocator asks for memory
Sizes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Batch:
    """Sizes of a batch that a loader has handed out, without its tensors, which may be on the device."""

    numbers: list[Any]  # of its samples in the data set
    sizes: Sizes
    bytes: dict[str, int]
    longest: int | None  # of the samples, by its attention mask


class Inputs:
    """Notes the sizes of tensors that the first module after each backward pass is called with."""

    def __init__(self) -> None:
        self._now: Sizes | None = None  # of the pass that is under way
        self._most: Sizes = {}
        self._most_of_batches: Sizes = {}  # but the last
        self._batches: deque[Batch] = deque(maxlen=MOST_BATCHES)
        self._samples = self._tokens = self._handed_out = self._in_epoch = 0

    def counts(self) -> Counts:
        return Counts(self._samples, self._tokens, self._handed_out, self._in_epoch)

    def begin(self) -> None:
        register_module_forward_pre_hook(self._note)
        of_torch: Any = _BaseDataLoaderIter.__next__
        next_index: Any = _BaseDataLoaderIter._next_index

        def note_index(loading: Any) -> Any:
            index = next_index(loading)
            loading.__dict__.setdefault("_dry_run_indices", deque()).append(index)
            return index

        def note_batch(loading: Any) -> Any:
            batch = of_torch(loading)
            with contextlib.suppress(Exception):  # a report watches, and breaks nothing
                self._note_batch(loading, batch)
            return batch

        _BaseDataLoaderIter._next_index = note_index  # type: ignore[method-assign]
        _BaseDataLoaderIter.__next__ = note_batch  # type: ignore[method-assign, assignment]

    def _note_batch(self, loading: Any, batch: Any) -> None:
        index = loading.__dict__["_dry_run_indices"].popleft()
        self._handed_out += 1
        with contextlib.suppress(TypeError):  # a sampler without a length
            self._in_epoch = len(loading._index_sampler)
        if self._batches:
            _note_most(self._batches[-1].sizes, self._most_of_batches)
        self._batches.append(_batch([*index] if isinstance(index, (list, tuple)) else [index], batch))

    def _note(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self._now is not None:
            return
        if threading.current_thread() is threading.main_thread() and torch.is_grad_enabled():
            kwargs = sys._getframe(1).f_locals.get("kwargs")  # which a hook of all modules is not given
            given = {**dict(enumerate(args)), **(kwargs if isinstance(kwargs, dict) else {})}
            self._now = _sizes(given)
            self._count(list(_tensors(given).values()))

    def _count(self, tensors: Sequence[torch.Tensor]) -> None:
        """Count the rows of a forward pass, and its tokens: the first matrix of whole numbers."""
        tokens = next((x for x in tensors if x.dim() == 2 and not x.is_floating_point()), None)
        counted = next(iter(tensors), None) if tokens is None else tokens
        self._samples += 0 if counted is None or not counted.dim() else counted.shape[0]
        self._tokens += 0 if tokens is None else tokens.numel()

    def end_pass(self) -> None:
        """Note that what was noted has run."""
        _note_most(self._now or {}, self._most)
        self._now = None

    def largest(self) -> dict[str, Any] | None:
        """Return the name and the size of the largest input of a pass that has run; None if none is known."""
        name = max(self._most, key=lambda each: _numel(self._most[each]), default=None)
        return None if name is None else {"name": _called(name), "size": [*self._most[name]]}

    def larger(self, asked_bytes: int) -> str | None:
        """Say which input is larger than any before, and which samples it is made of; None if none is.

        Where memory runs out before the model is called, that is a tensor of the last batch, if so many bytes are its.
        """
        sizes, most = self._now or {}, self._most
        if self._now is None and self._batches:
            last, most = self._batches[-1], self._most_of_batches
            taken = {name for name, size in last.bytes.items() if 0 <= asked_bytes - size < ROUNDING}
            sizes = {name: size for name, size in last.sizes.items() if name in taken}
        for name, size in sizes.items():
            if name in most and _numel(size) > _numel(most[name]):
                before = f"and was at most {[*most[name]]} in the steps before"
                return f"{_called(name)} is {[*size]}, {before}{self._name(size)}"
        return None

    def _name(self, size: tuple[int, ...]) -> str:
        """Name the samples of a batch by their numbers in the data set, if one batch alone has such a size."""
        batches = [batch for batch in self._batches if size in batch.sizes.values()]
        if len(batches) != 1 or not all(isinstance(number, int) for number in batches[0].numbers):
            return ""
        numbers, longest = batches[0].numbers, batches[0].longest
        if longest is not None and longest < len(numbers):
            numbers = [numbers[longest]]
        shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        return f": number{'s' if len(numbers) > 1 else ''} {shown} of the data set (the first is 0)"


def _called(name: str) -> str:
    return name if name.isidentifier() else "the input of the model"


def _tensors(batch: Any) -> dict[str, torch.Tensor]:
    items = (
        batch.items() if isinstance(batch, Mapping) else enumerate(batch if isinstance(batch, Sequence) else [batch])
    )
    return {str(name): x for name, x in items if isinstance(x, torch.Tensor)}


def _sizes(batch: Any) -> Sizes:
    return {name: tuple(x.shape) for name, x in _tensors(batch).items()}


def _batch(numbers: list[Any], batch: Any) -> Batch:
    tensors = _tensors(batch)
    mask = tensors.get("attention_mask")
    has_lengths = mask is not None and mask.device.type == "cpu" and mask.dim() == 2
    longest = int(mask.sum(1).argmax()) if mask is not None and has_lengths else None
    return Batch(numbers, _sizes(batch), {name: x.nbytes for name, x in tensors.items()}, longest)


def _numel(size: tuple[int, ...]) -> int:
    return torch.Size(size).numel()


def _note_most(sizes: Sizes, most: Sizes) -> None:
    for name, size in sizes.items():
        if name not in most or _numel(size) > _numel(most[name]):
            most[name] = size
