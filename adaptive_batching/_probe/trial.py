"""Run real training steps to measure what they take, and restore all state afterwards.

There is one exception: the states of a paged optimizer (bitsandbytes) live in memory that can never be freed. A trial
that has to create them does so as the optimizer would, and they stay, at their initial values.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from adaptive_batching._device import unchanged_random_state
from adaptive_batching._memory import MemoryMeter, little_to_collect
from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._probe.sizes import Measurement
from adaptive_batching._probe.snapshot import parameters_of, unchanged
from adaptive_batching._trace.training import TrainingStep, has_states, trainable
from adaptive_batching._values import memory_size

log = logging.getLogger(__name__)


class Trial:
    """Context that runs real training steps and restores all state on exit, bit for bit, however a step ended.

    Saved are trainable parameters, buffers, optimizer states and settings, training mode, and the state of every random
    number generator. Optimizer states are then created, because a step needs memory in addition to them. Training makes
    them in its first step, in memory that this step has freed. With an allocator that keeps freed memory, that is
    another layout, which :meth:`begin` brings about.

    ``all_ready`` takes True if this rank has the batch for a step, and returns True if all ranks do: if one cannot
    begin a step, none does. A step is aborted at ``stopped_at_bytes``, None for the budget; one that takes more than
    the budget but less than this runs to its end, and does not fit. On entry, raise ConfigError if neither host memory,
    the folder for temporary files nor ``scratch`` has room for the saved state, and an out-of-memory error if not even
    the optimizer states fit.
    """

    def __init__(
        self,
        step: TrainingStep,
        meter: MemoryMeter,
        budget_bytes: int,
        scratch: Path | None = None,
        all_ready: Callable[[bool], bool] = lambda here: here,
        stopped_at_bytes: int | None = None,
    ) -> None:
        self._step = step
        self._meter = meter
        self.budget_bytes = budget_bytes
        self._scratch = scratch
        self._all_ready = all_ready
        self._stopped_at_bytes = stopped_at_bytes
        self._made: list[tuple[Optimizer, torch.Tensor]] = []  # of whom training will make states
        self._has_begun = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Trial:
        with contextlib.ExitStack() as stack:
            stack.enter_context(little_to_collect())
            stack.callback(self._meter.release)
            stack.callback(self._step.discard)
            stack.enter_context(unchanged_random_state(self._meter.device))
            stack.enter_context(unchanged(self._step.model, self._step.optimizers, self._scratch))
            self._meter.release()
            with self._limited():
                self._make_optimizer_states()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def makes_states(self) -> bool:
        return bool(self._made)

    def measure(self, batch_size: int) -> Measurement:
        """Run one full training step at ``batch_size`` with an empty allocator cache."""
        if self._has_begun:
            self._drop_states()
            self._has_begun = False
        self._clear()
        return self.measure_again(batch_size)

    def begin(self, batch_size: int) -> Measurement:
        """Run a step as the first one of training does, which makes the optimizer states."""
        self._drop_states()
        self._has_begun = True
        self._clear()
        return replace(self.measure_again(batch_size), makes_states=self.makes_states)

    def measure_again(self, batch_size: int) -> Measurement:
        """Run a step at the size that ran last, on the cache that it left, as consecutive steps of training do."""
        meter, run = self._meter, self._step.bind(self._step.model, self._step.optimizers)
        meter.reset_peak()
        retries_before, freed_before = meter.num_retries(), meter.num_freed_bytes()
        start = time.perf_counter()
        batches: list[Any] = []

        def prepare() -> None:
            if not self._has_begun:
                self._make_optimizer_states()
            batches.append(self._step.make_batch(batch_size))

        def train() -> None:
            batch = batches.pop()
            run(batch)
            meter.synchronize()

        ran_out = self._runs_out(prepare)
        # A rank without a batch would leave the others waiting in the step's collectives.
        ran_out = not self._all_ready(not ran_out) or self._runs_out(train)
        # Clean up here, outside the except block: the traceback keeps the step's tensors alive.
        seconds = time.perf_counter() - start
        retries, freed_bytes = meter.num_retries() - retries_before, meter.num_freed_bytes() - freed_before
        peak_bytes = None if ran_out else meter.peak_bytes()
        overhead = 1.0 if peak_bytes is None else max(peak_bytes / max(meter.peak_allocated_bytes(), 1), 1.0)
        if ran_out:
            self._clear()
        self._drop_gradients()
        gc.collect()  # compilers leave tensors behind in circles, which a second step must not meet
        fits = peak_bytes is not None and peak_bytes <= self.budget_bytes
        took = "out of memory" if peak_bytes is None else f"peak {memory_size(peak_bytes)}"
        strained = f", the allocator had to empty its cache {retries} times" if retries and not ran_out else ""
        log.info("batch size %d: %s, %.1f s%s", batch_size, took, seconds, strained)
        return Measurement(batch_size, fits, peak_bytes, seconds, overhead, retries, freed_bytes=freed_bytes)

    def _runs_out(self, function: Callable[[], None]) -> bool:
        try:
            with self._limited():
                function()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return True
        return False

    def _limited(self) -> contextlib.AbstractContextManager[None]:
        return self._meter.limit(self.budget_bytes if self._stopped_at_bytes is None else self._stopped_at_bytes)

    def _clear(self) -> None:
        self._step.discard()
        self._drop_gradients()
        self._meter.release()

    def _drop_gradients(self) -> None:
        for parameter in parameters_of(self._step.model, self._step.optimizers):
            parameter.grad = None

    def _drop_states(self) -> None:
        for optimizer, parameter in self._made:
            optimizer.state.pop(parameter, None)

    def _make_optimizer_states(self) -> None:
        """Step each optimizer once on zero gradients, to allocate the states without a forward pass."""
        for optimizer in self._step.optimizers:
            if has_states(optimizer):
                continue
            parameters = trainable(optimizer)
            self._made += [(optimizer, parameter) for parameter in parameters if parameter not in optimizer.state]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None
