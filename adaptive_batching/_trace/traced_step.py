"""A training step as its trace has seen it: every storage from its allocation to its end, and memory at any batch size.

A record holds the step as a sequence of events, so that it can be replayed: to find the peak and what it is made of, or
to ask an allocator how much it would reserve. Nothing is rounded to allocator blocks here: between the two traced batch
sizes, rounding could double the slope of a small tensor. Kernels of CUDA also take memory that no tensor shows, for the
time of a call: blocks are found and split for it, so that what is reserved can be larger by far more.

Peak memory is not linear in the batch size b. It is the largest value of ``a_t + c_t * b`` over the operations t of the
step, because the optimizer's temporaries, or gradients late in the backward pass, set a floor at small b. With records
at b = 2 and b = 3, the difference of the bytes alive after operation t is c_t, and the whole curve follows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from adaptive_batching._step_time.step_work import Operation, StepWork

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer states"
ACTIVATIONS, LOGITS, OTHER = "activations", "logits", "other"
MEMORY_KINDS = (WEIGHTS, GRADIENTS, STATES, ACTIVATIONS, LOGITS, OTHER)

FORWARD, LOSS, BACKWARD, OPTIMIZER = "forward", "loss", "backward", "optimizer step"
BETWEEN = "between steps"

TRACED_SIZES = (2, 3)  # not 1: a batch of one takes other views and copies. One apart: a difference is a slope


class TraceError(RuntimeError):
    """Raised if the training step cannot be traced, or if its operations depend on the batch size."""


@dataclass(frozen=True)
class Scratch:
    """Bytes that a kernel takes for the time of a call, by what they follow from: numbers affine in the batch size."""

    kernel: str  # a key of _KERNELS
    numbers: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return _KERNELS[self.kernel][0](*self.numbers)

    @property
    def in_line(self) -> int:
        """Bytes as far as they are on a line over the batch size, which a curve of memory is made of."""
        return _KERNELS[self.kernel][1](*self.numbers)

    def between(self, other: Scratch, share: int, of: int) -> Scratch:
        """Return what the call takes where its numbers are ``share / of`` of the way to those of ``other``."""
        numbers = [a + (b - a) * share // of for a, b in zip(self.numbers, other.numbers, strict=True)]
        return Scratch(self.kernel, tuple(max(number, 0) for number in numbers))


def _of_embedding(indices: int, vocabulary: int, width: int) -> int:
    """Return what the gradient of an embedding takes, summed in float32 by parts of at most ten tokens that are alike.

    ``max_partial_segment`` in ``aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu``.
    """
    return (indices + 10 * min(indices, vocabulary)) * width * 4 // 10


def _of_attention(heads: int, length: int, width: int) -> int:
    """Return what the backward pass of flash attention takes to add up the gradient of queries, in float32.

    Lengths are rounded to 128 and widths to 32, or 64 from 128 on (``mha_bwd`` in
    ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``).
    """
    step = 32 if width <= 128 else 64
    return heads * -(-length // 128) * 128 * -(-width // step) * step * 4


def _of_sum_of_rows(inputs: int, outputs: int, threads: int) -> int:
    """Return what a sum over the rows of a matrix takes, such as the gradient of a norm's scale or of a bias.

    Where rows (``inputs``) are many and columns (``outputs``) few, several blocks of the ``threads`` that run at once
    share a column, and each leaves its sums in memory (``setReduceConfig`` and ``global_memory_size`` in
    ``aten/src/ATen/native/cuda/Reduce.cuh``).
    """
    in_one_load = next(n for n in (4, 2, 1) if outputs % n == 0)
    most = 512 // in_one_load
    columns, rows = min(_power_of_two(outputs // in_one_load), most), min(_power_of_two(inputs), most)
    width = min(columns, 32)
    height = min(rows, most // width)
    width = min(columns, most // height)
    if inputs < min(16 * height, 256):
        return 0
    by_each = -(-inputs // height)
    blocks = -(-(outputs // in_one_load) // width)
    at_once = threads // (width * height)
    if by_each < 256 or blocks > at_once:
        return 0
    shares = max(min(-(-at_once // blocks), -(-by_each // 16)), -(-by_each // 256))
    return 4 * outputs * shares * width * in_one_load if shares > 1 else 0


def _power_of_two(number: int) -> int:
    return 1 << (number.bit_length() - 1) if number else 1


# Bytes, and those on a line over the batch size. The gradient of an embedding has another kernel for few tokens.
_KERNELS: dict[str, tuple[Callable[..., int], Callable[..., int]]] = {
    "embedding": (lambda indices, *size: 0 if indices <= 3072 else _of_embedding(indices, *size), _of_embedding),
    "attention": (_of_attention, _of_attention),
    "sum of rows": (_of_sum_of_rows, lambda *_: 0),
}


@dataclass(frozen=True)
class Recorded:
    """What an allocator is asked for in a step. Storages are numbered, those alive before the step first."""

    events: Sequence[int]  # in order: the number of a storage that is allocated, or ~number of one that is freed
    sizes: Sequence[int]  # bytes of each storage
    num_resting: int  # storages alive before the step
    streams: Mapping[int, int] = field(default_factory=dict)  # by storage, of what is not on the main one
    made: Mapping[int, int] = field(default_factory=dict)
    """By resting storage that the first step makes, such as optimizer states: the number of events before it does."""


@dataclass(frozen=True, kw_only=True)
class StepRecord(Recorded):
    """The memory of one training step at one batch size."""

    log: Sequence[int]  # bytes alive before the step, then after each operation
    moments: Sequence[str]  # part of the step that each entry of `log` belongs to
    marks: Sequence[int]  # number of events before each entry of `log`
    kinds: Sequence[str]  # one of MEMORY_KINDS for each storage
    scratch: Mapping[int, tuple[int, Scratch]]
    """By storage that an operation takes while it runs: its entry of ``log``, and what its size follows from. ``log``
    has as much of it as is on a line over the batch size."""
    kept_bytes: int  # alive before the step that the one before has made, and that it replaces
    flops: int  # of matrix products and attention, those of recomputed activations included
    recomputed_flops: int  # of activations that the backward pass computes again
    attention_flops: int  # of attention, which grow with the square of the length, those of recomputed ones left out
    work: Sequence[Operation] = ()  # what it asks of a device, in order, if that was to be noted

    def at_peak(self) -> tuple[str, dict[str, int]]:
        """Return the moment of the peak, and the bytes of each kind that are alive then."""
        at = max(range(len(self.log)), key=self.log.__getitem__)
        alive = dict.fromkeys(MEMORY_KINDS, 0)
        for event in (*range(self.num_resting), *self.events[: self.marks[at]]):
            number = event if event >= 0 else ~event
            alive[self.kinds[number]] += self.sizes[number] if event >= 0 else -self.sizes[number]
        return self.moments[at], alive


class StorageTracker:
    """Bytes alive and, in order, the allocations and ends of storages. One ends when nothing holds it any more."""

    def __init__(self) -> None:
        self.current_bytes = 0
        self._seen: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.last_sum: tuple[weakref.ref[Any], int] | None = None  # result, and the number of its first term
        self._sizes: list[int] = []
        self._kinds: list[str] = []
        self._streams: dict[int, int] = {}
        self.begin()

    def begin(self) -> None:
        """Start the record of a step here. What is alive now rests between steps."""
        alive = [number for _, number in self._seen.values()]
        self._sizes = [self._sizes[number] for number in alive]
        self._kinds = [self._kinds[number] for number in alive]
        self._streams = {new: self._streams[old] for new, old in enumerate(alive) if old in self._streams}
        self._num_resting = len(alive)
        for number, (key, (reference, _)) in enumerate(list(self._seen.items())):
            self._watch(reference(), key, number)
        self._holders: dict[int, int] = {}  # of numbers that more than one storage shares
        self._events: list[int] = []
        self._made: dict[int, int] = {}
        self._scratch: dict[int, tuple[int, Scratch]] = {}
        self._log, self._moments, self._marks = [self.current_bytes], [BETWEEN], [0]

    def record(self, **others: Any) -> StepRecord:
        """Return the record so far; ``others`` are what a record holds besides storages."""
        return StepRecord(
            events=tuple(self._events), sizes=tuple(self._sizes), num_resting=self._num_resting, streams=self._streams,
            made=self._made, log=tuple(self._log), moments=tuple(self._moments), marks=tuple(self._marks),
            kinds=tuple(self._kinds), scratch=self._scratch, **others,
        )  # fmt: skip

    def knows(self, storage: Any) -> bool:
        return storage._cdata in self._seen

    def hold(self, storage: Any, kind: str, size: int) -> None:
        """Note a storage of ``size`` bytes, or change its kind if it is known."""
        if self.knows(storage):
            self._kinds[self._seen[storage._cdata][1]] = kind
        else:
            self.allocate(storage, kind, size)

    def allocate(self, storage: Any, kind: str, size: int, stream: int = 0) -> None:
        """Note a storage of ``size`` bytes; of 0 for one that takes no memory."""
        number = len(self._sizes)
        if stream:
            self._streams[number] = stream
        self._sizes.append(size)
        self._kinds.append(kind)
        self._watch(storage, storage._cdata, number)
        if size:
            self.current_bytes += size
            self._events.append(number)

    def note_need(self, storage: Any, stream: int = 0) -> None:
        """Note that a step needs a storage from here on which is alive before it: the first step makes it here."""
        seen = self._seen.get(storage._cdata)
        if seen is not None and seen[1] < self._num_resting and seen[1] not in self._made:
            self._made[seen[1]] = len(self._events)
            if stream:
                self._streams[seen[1]] = stream

    def end_operation(self, moment: str, scratch: Scratch | None = None) -> None:
        """Note what is alive after an operation, and what it took while it ran."""
        number = len(self._sizes)
        if scratch is not None:
            self._scratch[number] = len(self._log), scratch
            self._sizes.append(scratch.num_bytes)
            self._kinds.append(OTHER)
            self._events.append(number)
        self._log.append(self.current_bytes + (0 if scratch is None else scratch.in_line))
        self._moments.append(moment)
        self._marks.append(len(self._events))
        if scratch is not None:
            self._events.append(~number)

    def write_over(self, term: Any, result: Any) -> None:
        """Have ``result``, which has just been allocated, live where ``term`` does, until both are dead."""
        of_term, of_result = self._last_made_from(term, result)
        if of_term is None or self._sizes[of_term] != self._sizes[of_result]:
            return
        self.current_bytes -= self._sizes[of_result]
        self._events.remove(of_result)
        self._sizes[of_result] = 0
        self._watch(result, result._cdata, of_term)
        self._holders[of_term] = self._holders.get(of_term, 1) + 1

    def note_sum(self, term: Any, result: Any) -> None:
        """Remember that ``result`` is ``term`` and something more: it lives where ``term`` did, if that ends next."""
        of_term, _ = self._last_made_from(term, result)
        if of_term is not None and term.nbytes() == result.nbytes():
            self.last_sum = weakref.ref(result), of_term

    def _last_made_from(self, term: Any, result: Any) -> tuple[int | None, int]:
        """Return the numbers of both; None for ``term`` unless both are known and ``result`` was allocated last."""
        of_term, of_result = self._seen.get(term._cdata), self._seen.get(result._cdata)
        last = len(self._sizes) - 1
        return None if of_term is None or of_result is None or of_result[1] != last else of_term[1], last

    def _watch(self, storage: Any, key: int, number: int) -> None:
        self._seen[key] = weakref.ref(storage, lambda _: self._free(key, number)), number

    def _free(self, key: int, number: int) -> None:
        self._seen.pop(key, None)
        if self._holders.get(number, 1) > 1:
            self._holders[number] -= 1
        elif self.last_sum is not None and self.last_sum[1] == number:
            self._take_over(number)
        elif self._sizes[number]:
            self.current_bytes -= self._sizes[number]
            self._events.append(~number)

    def _take_over(self, number: int) -> None:
        """Have the last storage, a sum, live where its first term has just died: that was added to in place."""
        assert self.last_sum is not None
        result, self.last_sum = self.last_sum[0](), None
        assert result is not None
        self._watch(result, result._cdata, number)
        size = self._sizes.pop()
        self._kinds.pop()
        self._streams.pop(len(self._sizes), None)
        if size:
            self._events.remove(len(self._sizes))
            self.current_bytes -= size
            self._log[-1] -= size
            self._marks[-1] -= 1


class PeakMemoryCurve:
    """Peak bytes of a training step as a function of the batch size b: ``max_t (a_t + c_t * b)``."""

    def __init__(self, lower: Sequence[int], upper: Sequence[int], *, kept_bytes: int = 0) -> None:
        """Build the curve from the bytes alive at the two traced sizes: before the step, then after every operation.

        Of the first of ``lower``, an earlier step has made ``kept_bytes``. Raise TraceError if the lengths differ.
        """
        if len(lower) != len(upper):
            small, large = TRACED_SIZES
            raise TraceError(f"the step has {len(lower)} operations at b={small} and {len(upper)} at b={large}")
        slopes_and_bases = {(high - low, _at(0, low, high)) for low, high in zip(lower, upper, strict=True)}
        self._lines: list[tuple[int, int]] = []  # those that no other is above at all sizes
        for slope, base in sorted(slopes_and_bases, reverse=True):
            if not self._lines or base > self._lines[-1][1]:
                self._lines.append((slope, base))
        self.resting_bytes = lower[0] - kept_bytes  # before the first step: parameters, buffers and optimizer states

    def peak_bytes(self, batch_size: int) -> int:
        return max(base + slope * batch_size for slope, base in self._lines)

    def largest_within(self, budget_bytes: int) -> int | None:
        """Return the largest batch size whose peak is at most ``budget_bytes``; 0 if none is, None if all are."""
        if self.peak_bytes(1) > budget_bytes:
            return 0
        return min(((budget_bytes - base) // slope for slope, base in self._lines if slope > 0), default=None)


class TracedStep:
    """A training step traced at two batch sizes, and what follows for every other."""

    def __init__(self, lower: StepRecord, upper: StepRecord) -> None:
        self.curve = PeakMemoryCurve(lower.log, upper.log, kept_bytes=lower.kept_bytes)
        self._lower, self._upper = lower, upper

    @property
    def is_uniform(self) -> bool:
        """True if storages are allocated and freed in one order at both sizes, so that there is one at any other."""
        lower, upper = self._lower, self._upper
        resting = lower.num_resting == upper.num_resting
        if not lower.kept_bytes:
            resting = lower.sizes[: lower.num_resting] == upper.sizes[: upper.num_resting]
        return resting and lower.events == upper.events and lower.kinds == upper.kinds

    def record_at(self, batch_size: int) -> StepRecord:
        """Return the record of the step at ``batch_size``; raise TraceError unless it :attr:`is_uniform`."""
        if not self.is_uniform:
            raise TraceError("the order in which memory is allocated and freed depends on the batch size")
        lower, upper = self._lower, self._upper
        log = [_at(batch_size, *bytes_) for bytes_ in zip(lower.log, upper.log, strict=True)]
        sizes = [_at(batch_size, *bytes_) for bytes_ in zip(lower.sizes, upper.sizes, strict=True)]
        scratch = {}
        for number, (at, low) in lower.scratch.items():
            high = upper.scratch[number][1]
            scratch[number] = at, low.between(high, batch_size - TRACED_SIZES[0], 1)
            sizes[number] = scratch[number][1].num_bytes
            log[at] += sizes[number] - _at(batch_size, low.in_line, high.in_line)
        names = ("flops", "recomputed_flops", "attention_flops")
        flops: Any = {name: _at(batch_size, getattr(lower, name), getattr(upper, name)) for name in names}
        kept_bytes = log[0] - self.curve.resting_bytes
        return replace(lower, log=log, kept_bytes=kept_bytes, sizes=sizes, scratch=scratch, **flops)

    def work_at(self, batch_size: int) -> StepWork | None:
        """Return what the step asks of a device at ``batch_size``; None if the traces do not tell."""
        lower, upper = self._lower.work, self._upper.work
        if not lower or [(one.kind, one.name) for one in lower] != [(one.kind, one.name) for one in upper]:
            return None
        between = [_operation_at(batch_size, *pair) for pair in zip(lower, upper, strict=True)]
        numbers = {one: number for number, one in enumerate(dict.fromkeys(between))}
        return StepWork([*numbers], [numbers[one] for one in between])


def _operation_at(batch_size: int, low: Operation, high: Operation) -> Operation:
    shape = tuple(_at(batch_size, *sizes) for sizes in zip(low.shape, high.shape, strict=True))
    moved, flops = _at(batch_size, low.bytes, high.bytes), _at(batch_size, low.flops, high.flops)
    return replace(low, shape=shape, bytes=moved, flops=flops)


def _at(batch_size: int, low: int, high: int) -> int:
    """Return the value at ``batch_size`` on the line through those at the traced sizes."""
    return low + (high - low) * (batch_size - TRACED_SIZES[0])
