"""Why memory ran out, from plain numbers: a cause is told only where they show it. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from adaptive_batching._values import memory_size

_FIRST_STEPS = 2  # in which an optimizer makes its states
_LEAST_RISES = 3  # in a row, that are no chance
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|[KMGT]iB)"
_ROUNDING = 1.01  # messages have two decimals


@dataclass(frozen=True)
class Shortage:
    """An allocation that failed, and what the allocator had then; all in bytes."""

    asked: int
    free: int  # that the process could still have taken of the device
    allocated: int
    reserved: int

    @property
    def unused(self) -> int:
        """Bytes that the allocator holds but nothing uses: fragments, because it empties its cache before it fails."""
        return self.reserved - self.allocated


@dataclass(frozen=True)
class LongerSample:
    """A sample that is longer than any that ran before."""

    tokens: int
    most_before: int
    name: str = ""  # such as ``number 7 of the data set``


class StepStarts:
    """Memory in use at the start of each step, and since when it grows in each."""

    def __init__(self) -> None:
        self.steps = 0  # that have begun
        self.since = 0  # the step since which each began with more than the one before
        self.grown = 0  # bytes, since then
        self._first = self._last = 0

    def note(self, in_use: int) -> None:
        self.steps += 1
        if self.steps <= _FIRST_STEPS + 1 or in_use <= self._last:
            self.since, self._first = self.steps, in_use
        self._last = in_use
        self.grown = in_use - self._first

    @property
    def grow(self) -> bool:
        """True if so many steps in a row have begun with more that it is no chance."""
        return self.steps - self.since >= _LEAST_RISES


def read_message(message: str) -> Shortage | None:
    """Return what an out-of-memory error of torch's on a device says; None if it is another."""

    def num_bytes(before: str, after: str = "") -> int | None:
        match = re.search(f"{before}{_SIZE}{after}", message)
        return None if match is None else int(float(match[1]) * _UNITS[match[2]])

    asked, free = num_bytes("Tried to allocate "), num_bytes("of which ", " is free")
    allocated, unused = num_bytes("Of the allocated memory "), num_bytes(r" is allocated by PyTorch,.*? and ")
    if asked is None or free is None or allocated is None or unused is None:
        return None
    if (allowed := num_bytes("", " allowed;")) is not None:
        free = min(free, max(allowed - allocated - unused, 0))
    return Shortage(asked, free, allocated, allocated + unused)


def cause_of(
    shortage: Shortage | None, starts: StepStarts, longer: LongerSample | None, setting: str | None = None
) -> str | None:
    """Say in one line why memory ran out, with the evidence; None if the numbers do not show it.

    Args:
        shortage: None if the error does not say.
        starts: Growth is a cause if the allocation would have succeeded without it.
        longer: None if no sample was longer than those before.
        setting: Of the allocator, that has it scatter less memory; None if there is none or it is set.
    """
    causes = []
    if shortage is not None and starts.grow and starts.grown >= shortage.asked - shortage.free:
        causes.append(
            f"step {starts.steps} began with {memory_size(starts.grown)} more in use than step {starts.since}, and "
            "each since with more than the one before: something is kept from step to step"
        )
    if longer is not None:
        named = f", {longer.name}," if longer.name else ""
        causes.append(f"a sample{named} has {longer.tokens} tokens, and none before had more than {longer.most_before}")
    if shortage is not None and shortage.free < shortage.asked * _ROUNDING <= shortage.free + shortage.unused:
        asked, free, unused, allocated, reserved = map(
            memory_size, (shortage.asked, shortage.free, shortage.unused, shortage.allocated, shortage.reserved)
        )
        helps = "" if setting is None else f"; set the environment variable {setting}"
        causes.append(
            f"memory is fragmented: {asked} was asked for, {free} is free and {unused} more is unused but scattered "
            f"(allocated {allocated}, reserved {reserved}){helps}"
        )
    return "; and ".join(causes) or None
