"""The largest forward that fits, found by real steps of a trainer before it trains."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from adaptive_batching._attention import SampleBounds
from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._loop.step import clip_and_step
from adaptive_batching._memory.meter import memory_meter
from adaptive_batching._memory.unused_memory import little_to_collect
from adaptive_batching._probe.find import find_largest
from adaptive_batching._probe.probed_step import TrainingStep
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._probe.sizing import ProbeRequest
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._ranks.fsdp import end_forward
from adaptive_batching._state import Saved, State
from adaptive_batching._transformers.handed_out import (
    Sample,
    unlogged,
    without_gathering,
)
from adaptive_batching._transformers.row_of_samples import RowAttention
from adaptive_batching._transformers.sharded import sharded_besides
from adaptive_batching._transformers.step_in_parts import StepInParts

_OF_ACCELERATE = ("forward", "_original_forward", "_is_accelerate_prepared")
"""Attributes of a model by which Accelerate casts what goes in and comes out, and knows that it does.

To undo that, it takes whatever ``forward`` a model has as an attribute for its own, also one that TRL has set. A model
that still counts as prepared would train without autocast.
"""


@little_to_collect()  # by Accelerate, too
def probe(
    trainer: Any, step: StepInParts, extremes: Sequence[Sample], settings: AdaptiveBatchingConfig,
    request: ProbeRequest, *, ranks: Ranks, scratch: Path,
) -> ProbeResult:  # fmt: skip
    """Return how many of the longest samples fit in a forward.

    ``extremes`` are the longest and the shortest of the data. A batch of several has the shortest as well, so that it
    is padded as in training: only then do models of transformers make a mask, by the square of the length. A row of
    several ends with as many tokens in shorter samples, so that it has samples of unlike lengths as in training.
    ``step`` is told the time of each forward and backward. State is restored afterwards, with the model and the
    optimizer as they were before Accelerate prepared them; one that is sharded stays so.
    """
    kind, device = step.kind, trainer.args.device
    prepared = _prepared(trainer, keeps=bool(step.models))
    end_forward(step.models)
    with (
        _structure_kept(trainer, step.state),
        prepared as (trained, optimizer),
        without_gathering(trainer),
        unlogged(trainer),
    ):
        others = sharded_besides(trainer, trained)
        models = nn.ModuleList([trained, *others.values()]) if others else trained

        attention = RowAttention(models)

        def forward_backward(inputs: Any, bounds: SampleBounds | None, count: int) -> torch.Tensor:
            number = kind.count(inputs, count) if kind.takes_number else None
            start = time.perf_counter()
            with nullcontext() if bounds is None else attention.within(bounds):
                loss = trainer.forward_backward(trained, dict(inputs), number)
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)
            step.times.note(count, time.perf_counter() - start)
            return loss  # type: ignore[no-any-return]

        def run(batch: Any) -> None:
            forwards = [partial(forward_backward, *batch)] * (2 if request.in_parts else 1)
            if not step.models:
                for forward in forwards:
                    forward()
            else:
                step.run(forwards).raise_if_failed()
            clip_and_step(models, [optimizer], trainer.args.max_grad_norm or math.inf)

        def make_batch(size: int) -> tuple[Any, SampleBounds | None, int]:
            longest, shortest = extremes
            last = shortest if size > 1 and step.pads and step.joins_batches else longest
            batch, row = step.row([*[longest] * (size - 1), last])
            if row is None:
                return batch, None, size
            if size > 1:
                row = step.cut_again(row, step.tokens([shortest]))
            return row.inputs, row.bounds, size

        return find_largest(
            TrainingStep(models, [optimizer], make_batch, run, state=step.state), settings, memory_meter(device),
            request, ranks=ranks, times=step.times, scratch=scratch,
        )  # fmt: skip


@contextmanager
def _structure_kept(trainer: Any, state: State) -> Iterator[None]:
    """Put back what is done to ``trainer`` to prepare it; a probe itself puts back the values of tensors."""
    saved, optimizer = Saved(state), trainer.optimizer
    try:
        yield
    finally:
        trainer.optimizer = optimizer
        saved.put_back()


@contextmanager
def _prepared(trainer: Any, *, keeps: bool) -> Iterator[tuple[nn.Module, Optimizer]]:
    """Give the model and the optimizer as training has them, and undo that on exit unless it ``keeps`` them."""
    before = {name: value for name, value in vars(trainer.model).items() if name in _OF_ACCELERATE}
    if keeps:
        model, optimizer = trainer.model, trainer.optimizer
    else:
        trainer.create_optimizer()
        model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    scaler, trainer.accelerator.scaler = trainer.accelerator.scaler, None  # steps of a probe do not scale
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    try:
        yield without_ddp(trainer, model), optimizer.optimizer
    finally:
        trainer.accelerator.scaler = scaler
        if not keeps:
            trainer.accelerator.free_memory()
            for name in _OF_ACCELERATE:
                vars(trainer.model).pop(name, None)
            vars(trainer.model).update(before)


def without_ddp(trainer: Any, model: nn.Module) -> nn.Module:
    """Return ``model`` as Accelerate has prepared it, without DDP, which would communicate in each part.

    Accelerate compiles what DDP wraps together with DDP; without it, the model is compiled by itself.
    """
    wrapped = getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):  # whose layers may be compiled
        return model.module  # type: ignore[no-any-return]
    if not isinstance(wrapped, DistributedDataParallel):
        return model
    return cast(nn.Module, torch.compile(wrapped.module, **trainer.accelerator.state.dynamo_plugin.to_kwargs()))
