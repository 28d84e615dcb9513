"""Computation of a recipe: from samples to a loss, and the share that each part of a batch has in its gradient."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtune.training import OffloadActivations
from tqdm import tqdm

from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._torchtune.stock.data import Sample, is_packed
from adaptive_batching._values import ConfigError

Batch = dict[str, Any]
Activations = contextlib.AbstractContextManager[Any]
SHORT = 8  # tokens of the shortest text that is run


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
        metrics = {name: function(value) for name, value in self.metrics.items()}
        return Sums(function(self.loss), function(self.tokens), metrics)


@dataclass(frozen=True)
class StockParts:
    """The parts of a recipe that an objective is made from."""

    collate: Callable[[list[Sample]], Any]
    loss: Any
    activations: Any  # context of a forward, which may offload them
    num_chunks: int  # chunks of tokens for each of which a forward gathers the output layer; 0 if it does not
    frozen: nn.Module | None = None  # a reference or a teacher
    num_ranks: int = 1
    teacher_loss: Any = None  # mean divergence of logits from the teacher's, over the labels that are not ignored
    teacher_share: float = 0.0  # of the divergence in the loss
    model: nn.Module | None = None  # the one that is trained
    fake_quantized_from: int | None = None  # optimizer step that fake quantization begins with; None for the first
    quantizer_mode: str | None = None  # kind of the quantizer, as torchtune names it


class Objective(ABC):
    """The computation of a recipe's loss. Subclasses say what is common to all samples of a data set."""

    frozen_models: Sequence[nn.Module] = ()
    """Models that the loss also needs, such as a reference or a teacher. They hold memory and are not trained."""

    saves_memory_by: frozenset[str] = frozenset({"offloading", "lora"})
    """Ways to save memory that recipes of this kind have, besides checkpointing of activations."""

    _activations: Activations = contextlib.nullcontext()

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

    def size_in_row(self, sample: Sample) -> int:
        """Return what ``sample`` takes of a row of samples end to end, in the unit of :meth:`size`."""
        return self.size(sample)

    def is_text(self, sample: Sample) -> bool:
        """Return True if the memory of ``sample`` follows from its tokens."""
        return True

    def stretch(self, sample: Sample, length: int) -> Sample | None:
        """Return a copy of ``sample`` with ``length`` tokens and something to learn from, or None if there is none."""
        return None

    def with_most_targets(self, sample: Sample) -> Sample:
        """Return ``sample`` with as many targets as it can have, where a row makes logits for targets alone.

        A probe asks for it, since what it finds has to hold for any sample of that length.
        """
        return sample

    def filler(self, samples: Sequence[Sample]) -> Sample:
        """Return a short sample with a finite loss, made from one of ``samples``, for a forward with weight 0."""
        return min(samples, key=lambda sample: len(self.tokens(sample)))

    # A forward

    @property
    def lays(self) -> bool:
        """True if samples can be laid end to end, without padding."""
        return False

    @abstractmethod
    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return the batch that a forward takes, on the host."""

    def lay(self, samples: Sequence[Sample]) -> Batch:
        """Return the batch of a forward that has the samples end to end in one row, on the host; see :attr:`lays`."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, weight: float | None) -> tuple[torch.Tensor, Sums]:
        """Run the forward of one micro-batch.

        Args:
            model: The model that is trained.
            batch: The collated samples, on the device; may be changed.
            weight: Share of a part, by which its mean loss is multiplied: see :class:`Counts`. None for a whole batch,
                which is computed as in stock.

        Returns:
            The weighted loss to run backward from, and its detached sums.
        """

    def smallest_batch(self, dataset: Any) -> Batch:
        """Return a batch as small as possible whose forward issues the collectives of training."""
        sample = dataset[0]
        return self.collate([self.stretch(sample, SHORT) or sample])

    def equalize_collectives(self) -> None:  # noqa: B027 (an objective may have nothing to do here)
        """From now on, pad batches so that every forward of a sharded model issues the same collectives."""

    def forget(self) -> None:
        """Drop what a forward that broke off has left behind."""
        if isinstance(self._activations, OffloadActivations):
            # The context lives on until garbage is collected, so that it is emptied.
            for name in ("tracker", "fwd_stash", "bwd_tensor_stash", "bwd_ev_stash"):
                getattr(self._activations, name, {}).clear()
            # It refers to a node of the graph, whose hooks refer to it: a circle in C++, which no collection finds.
            self._activations.curr_autograd_node = None
            self._activations = OffloadActivations()

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
        """Return the loss of a step that is logged."""
        return sums.loss.item()

    def metrics(self, sums: Sums) -> dict[str, Any]:
        """Return what is logged of a step besides loss, learning rate, throughput and gradient norm."""
        return {}

    # Set-up

    def recompile(self, again: Callable[[Any], Any]) -> None:  # noqa: B027
        """Replace compiled parts of the loss by ``again(part)``."""


def worst_case_sample(
    dataset: Any,
    objective: Objective,
    *,
    sequence_length: int | None,
    tokenizer_max: int | None,
    model_max: int | None,
    ranks: Ranks,
) -> Sample:
    """Return a sample of ``sequence_length`` tokens, else ``tokenizer_max``, else as long as the longest."""
    sample = dict(dataset[0])
    packed = is_packed(dataset)
    if objective.stretch(sample, len(objective.tokens(sample))) is None:  # as with tokens that refer to images
        sample = sample if packed else _longest(dataset, objective, ranks)
        length = len(objective.tokens(sample))
        if sequence_length is not None and sequence_length != length:
            kind = "packed" if packed else "multimodal"
            raise ConfigError(
                f"adaptive_batching.sequence_length={sequence_length} cannot be used with {kind} data, whose longest "
                f"sample has {length} tokens; leave it null"
            )
    elif sequence_length is not None or tokenizer_max is not None:
        length = sequence_length or min(n for n in (tokenizer_max, model_max) if n is not None)
        sample = objective.stretch(sample, length) or sample
    else:
        sample = _longest(dataset, objective, ranks)
        length = len(objective.tokens(sample))
    if model_max is not None and length > model_max:
        source = "the longest sample has" if sequence_length is None else "adaptive_batching.sequence_length asks for"
        raise ConfigError(
            f"{source} {length} tokens, but the model takes at most {model_max}; set tokenizer.max_seq_len"
        )
    return sample


def _longest(dataset: Any, objective: Objective, ranks: Ranks) -> Sample:
    options = {"desc": "Looking for the longest sample", "dynamic_ncols": True, **ranks.bar_options}
    indices = tqdm(range(len(dataset)), **options)
    longest: Sample = max((dataset[index] for index in indices), key=lambda sample: len(objective.tokens(sample)))
    return dict(longest)
