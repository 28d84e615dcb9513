"""A model that FSDP2 shards: prepared once, before anything runs, so that all that runs is what training runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from adaptive_batching._loop.samples import collated
from adaptive_batching._ranks.fsdp import is_sharded
from adaptive_batching._transformers.handed_out import Sample, replaced
from adaptive_batching._transformers.loss_kind import LossKind


def shard(trainer: Any) -> None:
    """Have Accelerate shard the model of ``trainer``, with its optimizer, as ``Trainer`` does later in its run."""
    trainer.create_optimizer()
    model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model = trainer.model_wrapped = model


@contextlib.contextmanager
def prepared_already(trainer: Any) -> Iterator[None]:
    """Have Accelerate return what it is asked to prepare; checkpointed layers would be wrapped again."""
    with replaced(trainer.accelerator, prepare=lambda *given, **options: given if len(given) > 1 else given[0]):
        yield


def sharded_models(trainer: Any) -> list[nn.Module]:
    """Return what FSDP2 shards of the model of ``trainer`` and others that it needs, such as a reference model."""
    models = [trainer.model] if is_sharded(trainer.model) else []
    return [*models, *sharded_besides(trainer, trainer.model).values()]


def sharded_besides(trainer: Any, model: nn.Module) -> dict[str, nn.Module]:
    """Return what FSDP2 shards besides ``model``, by the attribute of ``trainer`` that it is."""
    modules = {name: value for name, value in vars(trainer).items() if isinstance(value, nn.Module)}
    return {name: module for name, module in modules.items() if module is not model and is_sharded(module)}


def head_of(model: Any) -> list[FSDPModule]:
    """Return the output layer if it is sharded, apart from other layers or with them; TRL may gather its weight itself.

    It does not if the layer has been gathered before.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [head] if isinstance(head, FSDPModule) else []


def short_with_targets(trainer: Any, kind: LossKind, samples: Sequence[Sample]) -> Sample:
    """Return the shortest sample with targets, if any has them."""

    def key(sample: Sample) -> tuple[bool, int]:
        batch = collated([sample], trainer.data_collator)
        size = sum(value.numel() for value in batch.values() if isinstance(value, torch.Tensor))
        return not kind.count(batch, 1), size

    return min(samples, key=key)


def run_without_weight(trainer: Any, forward_backward: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run a forward and backward for what other ranks wait for, and add nothing to gradients."""
    backward = trainer.accelerator.backward
    with replaced(trainer.accelerator, backward=lambda loss, **more: backward(0 * loss.nan_to_num(), **more)):
        loss = forward_backward()
    return torch.zeros_like(loss)
