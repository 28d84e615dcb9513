"""Next tokens: supervised fine-tuning, distillation from a teacher, and quantization-aware training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torchao.quantization.qat import api
from torchtune.training import quantization

from adaptive_batching._micro_batches.cut import length_in_chunks
from adaptive_batching._torchtune.data import Sample, is_packed, is_text, stretch
from adaptive_batching._torchtune.objective import SHORT, Activations, Batch, Counts, Objective, StockParts, Sums

log = logging.getLogger(__name__)

_LOSSES = ("class_loss", "kd_loss")


class NextToken(Objective):
    """Supervised fine-tuning: the mean loss over target tokens, as stock's SFT recipes compute it.

    Args:
        collate: The collate function of stock's loader.
        loss: Mean over the labels that are not its ``ignore_index``.
        activations: Context of the forward, which may offload activations.
        num_chunks: Chunks of tokens for each of which a forward gathers the sharded output layer; 0 for none.
    """

    def __init__(
        self, collate: Callable[[list[Sample]], Batch], loss: Any, activations: Activations, num_chunks: int = 0
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
        length = batch["tokens"].shape[1]  # tokens: [b, s]
        missing = self._padded(length) - length
        if missing <= 0 or set(batch) != {"tokens", "labels"}:
            return batch
        # That is exact: under a causal mask no earlier token sees the padding, and it has no part in the loss.
        return {
            "tokens": functional.pad(batch["tokens"], (0, missing)),
            "labels": functional.pad(batch["labels"], (0, missing), value=self._loss.ignore_index),
        }

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
        length = length_in_chunks(SHORT, self._num_chunks)
        if self._num_chunks > 1 and is_packed(dataset):  # packs cannot be padded, and need not be: they have one length
            of_pack = len(dataset[0]["tokens"])
            fewer = -(-of_pack // -(-of_pack // self._num_chunks))
            length = fewer if fewer < self._num_chunks else length  # tokens, each a chunk
        tokens = torch.arange(1, length + 1)[None]  # [1, s]; any text will do
        return {"tokens": tokens, "labels": tokens.clone()}

    def equalize_collectives(self) -> None:
        self._pads = True

    def divisor(self, sums: Sums) -> torch.Tensor:
        return sums.tokens

    def mean_loss(self, sums: Sums) -> Any:
        return sums.loss.item() / sums.tokens

    def recompile(self, again: Callable[[Any], Any]) -> None:
        self._loss = again(self._loss)


class Distillation(NextToken):
    """The mean loss over target tokens, mixed with the mean divergence from a teacher, as stock's recipes compute it.

    Stock runs backward from the mean of each batch and then divides the gradient by the tokens of the step, so that it
    shrinks with the number of tokens. With a field set, means are multiplied by their tokens first, as in supervised
    fine-tuning; without one the gradient is stock's.
    """

    saves_memory_by = frozenset({"lora"})  # stock's recipes offload no activations

    def __init__(self, parts: StockParts) -> None:
        super().__init__(parts.collate, parts.loss, parts.activations, parts.num_chunks)
        assert parts.frozen is not None
        self.frozen_models = (parts.frozen,)
        self._teacher_loss = parts.teacher_loss
        self._teacher_share = parts.teacher_share
        self._num_ranks = parts.num_ranks
        self._last: list[torch.Tensor] = []  # mean losses of the last forward on this rank

    def weight_of(self, batch: Counts) -> int:
        return 1 if self._is_stock else super().weight_of(batch)

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


class FakeQuantized(NextToken):
    """Next tokens, as rounding will leave them. A probe runs with rounding on, which takes the most memory."""

    def __init__(self, parts: StockParts) -> None:
        super().__init__(parts.collate, parts.loss, parts.activations, parts.num_chunks)
        assert parts.model is not None
        self._model = parts.model
        self._first_step = parts.fake_quantized_from
        self._mode = parts.quantizer_mode
        self._rounds = True

    def begin_step(self, step: int, samples: int) -> None:
        if self._first_step is None:
            return
        if step == 0 or (step < self._first_step and not self._is_stock):  # a resumed run of stock rounds at once
            self._round(rounds=False, step=step)
        elif step >= self._first_step:
            self._round(rounds=True, step=step)

    def _round(self, *, rounds: bool, step: int) -> None:
        if rounds == self._rounds:
            return
        self._rounds = rounds
        if rounds:
            log.info("step %d: fake quantization is on from here", step)
            self._model.apply(quantization._get_enable_fake_quant(self._mode))
        else:
            log.info("step %d: fake quantization is off until step %s", step, self._first_step)
            self._model.apply(quantization._get_disable_fake_quant(self._mode))


def next_token(parts: StockParts) -> NextToken:
    """Return the objective of supervised fine-tuning."""
    return NextToken(parts.collate, parts.loss, parts.activations, parts.num_chunks)


def distillation(parts: StockParts) -> Distillation:
    """Return the objective of knowledge distillation."""
    return Distillation(parts)


def fake_quantized(parts: StockParts) -> FakeQuantized:
    """Return the objective of quantization-aware training."""
    return FakeQuantized(parts)


class AcceptsConfigsOfTorchao:
    """Mixed into stock's recipe for quantization-aware training with LoRA, before the recipe."""

    def _setup_model(self, *args: Any, **kwargs: Any) -> Any:
        accept_configs_of_torchao()
        return super()._setup_model(*args, **kwargs)  # type: ignore[misc]


def accept_configs_of_torchao() -> None:
    """Have torchtune's QAT layers of LoRA take the configs that the quantizers of torchao 0.15 make.

    They ask for the class by the name that it had before.
    """
    current = getattr(api, "IntxFakeQuantizeConfig", None)
    if current is not None:
        api.FakeQuantizeConfig = current


def keeps_scales(model: nn.Module) -> bool:
    """Return True if layers of ``model`` keep the scales that they round with until the next forward."""
    return any("FakeQuantizer" in type(module).__name__ for module in model.modules())
