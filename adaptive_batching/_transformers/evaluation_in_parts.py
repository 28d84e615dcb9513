"""Evaluation batches that run again in smaller parts when memory runs out, and later ones in parts that fit at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_map
from transformers.trainer_pt_utils import nested_concat

from adaptive_batching._device import unchanged_random_state
from adaptive_batching._loop.auto_batcher import AutoBatcher
from adaptive_batching._loop.samples import collated
from adaptive_batching._state import draws_put_back
from adaptive_batching._transformers.declared import state_of, trl_metrics_of
from adaptive_batching._transformers.handed_out import Sample, replaced
from adaptive_batching._transformers.loss_kind import LossKind

Predicted = tuple[Any, Any, Any]
"""Loss, logits and labels, as ``prediction_step`` returns them."""


@dataclass(frozen=True)
class _PredictedPart:
    samples: Sequence[int]  # indices of those of the batch
    batch: Any
    predicted: Predicted


class EvaluationInParts:
    """Runs batches of an evaluation, and those that do not fit in parts; no sample counts twice.

    A batch stays what ``per_device_eval_batch_size`` says: the loss that ``Trainer`` reports is a mean over batches.
    What does not fit is remembered, for all evaluations.
    """

    def __init__(self, trainer: Any) -> None:
        self.loaders: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """For each loader of batches, the one that hands out their samples; its workers may be persistent."""

        self.loader: Any = None
        """The loader of batches that is evaluated."""

        self._trainer = trainer
        self._number_was_asked_for = False
        self._kind: LossKind | None = None  # once it was needed
        self._batcher = AutoBatcher(
            trainer.args.device,
            remedy="set eval_accumulation_steps=1, which moves predictions to the host, or shorten it",
        )  # fmt: skip

    @property
    def num_recoveries(self) -> int:
        """Number of times that samples have had to run again."""
        return self._batcher.limit.num_recoveries

    def __call__(
        self,
        samples: list[Sample],
        length: Callable[[Sample], int] | None,
        kind: Callable[[], LossKind],
        predict: Callable[[Any], Predicted],
    ) -> Predicted:
        """Return what ``predict`` gives for the batch of all samples, in their order.

        Beyond the end of a sample it may be -100, with which ``Trainer`` pads.
        """
        if self._batcher.state is None:  # the trainer is as it is to be by now
            self._batcher.state = state_of(self._trainer)
        lengths = [1 if length is None else max(length(sample), 1) for sample in samples]
        longest_first = sorted(range(len(samples)), key=lambda index: lengths[index], reverse=True)
        metrics = trl_metrics_of(self._trainer)
        before = {} if metrics is None else metrics.lengths()
        parts: list[_PredictedPart] = []

        def forward(rows: range) -> Sequence[int]:
            indices = range(len(samples)) if len(rows) == len(samples) else [longest_first[row] for row in rows]
            batch = collated([samples[index] for index in indices], self._trainer.data_collator)
            parts.append(_PredictedPart(indices, batch, predict(batch)))
            return indices

        with self._number_of_all(samples):
            self._batcher.run([lengths[index] for index in longest_first], forward)
        if len(parts) == 1:
            return parts[0].predicted
        losses, logits, labels = zip(*(part.predicted for part in parts), strict=True)
        of_loss = LossKind(False, "samples")
        if losses[0] is not None:
            # Only here: finding it takes forwards of its own, which an evaluation that fits, or has no loss, is spared.
            of_loss = self._kind = self._kind or kind()
        weights = [float(of_loss.count(part.batch, len(part.samples))) for part in parts]
        if metrics is not None:
            metrics.join(before, [(part.batch, weight) for part, weight in zip(parts, weights, strict=True)])
        order = [part.samples for part in parts]
        of_all = of_loss.takes_number and self._number_was_asked_for
        if of_loss.takes_number and not of_all:
            weights = [self._divided_by(part, weight) for part, weight in zip(parts, weights, strict=True)]
        loss = _sum(losses, [1.0] * len(losses)) if of_all else _mean(losses, weights)
        return loss, _joined(logits, order), _joined(labels, order)

    def _divided_by(self, part: _PredictedPart, targets: float) -> float:
        """Return what ``Trainer`` divides the sum of a part by: before transformers 5.16, not the number of targets."""
        if self._trainer.args.world_size > 1:
            return targets
        number = self._trainer._get_num_items_in_batch([part.batch], self._trainer.args.device)
        return targets if number is None else float(number)

    @contextlib.contextmanager
    def _number_of_all(self, samples: list[Sample]) -> Iterator[None]:
        """On several ranks, have ``Trainer`` divide losses by the targets of all: it asks for them here, once."""
        trainer, self._number_was_asked_for = self._trainer, False
        if trainer.args.world_size == 1:
            yield
            return
        # It is collated again where it runs, and what is drawn then, as of a mask, has to be what is counted here.
        with draws_put_back(trainer.data_collator), unchanged_random_state(trainer.args.device):
            batch = collated(samples, trainer.data_collator)
        number = trainer._get_num_items_in_batch([batch], trainer.args.device)

        def number_of_all(*args: Any, **kwargs: Any) -> Any:
            self._number_was_asked_for = number is not None
            return number

        with replaced(trainer, _get_num_items_in_batch=number_of_all):
            yield


def _mean(losses: Sequence[Any], weights: Sequence[float]) -> torch.Tensor | None:
    """Return the mean of the losses of parts, each by its number of targets or samples."""
    total = sum(weights) or 1.0
    return _sum(losses, [weight / total for weight in weights])


def _sum(losses: Sequence[Any], weights: Sequence[float]) -> torch.Tensor | None:
    if any(loss is None for loss in losses):
        return None
    counted = [loss * weight for loss, weight in zip(losses, weights, strict=True) if weight]
    return torch.stack(counted).sum() if counted else losses[0]


def _joined(values: Sequence[Any], order: Sequence[Sequence[int]]) -> Any:
    """Return logits or labels of parts, which have these samples, as one, padded as ``Trainer`` pads those of batches.

    A sample may have several rows, of which the first of all samples come first, as those of chosen answers do.
    """
    first, *rest = values
    if first is None:
        return None
    for part in rest:
        first = nested_concat(first, part, padding_index=-100)
    num_samples = sum(map(len, order))

    def in_order(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or len(value) % num_samples:
            return value
        return value[_rows(order, len(value) // num_samples)]

    return tree_map(in_order, first)


def _rows(order: Sequence[Sequence[int]], rows_of_sample: int) -> list[int]:
    """Return where the rows are, in the order of samples, that parts have one after the other."""
    places, at = {}, 0
    for samples in order:
        for row in range(rows_of_sample):
            for sample in samples:
                places[row, sample] = at
                at += 1
    return [places[place] for place in sorted(places)]
