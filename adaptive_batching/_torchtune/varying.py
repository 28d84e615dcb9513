"""Samples as they come: their lengths, where they lie on this machine, and what an allocator reserves for them.

Each forward of a step has its own shape then. Lengths are read without a network, and a step of any shape follows from
two that are traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from typing import Any
from unittest import mock

import datasets  # type: ignore[import-untyped]
import huggingface_hub
from omegaconf import DictConfig, ListConfig
from torchtune import config
from torchtune.datasets import ConcatDataset
from tqdm import tqdm

from adaptive_batching._torchtune.data import Sample, is_packed
from adaptive_batching._torchtune.losses import KINDS
from adaptive_batching._trace.allocator import AllocatorFullError, CachingAllocator, ExpandableAllocator
from adaptive_batching._trace.traced_step import BETWEEN, OPTIMIZER, StepRecord, TracedStep, TraceError

Shape = tuple[int, int]  # samples of a forward, and the tokens that each is padded to


class NotAtHandError(RuntimeError):
    """Raised if the samples of a config cannot be read here; the message says why."""


@dataclass(frozen=True)
class DataAtHand:
    lengths: Sequence[int]  # tokens of each sample, in the order of the data
    packed: bool


def read_data(cfg: DictConfig) -> DataAtHand:
    """Build tokenizer and data set of a config as the recipe does, but without a network, and measure all samples."""
    try:
        with _offline():
            tokenizer = config.instantiate(cfg.tokenizer)
            if isinstance(cfg.dataset, ListConfig):
                dataset = ConcatDataset(datasets=[config.instantiate(each, tokenizer) for each in cfg.dataset])
            else:
                dataset = config.instantiate(cfg.dataset, tokenizer)
            samples = tqdm(range(len(dataset)), desc="Measuring samples", dynamic_ncols=True, leave=False)
            lengths = [_length(dataset[index]) for index in samples]
    except Exception as error:  # each format of tokenizers and data raises its own
        line = (str(error).strip().splitlines() or [""])[0]
        raise NotAtHandError(f"{type(error).__name__}: {line[:160]}") from error
    if not lengths:
        raise NotAtHandError("the data set has no samples")
    return DataAtHand(lengths, is_packed(dataset))


def _length(sample: Sample) -> int:
    """Return the tokens of a sample; of a pair, those of its longer answer."""
    return max(len(sample[key]) for key in ("tokens", *(f"{kind}_input_ids" for kind in KINDS)) if key in sample)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Have data sets of a hub come from the cache alone: where there is no network, each would be waited for."""
    with contextlib.ExitStack() as stack:
        for module in (datasets.config, huggingface_hub.constants):
            for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, True))
        if datasets.utils.logging.is_progress_bar_enabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        yield


@dataclass(frozen=True)
class TracedLengths:
    """A training step traced at two lengths of samples, and what follows for every shape of a forward.

    Sizes of storages are affine in the number of samples at one length, and in the length at one number, since fused
    attention keeps nothing that grows with the square of the length. A loss in chunks rounds the length up: its chunks
    are exact where the traced lengths and that of the shape are multiples of their number, else to a row.
    """

    one: tuple[int, TracedStep]  # tokens of a sample, and the step
    other: tuple[int, TracedStep]

    def at(self, shape: Shape) -> StepRecord:
        """Return the record of a step whose forward has ``shape``; TraceError if it does not follow from the two."""
        samples, length = shape
        (start, one), (end, other) = ((traced, step.at(samples)) for traced, step in (self.one, self.other))
        if one.kept_bytes:
            raise TraceError("a step keeps tensors of its samples for the next one, whose samples have other lengths")
        if one.events != other.events or one.kinds != other.kinds:
            raise TraceError("the order in which memory is allocated and freed depends on the length of samples")
        sizes = [a + (b - a) * (length - start) // (end - start) for a, b in zip(one.sizes, other.sizes, strict=True)]
        for number, (_, scratch) in one.scratch.items():
            sizes[number] = scratch.between(other.scratch[number][1], length - start, end - start).num_bytes
        return replace(one, sizes=[max(size, 0) for size in sizes])


@dataclass(frozen=True)
class Varying:
    """Bytes that are reserved while optimizer steps run as they come."""

    steps: int
    forwards: int
    longest: int  # tokens of a sample that was met
    by_default: int
    expandable: int  # with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    retries: int | None  # times that the cache is emptied within a limit; None without one, or if it does not run in it
    runs: bool | None  # within the limit, by default; None without one


def replay_shapes(traced: TracedLengths, steps: Sequence[Sequence[Shape]], limit: int | None = None) -> Varying:
    """Replay optimizer steps, the shapes of the forwards of each, through models of the caching allocator.

    ``traced`` holds the gradients of earlier forwards; ``limit`` is in bytes. TraceError as from ``traced.at``.
    """
    record = cache(traced.at)
    retries = runs = None
    if limit is not None:
        try:
            retries, runs = int(_replay(CachingAllocator(limit), record, steps).retries), True
        except AllocatorFullError:
            runs = False
    shapes = [shape for step in steps for shape in step]
    free, expandable = (_replay(kind(), record, steps) for kind in (CachingAllocator, ExpandableAllocator))
    return Varying(
        len(steps), len(shapes), max(length for _, length in shapes), free.peak_reserved, expandable.peak_reserved,
        retries, runs,
    )  # fmt: skip


def _replay(allocator: Any, record: Callable[[Shape], StepRecord], steps: Sequence[Sequence[Shape]]) -> Any:
    """Return the allocator after all steps."""
    first = record(steps[0][0])
    begin, end = _parts(first)

    def take_resting(*, late: bool) -> None:
        for number in range(first.num_resting):
            if first.sizes[number] and (first.made.get(number, -1) >= end) is late:
                allocator.take(first.sizes[number], first.streams.get(number, 0))

    take_resting(late=False)
    for index, step in enumerate(steps):
        held: dict[int, Any] = {}
        _run(allocator, first, range(begin), held)  # the gradients that forwards add to
        kept = set(held)
        for part, shape in enumerate(step):
            _run(allocator, record(shape), range(begin, end), held)
            if part + 1 < len(step):  # what the optimizer step frees in the trace, a forward frees on its own
                for storage in [storage for storage in held if storage not in kept]:
                    allocator.give_back(held.pop(storage))
        if index == 0:
            take_resting(late=True)
        last = record(step[-1])
        _run(allocator, last, range(end, len(last.events)), held)
        for block in held.values():
            allocator.give_back(block)
    return allocator


def _run(allocator: Any, record: StepRecord, events: range, held: dict[int, Any]) -> None:
    for event in (record.events[index] for index in events):
        if event >= 0:
            held[event] = allocator.take(record.sizes[event], record.streams.get(event, 0))
        elif ~event in held:
            allocator.give_back(held.pop(~event))


def _parts(record: StepRecord) -> tuple[int, int]:
    """Return the number of events before the forward, and before the optimizer step."""
    marks = list(zip(record.moments, record.marks, strict=True))
    begin = max((mark for _, mark in takewhile(lambda each: each[0] == BETWEEN, marks)), default=0)
    end = next((mark for moment, mark in marks if moment == OPTIMIZER), len(record.events))
    return begin, end
