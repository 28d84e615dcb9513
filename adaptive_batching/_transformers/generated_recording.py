"""The record of a run of a trainer that generates: what fits, each step, and what ran out of memory."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from adaptive_batching._device import Arrival
from adaptive_batching._memory.meter import PeakSoFar
from adaptive_batching._report.events import StepCost
from adaptive_batching._report.record import Report
from adaptive_batching._transformers.recording import TrainingRecord, watching

_ROUNDING = 1e-6  # of an epoch that is a sum of fractions


class GeneratedRecording(TrainingRecord):
    """Writes the record of a run whose batches stay as they are; its samples are completions."""

    def _begin(self) -> None:
        self._loss: torch.Tensor | None = None  # of the step so far, on this device
        self._has_found = False
        self._begun: dict[str, Any] | None = None  # an epoch, until its first step: TRL may train by itself till then

    def ran(self, loss: torch.Tensor) -> None:
        """Take note of the loss of a batch, by which it adds to that of its step."""
        self._loss = loss if self._loss is None else self._loss + loss

    def found(self) -> None:
        """Record what a probe has found, once; it runs when the first completions are asked for."""
        run, report = self._run, self.report
        if report is None or self._has_found:
            return
        self._has_found = True
        with report.only_warned():
            if run.probe is not None:
                report.probe(run.probe, sequence_length=run.longest, of="completions at once", waited=run.waited)
            self._seconds()  # which are none of the first step's

    @watching
    def on_train_begin(self, report: Report, state: Any, **kwargs: Any) -> None:
        self._peak = PeakSoFar(self._trainer.args.device)
        self._seconds()
        self._loss, self._epoch = None, math.floor((state.epoch or 0) + _ROUNDING)
        if state.global_step:
            report.resume(state.global_step, epoch=state.epoch, **self._sizes())

    @watching
    def on_epoch_begin(self, report: Report, state: Any, **kwargs: Any) -> None:
        at = state.epoch or 0
        self._epoch = math.floor(at + _ROUNDING)
        if at - self._epoch > _ROUNDING:  # it goes on, and its record has the rest
            return
        steps = math.ceil(state.max_steps / max(state.num_train_epochs, 1))
        sizes = self._sizes()
        values = {"steps": steps, "samples": steps * sizes["global_batch_size"], "dropped_samples": 0}
        self._begun = {"epoch": self._epoch, "step": state.global_step, "reason": "as configured", **sizes, **values}

    @watching
    def on_step_end(self, report: Report, state: Any, **kwargs: Any) -> None:
        run, step, epoch, rate = self._run, state.global_step, self._epoch, self._rate
        if self._begun is not None:
            self._soon(partial(report.epoch, **self._begun))
            self._begun = None
        for failed, max_tokens in run.take_recovered():
            self._soon(partial(report.recovery, epoch=epoch, step=step, failed=failed, max_tokens=max_tokens))
        parts = [part for part in run.parts_of_step if part.learns]
        tokens = sum(row.tokens for part in parts for row in part.samples)
        padded = sum(part.tokens for part in parts)
        peak = None if self._peak is None else self._peak.read()
        cost = StepCost(self._seconds(), len(run.parts_of_step), tokens, padded, peak)
        recoveries, samples = run.num_recoveries, self._sizes()["global_batch_size"]
        assert self._loss is not None
        arrival, self._loss = Arrival(self._loss), None

        def write() -> None:
            report.cost(cost)
            report.step(epoch, step, samples, arrival.value(), rate, recoveries)

        self._soon(write, arrival)

    def _sizes(self) -> dict[str, int]:
        args = self._trainer.args
        size = int(args.per_device_train_batch_size)
        return {"batch_size": size, "global_batch_size": size * args.gradient_accumulation_steps * args.world_size}
