"""The size of rows of samples end to end, learnt while training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

_GAIN = 0.03  # share of a token's time that is worth the memory of rows twice as long, and stands out from noise
_ON_CPU = 1024  # tokens of a row to begin with, whose values stay in its caches

Gather = Callable[[tuple[float, bool]], list[tuple[float, bool]]]


def first_row(kind: str) -> int:
    """Return the tokens of a row to begin with: on a GPU as many as take it about as long as launching their kernels.

    On an H200 that was 6,000 tokens of a model of half a billion parameters. ``kind`` is the type of the device.
    """
    return _ON_CPU if kind == "cpu" else 8192


class RowSize:
    """Tokens of a row of samples end to end: doubled while the time of a token falls enough, learnt while training.

    Longer rows have fewer fixed costs, but on a CPU they leave its caches, and anywhere they take more memory. Where a
    forward has a fixed cost, each doubling gains half of what the one before gained: the next is tried if it should
    gain ``_GAIN`` at least, and stays if it has. A size counts by the fastest of three steps; the first step of
    a run does not count, as it includes one-time setup. All ranks go up together, each from an eighth of its step.

    Args:
        at_first: Tokens of the first row, as :func:`first_row` has them.
    """

    _PARTS_AT_FIRST = 8  # of a step that has more
    _STEPS = 3  # at each size

    def __init__(self, at_first: int = _ON_CPU) -> None:
        self._size = at_first
        self._most = 0  # tokens of the step that could be a row
        self._rate: float | None = None  # seconds per token at half of this size
        self._rates: list[float] = []  # of steps at this size
        self._is_settled = False
        self._begun = 0  # steps
        self._tokens, self._seconds = 0, 0.0  # of the forwards of a step

    def tokens(self, of_step: int, limit: int) -> int:
        """Return the most tokens that a row should have: up to ``limit``, of the ``of_step`` tokens that there are."""
        most = min(of_step, limit)
        self._most = max(self._most, most)
        if self._begun == 1 and not self._is_settled:
            self._size = max(self._size, -(-most // self._PARTS_AT_FIRST))
        return min(self._size, limit)  # which may be above what there is: samples of other ranks may come

    def observe(self, tokens: int, seconds: float) -> None:
        """Take note of a forward and backward of the step."""
        self._tokens += tokens
        self._seconds += seconds

    def begin_step(self, gather: Gather = lambda value: [value]) -> None:
        """Decide on the size of the next step, from those before it; all ranks call this, and decide alike.

        ``gather`` returns the values of all ranks.
        """
        if self._is_settled:
            return
        self._begun += 1
        if self._begun > 2:
            self._rates.append(self._seconds / max(self._tokens, 1))
        can_grow, self._most, self._tokens, self._seconds = self._size < self._most, 0, 0, 0.0
        if len(self._rates) < self._STEPS:
            return
        # The slowest rank counts, as the others wait for it.
        rates, can = zip(*gather((min(self._rates), can_grow)), strict=True)
        rate, self._rates = max(rates), []
        if not any(can):
            return
        gain = 1.0 if self._rate is None else 1 - rate / self._rate
        self._is_settled = gain < 2 * _GAIN
        if gain < _GAIN:
            self._size //= 2
        if self._is_settled:
            log.info("rows have up to %d tokens: longer ones would gain less than %.0f %%", self._size, 100 * _GAIN)
        else:
            self._rate, self._size = rate, 2 * self._size

    def state_dict(self) -> dict[str, Any]:
        return {"size": self._size, "rate": self._rate, "is_settled": self._is_settled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._size, self._rate, self._is_settled = state["size"], state["rate"], state["is_settled"]
