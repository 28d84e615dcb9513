"""Knowledge distillation: next tokens, learned from the data and from a teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adaptive_batching._torchtune.objective import Batch, Counts, NextToken, Sums

_LOSSES = ("class_loss", "kd_loss")


class Distillation(NextToken):
    """The mean loss over target tokens, mixed with the mean divergence from a teacher, as stock's recipes compute it.

    Stock runs backward from the mean of each batch and then divides the gradient by the tokens of the step, so that it
    shrinks with the number of tokens. With a field set, means are multiplied by their tokens first, as in supervised
    fine-tuning; without one the gradient is stock's.

    ``teacher_loss`` is the mean divergence of logits from the teacher's, over the labels that are not ignored, and
    ``teacher_share`` its share in the loss. ``arguments`` are those of :class:`NextToken`.
    """

    saves_memory_by = frozenset({"lora"})  # stock's recipes offload no activations

    def __init__(
        self, *arguments: Any, teacher: nn.Module, teacher_loss: Any, teacher_share: float, num_ranks: int = 1
    ) -> None:
        super().__init__(*arguments)
        self.frozen_models = (teacher,)
        self._teacher_loss = teacher_loss
        self._teacher_share = teacher_share
        self._num_ranks = num_ranks
        self._is_stock = True
        self._last: list[torch.Tensor] = []  # mean losses of the last forward on this rank

    def weight_of(self, batch: Counts) -> int:
        return 1 if self._is_stock else super().weight_of(batch)

    def leave_stock(self) -> None:
        self._is_stock = False

    def loss(self, model: nn.Module, batch: Batch, weight: float | None) -> tuple[torch.Tensor, Sums]:
        labels = batch.pop("labels")  # [b, s]
        num_tokens = (labels != self._loss.ignore_index).sum()
        with self._activations:
            logits = model(**batch)  # [b, s, vocabulary], or a list of chunks of s
        with torch.no_grad():
            of_teacher = self.frozen_models[0](**batch)
        labels = self._shifted(labels)
        if not isinstance(logits, list):
            labels = labels.reshape(-1)
            logits, of_teacher = (each.reshape(-1, each.size(-1)) for each in (logits, of_teacher))
        divergence = self._teacher_loss(logits, of_teacher, labels)
        class_loss = self._loss(logits, labels)
        del logits, of_teacher  # else they would be held through the backward pass
        mixed = self._mixed(class_loss, divergence)
        if weight is not None:
            mixed = mixed * weight
        elif not self._is_stock:
            mixed = mixed * num_tokens
        self._last = [class_loss.detach(), divergence.detach()]
        share = num_tokens if weight is None or self._is_stock else weight
        sums = {name: loss * share for name, loss in zip(_LOSSES, self._last, strict=True)}
        return mixed, Sums(mixed.detach(), num_tokens, sums)

    def _mixed(self, class_loss: Any, divergence: Any) -> Any:
        return (1 - self._teacher_share) * class_loss + self._teacher_share * divergence

    def mean_loss(self, sums: Sums) -> Any:
        """Return the mixed loss of a step, or what stock logs of it; on the device, which is not waited for."""
        if self._is_stock and self._num_ranks > 1:
            return self._mixed(*self.metrics(sums).values())
        per_token = sums.tokens.reciprocal()  # by which torch multiplies where stock divides a number
        return self._mixed(*(sums.metrics[name] * per_token for name in _LOSSES))

    def metrics(self, sums: Sums) -> dict[str, Any]:
        """Return both mean losses of a step. On several devices stock logs those of the rank's last forward instead."""
        if self._is_stock and self._num_ranks > 1:
            return {name: loss.item() for name, loss in zip(_LOSSES, self._last, strict=True)}
        tokens = sums.tokens.cpu()  # once: each use of a result on the device would wait again
        return {name: sums.metrics[name].item() / tokens for name in _LOSSES}

    def recompile(self, again: Callable[[Any], Any]) -> None:
        super().recompile(again)
        self._teacher_loss = again(self._teacher_loss)

    def forget(self) -> None:
        super().forget()
        self._last = []
