"""A recipe's optimizer step, as the probe runs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from adaptive_batching._probe.probed_step import TrainingStep
from adaptive_batching._step.judge import find_batch_norm
from adaptive_batching._step.split import in_last_place
from adaptive_batching._torchtune.stock import compiling
from adaptive_batching._torchtune.stock.data import Sample, repeat
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.objective import SHORT, Batch, Objective, Sums
from adaptive_batching._torchtune.train.recipe_work import (
    apply_gradients,
    forward_backward,
    run_once,
    sum_over_ranks,
)

Note = Callable[[int, float], None]


def training_step(host: Host, sample: Sample, *, accumulates: bool, note: Note | None = None) -> TrainingStep:
    """Return one optimizer step on copies of ``sample``, with the recipe's loss, collate function and clipping.

    If it ``accumulates``, a forward and backward runs while the gradients of another are held. ``note`` is told the
    samples and the seconds of each forward and backward.
    """
    num_samples = 0

    def make_batch(batch_size: int) -> Batch:
        nonlocal num_samples
        num_samples = batch_size
        if host.rows is None:
            return host.objective.collate(repeat(sample, batch_size))
        most = host.objective.with_most_targets(sample)
        return host.objective.lay([*repeat(most, batch_size - 1), *_last_of_row(host.objective, most, batch_size)])

    def run_one(batch: Batch, *, is_last: bool) -> Sums:
        start = time.perf_counter()
        sums = forward_backward(host, dict(batch), is_last=is_last)
        if note is not None:
            if host.device.type != "cpu":
                torch.get_device_module(host.device).synchronize(host.device)
            note(num_samples, time.perf_counter() - start)
        return sums

    def run(batch: Batch) -> None:
        outcome = run_once(host, [partial(run_one, batch, is_last=last) for last in [False, True][not accumulates :]])
        outcome.raise_if_failed()
        apply_gradients(host, sum_over_ranks(sum(outcome.results[1:], outcome.results[0]), host.ranks))

    def discard() -> None:
        host.objective.forget()
        compiling.forget(host)  # each size is compiled as it would be in training

    whole = nn.ModuleList(host.models) if host.objective.frozen_models else host.model
    return TrainingStep(whole, host.optimizers, make_batch, run, discard, state=host.state)


def batch_dependent_module(host: Host) -> str | None:
    """Name a part of the loss, or a batch norm of the model, that computes over the batch dimension, or return None."""
    return host.objective.batch_dependent_part() or find_batch_norm(host.model)


def _last_of_row(objective: Objective, sample: Sample, num_samples: int) -> list[Sample]:
    """Return samples for the last of ``num_samples`` places in a row, of unlike lengths, as those of training are."""
    if num_samples == 1:
        return [sample]
    shorter = [objective.stretch(sample, length) for length in in_last_place(objective.size_in_row(sample), SHORT)]
    return [sample if part is None else part for part in shorter]
