"""The largest forward that fits, found by real steps of a trainer before it trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._loop.samples import collated
from adaptive_batching._memory import memory_meter
from adaptive_batching._probe.find import ProbeRequest, find_largest
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._probe.trial import parameters_of
from adaptive_batching._trace.training import Run, TrainingStep
from adaptive_batching._transformers.handed_out import (
    Sample,
    alone,
    counters_of,
    put_back_counters,
    replaced,
    unchanged_buffers,
)
from adaptive_batching._transformers.sharded import can_be_traced
from adaptive_batching._transformers.step_in_parts import StepInParts

_FORWARDS = ("forward", "_original_forward")
"""Attributes of a model by which Accelerate casts what goes in and comes out."""


def probe(
    trainer: Any, step: StepInParts, sample: Sample, settings: AdaptiveBatchingConfig, request: ProbeRequest,
    *, in_parts: bool,
) -> ProbeResult:  # fmt: skip
    """Return how many copies of ``sample`` fit in a forward; ``in_parts`` if gradients of others are held meanwhile.

    State is restored afterwards, with the model and the optimizer as they were before Accelerate prepared them; one
    that is sharded stays so.
    """
    kind = step.kind
    prepared = _prepared(trainer, keeps=bool(step.models))
    with unchanged_buffers(trainer.model), prepared as (whole, optimizer), alone(trainer):

        def bind(model: nn.Module, optimizers: Sequence[Optimizer]) -> Run:
            def forward_backward(inputs: Any, count: int) -> torch.Tensor:
                number = kind.count(inputs, count) if kind.takes_number else None
                stays = (
                    {} if model is whole else {"_prepare_inputs": lambda batch: batch}
                )  # a trace has a device of its own
                with replaced(trainer, **stays):
                    return trainer.forward_backward(model, dict(inputs), number)  # type: ignore[no-any-return]

            def run(batch: Any) -> None:
                forwards = [partial(forward_backward, *batch)] * (2 if in_parts else 1)
                if not step.models or model is not whole:
                    for forward in forwards:
                        forward()
                elif (outcome := step.run(forwards)).failed:
                    raise torch.OutOfMemoryError("out of memory on this rank or another") from outcome.error
                parameters = parameters_of(model, optimizers)
                nn.utils.clip_grad_norm_(parameters, trainer.args.max_grad_norm or float("inf"))
                for each in optimizers:
                    each.step()
                for parameter in parameters:
                    parameter.grad = None
                torch.clear_autocast_cache()

            return run

        def make_batch(size: int) -> tuple[Any, int]:
            return collated([sample] * size, trainer.data_collator), size

        device = trainer.args.device
        trained = TrainingStep(
            whole, [optimizer], make_batch, bind, on_cuda=device.type == "cuda",
            can_be_traced=can_be_traced(step.models),
        )  # fmt: skip
        return find_largest(trained, settings, memory_meter(device), request)


@contextmanager
def _prepared(trainer: Any, *, keeps: bool) -> Iterator[tuple[nn.Module, Optimizer]]:
    """Give the model and the optimizer as training has them, and undo that on exit unless it ``keeps`` them."""
    saved = counters_of(trainer)
    forwards = {name: value for name, value in vars(trainer.model).items() if name in _FORWARDS}
    if keeps:
        model, optimizer = trainer.model, trainer.optimizer
    else:
        trainer.create_optimizer()
        model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    scaler, trainer.accelerator.scaler = trainer.accelerator.scaler, None  # a trace would leave its numbers in it
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    try:
        yield getattr(model, "module", model) if is_ddp(model) else model, optimizer.optimizer
    finally:
        trainer.accelerator.scaler = scaler
        if not keeps:
            trainer.accelerator.free_memory()
            for name in _FORWARDS:
                vars(trainer.model).pop(name, None)
            vars(trainer.model).update(forwards)
        put_back_counters(trainer, saved)


def is_ddp(model: nn.Module) -> bool:
    return isinstance(model, nn.parallel.DistributedDataParallel)
