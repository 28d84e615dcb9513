"""A recipe's optimizer step, as the probe runs and traces it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.optim import Optimizer

from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._step.batch_dependence import find_batch_dependent_module
from adaptive_batching._step.split import in_last_place
from adaptive_batching._torchtune.stock import compiling
from adaptive_batching._torchtune.stock.data import Sample, repeat
from adaptive_batching._torchtune.stock.end_to_end import RowSeams
from adaptive_batching._torchtune.stock.host import Host, OptimizersInBackward
from adaptive_batching._torchtune.stock.losses import keeps_scales
from adaptive_batching._torchtune.stock.objective import SHORT, Batch, Objective, Sums
from adaptive_batching._torchtune.stock.stand_ins import run_without_values
from adaptive_batching._torchtune.train.gradients import apply_gradients, forward_backward, held_back, sum_over_ranks
from adaptive_batching._torchtune.train.recipe_work import run_once
from adaptive_batching._trace.training import Run, TrainingStep, models_of

Note = Callable[[int, float], None]


def training_step(
    host: Host, sample: Sample, *, accumulates: bool, note: Note | None = None, traces_both: bool = False
) -> TrainingStep:
    """Return one optimizer step on copies of ``sample``, with the recipe's loss, collate function and clipping.

    If it ``accumulates``, a forward and backward runs while the gradients of another are held. A trace makes those at
    once, unless it ``traces_both``: the peak is the same, but not what an allocator reserves for it. ``note`` is told
    the samples and the seconds of each forward and backward of a real step.
    """
    num_samples = 0

    def make_batch(batch_size: int) -> Batch:
        nonlocal num_samples
        num_samples = batch_size
        if host.rows is None:
            return host.objective.collate(repeat(sample, batch_size))
        most = host.objective.with_most_targets(sample)
        return host.objective.lay([*repeat(most, batch_size - 1), *_last_of_row(host.objective, most, batch_size)])

    def bind(model: nn.Module, optimizers: Sequence[Optimizer]) -> Run:
        is_trace = model is not whole
        target = _stand_in(host, model, optimizers) if is_trace else host
        runs_both = accumulates and (traces_both or not is_trace)

        def run_one(batch: Batch, *, is_last: bool) -> Sums:
            start = time.perf_counter()
            with held_back(target, is_last=is_last):
                sums = forward_backward(target, dict(batch))
            if note is not None and not is_trace:
                if host.device.type != "cpu":
                    torch.get_device_module(host.device).synchronize(host.device)
                note(num_samples, time.perf_counter() - start)
            return sums

        def run(batch: Batch) -> None:
            if is_trace:
                batch = without_block_mask(batch)
            forwards = [partial(run_one, batch, is_last=last) for last in ([False, True] if runs_both else [True])]
            outcome = run_once(target, forwards)
            if outcome.failed:
                raise torch.OutOfMemoryError("out of memory on this rank or another") from outcome.error
            apply_gradients(target, sum_over_ranks(sum(outcome.results[1:], outcome.results[0]), target.ranks))

        return run

    def discard() -> None:
        host.objective.forget()
        compiling.forget(host)  # each size is compiled as it would be in training

    whole = nn.ModuleList(host.models) if host.objective.frozen_models else host.model
    return TrainingStep(
        whole, host.optimizers, make_batch, bind, discard, _vocabulary(whole),
        compiling.is_partitioned_by_inductor(host), keeps=keeps_scales(whole), on_cuda=host.device.type == "cuda",
        holds_gradients=accumulates and not traces_both,
    )  # fmt: skip


def batch_dependent_module(host: Host) -> str | None:
    """Name a part of the loss or of the model that computes over the batch dimension, or return None."""
    if (part := host.objective.batch_dependent_part()) is not None:
        return part
    tokens = torch.arange(1, 41, device=host.device).reshape(5, 8)  # [samples, tokens]; any text will do
    is_text = host.objective.is_text(host.loader.dataset[0])

    def run(batch: torch.Tensor) -> None:
        if is_text:  # a multimodal model may not take text alone
            host.model(tokens=batch)

    return find_batch_dependent_module(host.model, run, tokens[[0, 1, 2]], tokens[[0, 3, 4]])


def _vocabulary(model: nn.Module) -> frozenset[int]:
    """Return the size of the vocabulary, if any, by which a trace knows logits."""
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return frozenset([max(sizes)] if sizes else [])


def _stand_in(host: Host, model: nn.Module, optimizers: Sequence[Optimizer]) -> Host:
    """Return ``host`` as it trains a copy of its models, on their device and alone, for the trace."""
    trained, *frozen = models_of(model)
    backward_optimizers = None
    if host.steps_in_backward:
        backward_optimizers = OptimizersInBackward()
        stepped = {optimizer.param_groups[0]["params"][0]: optimizer for optimizer in optimizers}
        backward_optimizers.register(nn.ParameterList(stepped), stepped)  # of a sharded model, the shards
    objective = host.objective.for_trace(frozen)
    if compiling.is_partitioned_by_inductor(host):
        compiling.run_as_compiled([trained, *frozen], host.models, objective)
    run_without_values(trained)
    return replace(
        host,
        objective=objective,
        model=trained,
        optimizers=optimizers,
        device=next(trained.parameters()).device,
        ranks=Ranks(alone=True),
        collectives=None,
        backward_optimizers=backward_optimizers,
        rows=None if host.rows is None else RowSeams([trained, *frozen]),
    )


def _last_of_row(objective: Objective, sample: Sample, num_samples: int) -> list[Sample]:
    """Return samples for the last of ``num_samples`` places in a row, of unlike lengths, as those of training are."""
    if num_samples == 1:
        return [sample]
    shorter = [objective.stretch(sample, length) for length in in_last_place(objective.size_in_row(sample), SHORT)]
    return [sample if part is None else part for part in shorter]


def without_block_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """Return ``batch`` as a trace can take it: flex attention, which takes a mask of blocks, has no fake kernel.

    Without it attention is causal, in a fused kernel that keeps as much for the backward pass.
    """
    return {key: value for key, value in batch.items() if not isinstance(value, BlockMask)}
