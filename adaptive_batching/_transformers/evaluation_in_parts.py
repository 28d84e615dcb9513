"""Evaluation batches that run again in smaller parts when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.trainer_pt_utils import nested_concat

from adaptive_batching._loop.auto_batcher import AutoBatcher
from adaptive_batching._loop.samples import collated
from adaptive_batching._memory import release_cached_memory
from adaptive_batching._micro_batches.split import Capacity
from adaptive_batching._transformers.handed_out import Sample, counters_of, put_back_counters
from adaptive_batching._transformers.loss_kind import LossKind

Predicted = tuple[Any, Any, Any]
"""Loss, logits and labels, as ``prediction_step`` returns them."""

_ANY = 10**15  # tokens that a batch may have as long as it fits


class EvaluationInParts:
    """Runs batches of an evaluation, and those that do not fit in parts; no sample counts twice."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._batcher = AutoBatcher(
            Capacity.of_tokens(_ANY), self._discard, remedy="set per_device_eval_batch_size to less"
        )

    def __call__(
        self,
        samples: list[Sample],
        length: Callable[[Sample], int] | None,
        kind: Callable[[], LossKind],
        predict: Callable[[Any], Predicted],
    ) -> Predicted:
        """Return what ``predict`` gives for the batch of all samples, in their order."""
        lengths = [1 if length is None else max(map(length, samples))] * len(samples)
        parts: list[tuple[Predicted, Any, int]] = []

        def forward(part: range) -> list[int]:
            saved = counters_of(self._trainer)
            batch = collated(samples[part.start : part.stop], self._trainer.data_collator)
            try:
                found = predict(batch)
            except Exception:
                put_back_counters(self._trainer, saved)
                raise
            parts.append((found, batch, len(part)))
            return [0] * len(part)

        self._batcher.run(lengths, forward)
        if len(parts) == 1:
            return parts[0][0]
        _, logits, labels = zip(*(found for found, _, _ in parts), strict=True)
        return _mean(parts, kind()), _joined(logits), _joined(labels)

    def _discard(self) -> None:
        release_cached_memory(self._trainer.args.device)


def _mean(parts: list[tuple[Predicted, Any, int]], kind: LossKind) -> torch.Tensor | None:
    """Return the mean of the losses of parts, each by its number of targets or samples."""
    losses = [loss for (loss, _, _), _, _ in parts]
    if any(loss is None for loss in losses):
        return None
    numbers = [float(kind.count(batch, count)) for _, batch, count in parts]
    total = sum(numbers)
    counted = [loss * (number / total) for loss, number in zip(losses, numbers, strict=True) if number]
    return torch.stack(counted).sum() if counted else losses[0]


def _joined(values: tuple[Any, ...]) -> Any:
    """Return logits or labels of parts as one, padded as ``Trainer`` pads those of batches."""
    first, *rest = values
    if first is None:
        return None
    for each in rest:
        first = nested_concat(first, each, padding_index=-100)
    return first
