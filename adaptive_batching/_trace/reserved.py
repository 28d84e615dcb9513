"""Memory that an allocator reserves for a recorded step, and the lowest limit at which the step still runs.

Where nothing limits it, an allocator reserves just what a step needs that is to run without emptying the cache. Within
a limit it may empty the cache once, and then do with less: which batch sizes fit is said by the least limit in which
training can repeat its steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

from adaptive_batching._trace.allocator import AllocatorFullError, CachingAllocator, ExpandableAllocator
from adaptive_batching._trace.traced_step import Recorded

_STEPS = 3  # that are replayed: the second and third meet the cache that the one before has left
_RESOLUTION = 200  # a limit is known to a 200th of what is allocated
MAX_STEPS = 4  # of one size, after which it is known whether training can repeat them


def can_repeat(retries: Sequence[int], *, makes_states: bool) -> bool | None:
    """Tell whether training can repeat the steps of a size, by how often each so far had the allocator empty its cache.

    Steps that do so wait for the device. A first step says little: it has met another layout than those after it, and
    with ``makes_states`` had more room. True if the last two steps that found states did without; False if that can no
    longer be so within :data:`MAX_STEPS`; None if another step has to tell.
    """
    that_count = retries[1:] if makes_states else retries
    calm = next((index for index, had in enumerate(reversed(that_count)) if had), len(that_count))
    if calm >= 2:
        return True
    return None if len(retries) + 2 - calm <= MAX_STEPS else False


@dataclass(frozen=True)
class SetUp:
    """Allocations before the first step, which finds in the cache what they have left there.

    A weight that is quantized on the device leaves some hundred blocks, and those that stay lie between them.
    """

    events: Sequence[int] = ()  # as those of a step
    sizes: Sequence[int] = ()
    empties_cache: bool = False
    _states: dict[type, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def most_bytes(self) -> int:
        """The most that is in use at once."""
        changes = (self.sizes[event] if event >= 0 else -self.sizes[~event] for event in self.events)
        return max(accumulate(changes), default=0)

    def start(self, kind: type, limit: float = float("inf")) -> tuple[Any, dict[int, list[Any]]]:
        """Return an allocator of a kind after the set-up, and the blocks that are in use, by the bytes asked for."""
        if kind not in self._states:
            allocator, held = kind(), dict[int, Any]()
            for event in self.events:
                if event >= 0:
                    held[event] = allocator.take(self.sizes[event])
                else:
                    allocator.give_back(held.pop(~event))
            if self.empties_cache:
                allocator.empty_cache()
            self._states[kind] = allocator, held
        allocator, held = self._states[kind]
        allocator, blocks = allocator.copy(list(held.values()), limit)
        at_hand = defaultdict[int, list[Any]](list)
        for number, block in zip(held, blocks, strict=True):
            at_hand[self.sizes[number]].append(block)
        return allocator, at_hand


NO_SET_UP = SetUp()


@dataclass(frozen=True)
class Reserved:
    """Bytes that count against a limit."""

    by_default: int
    expandable: int  # with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    least: int  # limit at which the step runs with default settings, after retries that empty the cache
    least_expandable: int
    allocated: int
    """Bytes that torch counts as allocated with default settings: tensors, in blocks of which no rest is cut off."""


def reserved_for(step: Recorded, set_up: SetUp = NO_SET_UP) -> Reserved:
    def found(kind: type) -> tuple[Any, int]:
        free = replay(kind, step, set_up)
        least = _least(lambda limit: replay(kind, step, set_up, limit), free.peak_allocated, free.peak_reserved)
        return free, least

    (default, least), (expandable, least_expandable) = found(CachingAllocator), found(ExpandableAllocator)
    return Reserved(default.peak_reserved, expandable.peak_reserved, least, least_expandable, default.peak_allocated)


def reserved_by_default(step: Recorded, set_up: SetUp = NO_SET_UP) -> int:
    """Return what is reserved with default settings where nothing limits it."""
    return int(replay(CachingAllocator, step, set_up).peak_reserved)


def replay(kind: type, step: Recorded, set_up: SetUp = NO_SET_UP, limit: float = float("inf")) -> Any:
    """Run equal steps on an allocator of a kind, the first as that of a run, and return it."""
    allocator, at_hand = set_up.start(kind, limit)
    for _ in _steps(allocator, step, _STEPS, step.made, at_hand):
        pass
    return allocator


def _steps(
    allocator: Any, step: Recorded, count: int, made: Mapping[int, int], at_hand: Mapping[int, list[Any]]
) -> Iterator[None]:
    """Run ``count`` equal steps on ``allocator``, and stop after each.

    ``made`` has what the first step makes, with the number of events before; ``at_hand`` the blocks in use, by bytes:
    those of what rests between steps, and what ends before the first.
    """

    def take(number: int) -> Any:
        return allocator.take(step.sizes[number], step.streams.get(number, 0))

    late: defaultdict[int, list[int]] = defaultdict(list)
    for storage, event in made.items():
        if step.sizes[storage]:
            late[event].append(storage)
    blocks = {size: list(free_blocks) for size, free_blocks in at_hand.items()}
    there = [n for n in range(step.num_resting) if step.sizes[n] and n not in made]
    resting = {n: blocks[step.sizes[n]].pop(0) for n in there if blocks.get(step.sizes[n])}
    for block in chain.from_iterable(blocks.values()):
        allocator.give_back(block)
    resting |= {n: take(n) for n in there if n not in resting}
    place_of, stays = _places(step)
    for number in range(count):
        held: dict[int, Any] = {}
        for index, event in enumerate(step.events):
            resting |= {n: take(n) for n in late.pop(index, ())}
            if event >= 0:
                held[event] = take(event)
            elif ~event in held:
                allocator.give_back(held.pop(~event))
            elif ~event in resting and (~event not in stays or number == count - 1):
                allocator.give_back(resting.pop(~event))
        resting |= {n: take(n) for n in late.pop(len(step.events), ())}
        for event, block in held.items():
            if event in place_of:
                resting[place_of[event]] = block
            else:
                allocator.give_back(block)
        yield


def _places(step: Recorded) -> tuple[dict[int, int], set[int]]:
    """Return whose place each storage takes that a step leaves behind, and those freed whose place none takes.

    It takes the place of as large a storage of those before the step that the step frees, if there is one.
    """
    freed = {~event for event in step.events if event < 0}
    replaced: defaultdict[int, list[int]] = defaultdict(list)
    for number in sorted(number for number in freed if number < step.num_resting):
        replaced[step.sizes[number]].append(number)
    left = [event for event in step.events if event >= 0 and event not in freed]
    place_of = {event: replaced[step.sizes[event]].pop(0) for event in left if replaced[step.sizes[event]]}
    return place_of, set(chain.from_iterable(replaced.values()))


class Needed(NamedTuple):
    """Bytes that the steps at a batch size make the allocator reserve."""

    once: int  # by one step on an empty cache, with optimizer states that were there before
    repeated: int  # by the first steps of training, where nothing limits them
    least: int  # limit in which training `can_repeat` the steps


class ReservedPeaks:
    """Bytes that the probe's steps make the allocator reserve, as a function of the batch size.

    What is reserved does not always rise with the batch size: a little more can go into blocks that are split better. A
    search needs a curve that never falls, so each new value is moved to lie between those known of smaller and of
    larger sizes; what has been told is never taken back.
    """

    def __init__(
        self, at: Callable[[int], Recorded], allocator: Callable[[float], Any], *, makes_states: bool = False
    ) -> None:
        self._at, self._allocator, self._makes_states = at, allocator, makes_states
        self._known: list[tuple[int, Needed]] = []  # (batch size, bytes), all of them ascending

    def __call__(self, batch_size: int) -> Needed:
        at = bisect_left(self._known, batch_size, key=lambda pair: pair[0])
        if at == len(self._known) or self._known[at][0] != batch_size:
            needed = self._replay(batch_size)
            if at < len(self._known):
                needed = Needed(*map(min, needed, self._known[at][1]))
            if at:
                needed = Needed(*map(max, needed, self._known[at - 1][1]))
            self._known.insert(at, (batch_size, needed))
        return self._known[at][1]

    def _replay(self, batch_size: int) -> Needed:
        record = self._at(batch_size)
        alone = self._allocator(float("inf"))
        for _ in _steps(alone, record, 1, {}, {}):
            pass
        made = record.made if self._makes_states else {}

        def run(limit: float) -> tuple[Any, list[int]]:
            """Replay steps until it is known whether training can repeat them."""
            allocator, peaks, retries = self._allocator(limit), list[int](), list[int]()
            for _ in _steps(allocator, record, MAX_STEPS, made, {}):
                peaks.append(allocator.peak_reserved)
                retries.append(allocator.retries - sum(retries))
                goes_on = can_repeat(retries, makes_states=self._makes_states)
                if goes_on is False:
                    raise AllocatorFullError(f"within {limit} bytes, the cache is emptied again and again")
                if goes_on:
                    break
            return allocator, peaks

        free, peaks = run(float("inf"))
        return Needed(alone.peak_reserved, peaks[-1], _least(run, free.peak_allocated, peaks[-1]))


def _least(run: Callable[[int], Any], allocated: int, reserved: int) -> int:
    """Return the least limit, between what is allocated and what is reserved without one, at which ``run`` ends."""
    low, high = 0, -(-(reserved - allocated) * _RESOLUTION // max(allocated, 1))
    while low < high:
        middle = (low + high) // 2
        try:
            run(allocated + middle * allocated // _RESOLUTION)
        except AllocatorFullError:
            low = middle + 1
        else:
            high = middle
    return min(allocated + high * allocated // _RESOLUTION, reserved)
