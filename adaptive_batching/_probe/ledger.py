"""Storages of a training step, by number, from their allocation to their end.

A record holds the step as a sequence of events, so that it can be replayed: to find the peak and what it is made of, or
to ask an allocator how much it would reserve. Nothing is rounded to allocator blocks here: between the two traced batch
sizes, rounding could double the slope of a small tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adaptive_batching._probe.scratch import Scratch

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer states"
ACTIVATIONS, LOGITS, OTHER = "activations", "logits", "other"
KINDS = (WEIGHTS, GRADIENTS, STATES, ACTIVATIONS, LOGITS, OTHER)

FORWARD, LOSS, BACKWARD, OPTIMIZER = "forward", "loss", "backward", "optimizer step"
BETWEEN = "between steps"


@dataclass(frozen=True)
class StepRecord:
    """The memory of one training step at one batch size. Storages are numbered, those alive before the step first."""

    log: Sequence[int]
    """Bytes alive before the step, then after each operation."""

    moments: Sequence[str]
    """Part of the step that each entry of ``log`` belongs to."""

    marks: Sequence[int]
    """Number of events before each entry of ``log``."""

    events: Sequence[int]
    """In order: the number of a storage that is allocated, or ``~number`` of one that is freed."""

    sizes: Sequence[int]
    """Bytes of each storage."""

    kinds: Sequence[str]
    """One of :data:`KINDS` for each storage."""

    num_resting: int
    """Storages alive before the step."""

    streams: Mapping[int, int]
    """Number of the stream, by storage, of what is not allocated on the main one."""

    made: Mapping[int, int]
    """By resting storage that the first step makes, such as optimizer states: the number of events before it does."""

    scratch: Mapping[int, tuple[int, Scratch]]
    """By storage that an operation takes while it runs: its entry of ``log``, and what its size follows from. ``log``
    has as much of it as is on a line over the batch size."""

    kept_bytes: int
    """Bytes alive before the step that the one before has made, and that it replaces."""

    flops: int
    """Floating-point operations of matrix products and attention, those of recomputed activations included."""

    recomputed_flops: int
    """Those of activations that the backward pass computes again."""

    attention_flops: int
    """Those of attention, which grow with the square of the length; without those of recomputed activations."""

    def at_peak(self) -> tuple[str, dict[str, int]]:
        """Return the moment of the peak, and the bytes of each kind that are alive then."""
        at = max(range(len(self.log)), key=self.log.__getitem__)
        alive = dict.fromkeys(KINDS, 0)
        for number in range(self.num_resting):
            alive[self.kinds[number]] += self.sizes[number]
        for event in self.events[: self.marks[at]]:
            number = event if event >= 0 else ~event
            alive[self.kinds[number]] += self.sizes[number] if event >= 0 else -self.sizes[number]
        return self.moments[at], alive


class Ledger:
    """Bytes alive and, in order, the allocations and ends of storages. One ends when nothing holds it any more."""

    def __init__(self) -> None:
        self._current = 0
        self._seen: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._sum: tuple[weakref.ref[Any], int] | None = None
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
        self._seen = {
            key: (self._watched(reference(), key, new), new)
            for new, (key, (reference, _)) in enumerate(self._seen.items())
        }
        self._num_resting = len(alive)
        self._holders: dict[int, int] = {}  # of numbers that more than one storage shares
        self._events: list[int] = []
        self._made: dict[int, int] = {}
        self._scratch: dict[int, tuple[int, Scratch]] = {}
        self._log, self._moments, self._marks = [self._current], [BETWEEN], [0]

    @property
    def current_bytes(self) -> int:
        return self._current

    def record(self, *, kept_bytes: int, flops: int, recomputed_flops: int, attention_flops: int) -> StepRecord:
        return StepRecord(
            tuple(self._log), tuple(self._moments), tuple(self._marks), tuple(self._events), tuple(self._sizes),
            tuple(self._kinds), self._num_resting, self._streams, self._made, self._scratch, kept_bytes, flops,
            recomputed_flops, attention_flops,
        )  # fmt: skip

    def knows(self, storage: Any) -> bool:
        return storage._cdata in self._seen

    def call_it(self, storage: Any, kind: str) -> None:
        self._kinds[self._seen[storage._cdata][1]] = kind

    def allocate(self, storage: Any, kind: str, size: int, stream: int = 0) -> None:
        """Note a storage of ``size`` bytes; of 0 for one that takes no memory."""
        number = len(self._sizes)
        if stream:
            self._streams[number] = stream
        self._sizes.append(size)
        self._kinds.append(kind)
        self._seen[storage._cdata] = (self._watched(storage, storage._cdata, number), number)
        if size:
            self._current += size
            self._events.append(number)

    def note_need(self, storage: Any, stream: int = 0) -> None:
        """Note that a step needs a storage from here on which is alive before it: the first step makes it here."""
        number = self._seen[storage._cdata][1]
        if number < self._num_resting and number not in self._made:
            self._made[number] = len(self._events)
            if stream:
                self._streams[number] = stream

    def end_operation(self, moment: str, scratch: Scratch | None = None) -> None:
        """Note what is alive after an operation, and what it took while it ran."""
        number = len(self._sizes)
        if scratch is not None:
            self._scratch[number] = len(self._log), scratch
            self._sizes.append(scratch.num_bytes)
            self._kinds.append(OTHER)
            self._events.append(number)
        self._log.append(self._current + (0 if scratch is None else scratch.in_line))
        self._moments.append(moment)
        self._marks.append(len(self._events))
        if scratch is not None:
            self._events.append(~number)

    def write_over(self, term: Any, result: Any) -> None:
        """Have ``result``, which has just been allocated, live where ``term`` does, until both are dead."""
        known, made = self._seen.get(term._cdata), self._seen.get(result._cdata)
        if known is None or made is None or made[1] != len(self._sizes) - 1:
            return
        of_term, of_result = known[1], made[1]
        if self._sizes[of_term] != self._sizes[of_result]:
            return
        self._current -= self._sizes[of_result]
        self._events.remove(of_result)
        self._sizes[of_result] = 0
        self._seen[result._cdata] = (self._watched(result, result._cdata, of_term), of_term)
        self._holders[of_term] = self._holders.get(of_term, 1) + 1

    def note_sum(self, term: Any, result: Any) -> None:
        """Remember that ``result`` is ``term`` and something more: it lives where ``term`` did, if that ends next."""
        known, made = self._seen.get(term._cdata), self._seen.get(result._cdata)
        is_last = made is not None and made[1] == len(self._sizes) - 1
        if known is not None and is_last and term.nbytes() == result.nbytes():
            self._sum = weakref.ref(result), known[1]

    def forget_sum(self) -> None:
        """Take it that what has not ended by now lives on."""
        self._sum = None

    def _watched(self, storage: Any, key: int, number: int) -> weakref.ref[Any]:
        return weakref.ref(storage, lambda _: self._free(key, number))

    def _free(self, key: int, number: int) -> None:
        self._seen.pop(key, None)
        if self._holders.get(number, 1) > 1:
            self._holders[number] -= 1
            return
        if self._sum is not None and self._sum[1] == number:
            self._take_over(number)
            return
        if self._sizes[number]:
            self._current -= self._sizes[number]
            self._events.append(~number)

    def _take_over(self, number: int) -> None:
        """Have the last storage, a sum, live where its first term has just died: that was added to in place."""
        assert self._sum is not None
        result, self._sum = self._sum[0](), None
        assert result is not None
        self._seen[result._cdata] = (self._watched(result, result._cdata, number), number)
        size = self._sizes.pop()
        self._kinds.pop()
        self._streams.pop(len(self._sizes), None)
        if size:
            self._events.remove(len(self._sizes))
            self._current -= size
            self._log[-1] -= size
            self._marks[-1] -= 1
