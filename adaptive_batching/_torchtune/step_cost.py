"""What is noted of steps beside their results: time, tokens and memory for the record, allocations for the profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from adaptive_batching._memory import MemoryMeter, memory_meter
from adaptive_batching._report.events import StepCost
from adaptive_batching._torchtune.data import Sample
from adaptive_batching._torchtune.host import Host, MemoryHistory
from adaptive_batching._torchtune.splitting import MicroBatch


class StepCosts:
    """Tells what each optimizer step has taken; counters that others may read are left alone while training goes on."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._meter: MemoryMeter | None = None
        with contextlib.suppress(NotImplementedError, OSError):
            self._meter = memory_meter(host.device)
            self._meter.reset_peak()  # what the probe took is its own

    def of(self, samples: Sequence[Sample], micro_batches: Sequence[MicroBatch], seconds: float) -> StepCost:
        objective, tokens, padded = self._host.objective, None, None
        if samples and objective.is_text(samples[0]):
            tokens = sum(len(objective.tokens(sample)) for sample in samples)
            padded = sum(each.tokens for each in micro_batches)
        return StepCost(seconds, len(micro_batches), tokens, padded, self._peak_bytes())

    def _peak_bytes(self) -> int | None:
        device = self._host.device
        if device.type != "cpu":
            # Memory that is reserved stays so until the cache is emptied: it is the peak, and nothing has to be reset.
            module = torch.get_device_module(device)
            return int(module.memory_reserved(device)) if hasattr(module, "memory_reserved") else None
        with contextlib.suppress(OSError, KeyError, MemoryError):
            return None if self._meter is None else self._meter.peak_bytes()
        return None


@contextlib.contextmanager
def recorded_memory(history: MemoryHistory | None, epoch: int, index: int) -> Iterator[None]:
    """Record CUDA's allocations inside, if batch number ``index`` of ``epoch``, both from 0, is one to record."""
    begin, end = (history.first, history.last) if history is not None and epoch == 0 else (None, None)
    if index == begin:
        torch.cuda.memory._record_memory_history()
    yield
    if index == end:
        torch.cuda.memory._record_memory_history(enabled=None)
