"""Seconds of forwards and backwards while training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

from adaptive_batching._step.work import Part

P = TypeVar("P", bound=Part)


class ForwardTimer(Generic[P]):
    """Times forwards and backwards of parts on ``device``, and has ``observe`` called with each and its seconds.

    On a CPU that is at once; elsewhere when :meth:`read` is called, so that the device is not waited for in between.
    """

    def __init__(self, device: torch.device, observe: Callable[[P, float], None]) -> None:
        self._device, self._observe = device, observe
        self._events: list[tuple[P, torch.Event, torch.Event]] = []

    @contextlib.contextmanager
    def around(self, part: P) -> Iterator[None]:
        if self._device.type == "cpu":
            start = time.perf_counter()
            yield
            self._observe(part, time.perf_counter() - start)
            return
        begin, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((part, begin, end))

    def read(self) -> None:
        """Have all that has been timed observed; a step is over."""
        for part, begin, end in self._events:
            if not end.query():  # as a rule the device is past it, and nothing is waited for
                end.synchronize()
            self._observe(part, begin.elapsed_time(end) / 1000)
        self._events.clear()

    def forget(self) -> None:
        self._events.clear()
