"""Whether a run fits: the three answers, and the figures that they rest on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from adaptive_batching._plan.devices import Outside
from adaptive_batching._trace.reserved import Reserved


class Answer(Enum):
    """What is known of a run. The value is the exit code."""

    FITS = 0
    DOES_NOT_FIT = 1
    TIGHT = 3
    CANNOT_TELL = 4


@dataclass(frozen=True)
class Verdict:
    answer: Answer
    least_bytes: int
    """Without this much it cannot run: the least limit of the allocator, with expandable segments or without, and the
    least that is in use beside it."""

    most_bytes: int
    """With this much it runs in any case: all that the allocator reserves by default, and the most beside it."""

    memory_bytes: int | None

    @property
    def left_bytes(self) -> int | None:
        """Memory that is left beyond ``most_bytes``; below 0 where some is missing."""
        return None if self.memory_bytes is None else self.memory_bytes - self.most_bytes


def judge(reserved: Reserved, outside: Sequence[Outside], memory_bytes: int | None) -> Verdict:
    least = min(reserved.least, reserved.least_expandable) + sum(each.least for each in outside)
    most = reserved.by_default + sum(each.most for each in outside)
    if memory_bytes is None:
        answer = Answer.CANNOT_TELL
    elif most <= memory_bytes:
        answer = Answer.FITS
    else:
        answer = Answer.TIGHT if least <= memory_bytes else Answer.DOES_NOT_FIT
    return Verdict(answer, least, most, memory_bytes)
