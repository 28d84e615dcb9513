"""Computation of a recipe: from samples to a loss, and the share that each part of a batch has in its gradient.

Everything else here cuts, runs, probes and recovers a step through an :class:`Objective` alone. A recipe that computes
something other than next-token prediction names a subclass of its own.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torchtune.training import OffloadActivations

from adaptive_batching._micro_batches.cut import length_in_chunks
from adaptive_batching._torchtune.data import Sample, is_packed, is_text, stretch
from adaptive_batching._torchtune.stand_ins import TracedOffloading

Batch = dict[str, Any]
Activations = contextlib.AbstractContextManager[Any]
"""Context of a forward, which may offload activations."""

_SHORT = 8


@dataclass(frozen=True)
class Counts:
    """Numbers that say what share a part has in the gradient of its batch."""

    terms: int
    """Terms that the mean loss is taken over; 0 for nothing to learn from."""

    tokens: int
    """Number that a step's gradient is divided by, where it is divided by tokens; else that of the terms."""


@dataclass(frozen=True)
class Sums:
    """Sums over micro-batches; all values are scalar tensors."""

    loss: torch.Tensor
    """Weighted losses."""

    tokens: torch.Tensor
    """Tokens that throughput is measured in."""

    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __add__(self, other: Sums) -> Sums:
        metrics = {name: value + other.metrics[name] for name, value in self.metrics.items()}
        return Sums(self.loss + other.loss, self.tokens + other.tokens, metrics)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Sums:
        """Apply ``function`` to each of the values."""
        tokens, loss = function(self.tokens), function(self.loss)  # in the order in which stock sums over ranks
        return Sums(loss, tokens, {name: function(value) for name, value in self.metrics.items()})


class Objective(ABC):
    """The computation of a recipe's loss. Subclasses say what is common to all samples of a data set."""

    frozen_models: Sequence[nn.Module] = ()
    """Models that the loss also needs, such as a reference or a teacher. They hold memory and are not trained."""

    sums_gradients = True
    """True if the gradient of a step is a sum over tokens until it is divided, which measuring its noise takes."""

    saves_memory_by: frozenset[str] = frozenset({"offloading", "lora"})
    """Ways to save memory that recipes of this kind have, besides checkpointing of activations."""

    # Samples

    @abstractmethod
    def tokens(self, sample: Sample) -> Sequence[int]:
        """Return the longest sequence of tokens in ``sample``."""

    @abstractmethod
    def counts(self, samples: Sequence[Sample]) -> Counts:
        """Return what decides on the share of ``samples`` in the gradient."""

    def weight_of(self, batch: Counts) -> int:
        """Return the number that the mean loss of a batch is multiplied by.

        Parts of the batch share it in proportion to their terms.
        """
        return batch.tokens

    def size(self, sample: Sample) -> int:
        """Return what ``sample`` takes of a forward: its tokens, or 1 where tokens say little about its memory."""
        return len(self.tokens(sample)) if self.is_text(sample) else 1

    def is_text(self, sample: Sample) -> bool:
        """Return True if the memory of ``sample`` follows from its tokens."""
        return True

    def stretch(self, sample: Sample, length: int) -> Sample | None:
        """Return a copy of ``sample`` with ``length`` tokens and something to learn from, or None if there is none."""
        return None

    def filler(self, samples: Sequence[Sample]) -> Sample:
        """Return a short sample with a finite loss, made from one of ``samples``, for a forward with weight 0."""
        return min(samples, key=lambda sample: len(self.tokens(sample)))

    # A forward

    @abstractmethod
    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return the batch that a forward takes, on the host."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, weight: float | None) -> tuple[torch.Tensor, Sums]:
        """Run the forward of one micro-batch.

        Args:
            model: The model that is trained.
            batch: The collated samples, on the device; may be changed.
            weight: Share of a part, by which its mean loss is multiplied: see :class:`Counts`. None for a whole batch,
                which is computed operation by operation as in stock.

        Returns:
            The weighted loss to run backward from, and its detached sums.
        """

    def smallest_batch(self, dataset: Any) -> Batch:
        """Return a batch as small as possible whose forward issues the collectives of training."""
        sample = dataset[0]
        return self.collate([self.stretch(sample, _SHORT) or sample])

    def leave_stock(self) -> None:  # noqa: B027 (an objective may have nothing to do here)
        """From now on, report what is right where stock reports something else."""

    def equalize_collectives(self) -> None:  # noqa: B027
        """From now on, pad batches so that every forward of a sharded model issues the same collectives."""

    def forget(self) -> None:  # noqa: B027
        """Drop what a forward that broke off has left behind."""

    def batch_dependent_part(self) -> str | None:
        """Name a part of the loss through which the parts of a batch would not add up to it, or return None."""
        return None

    # A step

    def begin_step(self, step: int, samples: int) -> None:  # noqa: B027
        """Prepare optimizer step number ``step``, from 0, on ``samples`` samples of this rank."""

    def divisor(self, sums: Sums) -> torch.Tensor | None:
        """Return the number by which the summed gradient of a step is divided; None if it is a mean already."""
        return None

    def mean_loss(self, sums: Sums) -> Any:
        """Return the loss of a step as stock logs it."""
        return sums.loss.item()

    def metrics(self, sums: Sums) -> dict[str, Any]:
        """Return what stock logs of a step besides loss, learning rate, throughput and gradient norm."""
        return {}

    # Set-up

    def recompile(self, again: Callable[[Any], Any]) -> None:  # noqa: B027
        """Replace compiled parts of the loss by ``again(part)``."""

    def for_trace(self, frozen_models: Sequence[nn.Module]) -> Objective:
        """Return a copy that computes with copies of the frozen models, on fake tensors of the host."""
        traced = copy.copy(self)
        traced.frozen_models = frozen_models
        return traced


class NextToken(Objective):
    """Supervised fine-tuning: the mean loss over target tokens, as stock's SFT recipes compute it.

    Args:
        collate: The collate function of stock's loader.
        loss: Mean over the labels that are not its ``ignore_index``.
        activations: Context of the forward, which may offload activations.
        num_chunks: Chunks of tokens for each of which a forward gathers the sharded output layer; 0 for none.
    """

    def __init__(
        self,
        collate: Callable[[list[Sample]], Batch],
        loss: Any,
        activations: Activations,
        num_chunks: int = 0,
    ) -> None:
        self._collate = collate
        self._loss = loss
        self._activations = activations
        self._num_chunks = num_chunks
        self._pads = False

    def tokens(self, sample: Sample) -> Sequence[int]:
        tokens: Sequence[int] = sample["tokens"]
        return tokens

    def counts(self, samples: Sequence[Sample]) -> Counts:
        # A sample's first label predicts nothing, yet stock counts it.
        return Counts(self._count(samples, 1), self._count(samples, 0))

    def _count(self, samples: Sequence[Sample], first: int) -> int:
        ignored = self._loss.ignore_index
        return sum(int((np.asarray(sample["labels"][first:]) != ignored).sum()) for sample in samples)

    def size(self, sample: Sample) -> int:
        return self._padded(len(sample["tokens"])) if self.is_text(sample) else 1

    def is_text(self, sample: Sample) -> bool:
        return is_text(sample)

    def stretch(self, sample: Sample, length: int) -> Sample | None:
        return stretch(sample, length)

    def filler(self, samples: Sequence[Sample]) -> Sample:
        several = [sample for sample in samples if len(sample["tokens"]) > 1]
        first = samples[0]
        shortest = min(several, key=lambda sample: len(sample["tokens"])) if several else stretch(first, 2) or first
        return {**shortest, "labels": shortest["tokens"]}  # a mean over no targets would be 0/0

    def collate(self, samples: Sequence[Sample]) -> Batch:
        batch = self._collate(list(samples))
        length = self._padded(batch["tokens"].shape[1])  # tokens: [b, s]
        return _pad_to(batch, length, self._loss.ignore_index)

    def _padded(self, length: int) -> int:
        return length_in_chunks(length, self._num_chunks) if self._pads else length

    def loss(self, model: nn.Module, batch: Batch, weight: float | None) -> tuple[torch.Tensor, Sums]:
        labels = batch.pop("labels")  # [b, s]
        num_tokens = (labels != self._loss.ignore_index).sum()
        with self._activations:
            logits = model(**batch)  # [b, s, vocabulary], or a list of chunks of s
        labels = self._shifted(labels)
        if not isinstance(logits, list):
            labels = labels.reshape(-1)
            logits = logits.reshape(-1, logits.size(-1))
        # The mean times the number of its labels can be summed over micro-batches, and the gradient be divided by all
        # labels of the step.
        loss = self._loss(logits, labels) * (num_tokens if weight is None else weight)
        return loss, Sums(loss.detach(), num_tokens)

    def _shifted(self, labels: torch.Tensor) -> torch.Tensor:
        """Move labels, so that logits stay whole: each position predicts the next one."""
        last = torch.full_like(labels[..., :1], self._loss.ignore_index, dtype=torch.long)
        return torch.hstack((labels[..., 1:], last))

    def smallest_batch(self, dataset: Any) -> Batch:
        length = length_in_chunks(_SHORT, self._num_chunks)
        if self._num_chunks > 1 and is_packed(dataset):  # packs cannot be padded, and need not be: they have one length
            of_pack = len(dataset[0]["tokens"])
            fewer = -(-of_pack // -(-of_pack // self._num_chunks))
            length = fewer if fewer < self._num_chunks else length  # tokens, each a chunk
        tokens = torch.arange(1, length + 1)[None]  # [1, s]; any text will do
        return {"tokens": tokens, "labels": tokens.clone()}

    def equalize_collectives(self) -> None:
        self._pads = True

    def forget(self) -> None:
        self._activations = renewed(self._activations)

    def divisor(self, sums: Sums) -> torch.Tensor:
        return sums.tokens

    def mean_loss(self, sums: Sums) -> Any:
        return sums.loss.item() / sums.tokens

    def recompile(self, again: Callable[[Any], Any]) -> None:
        self._loss = again(self._loss)

    def for_trace(self, frozen_models: Sequence[nn.Module]) -> Objective:
        traced = super().for_trace(frozen_models)
        assert isinstance(traced, NextToken)
        traced._activations = traced_like(self._activations)
        return traced


def renewed(activations: Activations) -> Activations:
    """Return the context of a forward without what one that broke off has left in it."""
    if not isinstance(activations, OffloadActivations):
        return activations
    # Its hooks refer to it, so that it lives on until the garbage is collected; what it holds need not.
    for name in ("tracker", "fwd_stash", "bwd_tensor_stash", "bwd_ev_stash"):
        getattr(activations, name, {}).clear()
    # It refers to a node of the graph, whose hooks refer to it: a circle through C++, which no collection finds.
    activations.curr_autograd_node = None
    fresh: Activations = OffloadActivations()
    return fresh


def traced_like(activations: Activations) -> Activations:
    """Return the context for a forward on fake tensors."""
    offloads = isinstance(activations, (OffloadActivations, TracedOffloading))
    return TracedOffloading() if offloads else contextlib.nullcontext()


def _pad_to(batch: Batch, length: int, ignore_index: int) -> Batch:
    """Return collated text, padded on the right to ``length`` with labels to be ignored; other batches as they are.

    That is exact: under a causal mask no earlier token sees the padding, and it has no part in the loss.
    """
    missing = length - batch["tokens"].shape[1]  # tokens: [b, s]
    if missing <= 0 or set(batch) != {"tokens", "labels"}:
        return batch
    return {
        "tokens": functional.pad(batch["tokens"], (0, missing)),
        "labels": functional.pad(batch["labels"], (0, missing), value=ignore_index),
    }
