"""Seconds of forwards and backwards while training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch


class ForwardTimer:
    """Times forwards and backwards on ``device``, and has ``observe`` called with the tokens and the seconds of each.

    On a CPU that is at once; elsewhere when :meth:`read` is called, so that the device is not waited for in between.
    """

    def __init__(self, device: torch.device, observe: Callable[[int, float], None]) -> None:
        self._device, self._observe = device, observe
        self._events: list[tuple[int, torch.Event, torch.Event]] = []

    @contextlib.contextmanager
    def around(self, tokens: int) -> Iterator[None]:
        if self._device.type == "cpu":
            start = time.perf_counter()
            yield
            self._observe(tokens, time.perf_counter() - start)
            return
        begin, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((tokens, begin, end))

    def read(self) -> None:
        """Have all that has been timed observed; a step is over."""
        for tokens, begin, end in self._events:
            end.synchronize()
            self._observe(tokens, begin.elapsed_time(end) / 1000)
        self._events.clear()

    def forget(self) -> None:
        self._events.clear()
