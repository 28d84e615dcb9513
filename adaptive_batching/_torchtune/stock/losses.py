"""Objectives of the recipes: next-token prediction, distillation, quantization-aware training and preferences."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torchao.quantization.qat import api
from torchtune import rlhf
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, padded_collate_dpo, padded_collate_sft
from torchtune.modules.peft import disable_adapter
from torchtune.training import quantization

from adaptive_batching._attention import SampleBounds
from adaptive_batching._step.split import length_in_chunks
from adaptive_batching._torchtune.stock.data import TEXT_KEYS, Sample, is_packed, repeat_to, stretch
from adaptive_batching._torchtune.stock.end_to_end import RowBounds
from adaptive_batching._torchtune.stock.objective import SHORT, Activations, Batch, Counts, Objective, StockParts, Sums

log = logging.getLogger(__name__)

_LOSSES = ("class_loss", "kd_loss")
ANSWERS = ("chosen", "rejected")
"""Answers of a pair, by the names that torchtune gives them."""


class NextToken(Objective):
    """Supervised fine-tuning: the mean loss over target tokens, as stock's recipes compute it.

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
        self._chunks_to_fill = 0  # by padding; see equalize_collectives

    def tokens(self, sample: Sample) -> Sequence[int]:
        tokens: Sequence[int] = sample["tokens"]
        return tokens

    def counts(self, samples: Sequence[Sample]) -> Counts:
        terms = tokens = 0
        for sample in samples:
            counted = np.asarray(sample["labels"]) != self._loss.ignore_index
            terms += int(counted[1:].sum())  # a sample's first label is never predicted, yet stock counts it
            tokens += int(counted.sum())
        return Counts(terms, tokens)

    def size(self, sample: Sample) -> int:
        return length_in_chunks(len(sample["tokens"]), self._chunks_to_fill) if self.is_text(sample) else 1

    def is_text(self, sample: Sample) -> bool:
        """Return True if ``sample`` has text alone: no images, or other things that its tokens refer to."""
        return set(sample) <= TEXT_KEYS | {"input_pos", "seq_lens"}  # the latter of packs

    def stretch(self, sample: Sample, length: int) -> Sample | None:
        return stretch(sample, length)

    def with_most_targets(self, sample: Sample) -> Sample:
        return {**sample, "labels": list(sample["tokens"])}

    def filler(self, samples: Sequence[Sample]) -> Sample:
        several = [sample for sample in samples if len(sample["tokens"]) > 1]
        shortest = super().filler(several) if several else stretch(samples[0], 2) or samples[0]
        if self.counts([shortest]).terms:
            return shortest
        labels = copy.deepcopy(shortest["labels"])  # of a list or a tensor
        labels[-1] = 0  # a mean over no targets would be 0/0, and tokens of images may be beyond the classes
        return {**shortest, "labels": labels}

    def collate(self, samples: Sequence[Sample]) -> Batch:
        batch = self._collate(list(samples))
        length = batch["tokens"].shape[1]  # tokens: [b, s]
        missing = length_in_chunks(length, self._chunks_to_fill) - length
        if missing <= 0 or set(batch) != {"tokens", "labels"}:
            return batch
        # That is exact: under a causal mask no earlier token sees the padding, and it has no part in the loss.
        return {
            "tokens": functional.pad(batch["tokens"], (0, missing)),
            "labels": functional.pad(batch["labels"], (0, missing), value=self._loss.ignore_index),
        }

    @property
    def lays(self) -> bool:
        return _function_of(self._collate) is padded_collate_sft

    def size_in_row(self, sample: Sample) -> int:
        return len(sample["tokens"])

    def lay(self, samples: Sequence[Sample]) -> Batch:
        ignored = self._loss.ignore_index
        row = _row([(sample["tokens"], sample["labels"]) for sample in samples], ignored)
        targets = functional.pad(row["labels"][0, 1:], (0, 1), value=ignored)  # of each token, the one after it
        predicting = (targets != ignored).nonzero().flatten()
        targets = targets[predicting]
        missing = length_in_chunks(max(len(targets), 1), self._chunks_to_fill) - len(targets)
        return {
            **row,
            "labels": functional.pad(targets, (0, missing), value=ignored)[None],
            "mask": RowBounds(row["mask"].lengths, functional.pad(predicting, (0, missing))),
            # Stock counts the first label of each sample as a token, although it is not learned from.
            "num_tokens": torch.tensor(self.counts(samples).tokens),
        }

    def loss(self, model: nn.Module, batch: Batch, weight: float | None) -> tuple[torch.Tensor, Sums]:
        targets, num_tokens = self._targets(batch)  # [b, s]
        with self._activations:
            logits = model(**batch)  # [b, s, vocabulary], or a list of chunks of s
        if not isinstance(logits, list):
            targets, logits = targets.reshape(-1), logits.reshape(-1, logits.size(-1))
        # The mean times the number of its labels can be summed over micro-batches, and the gradient be divided by all
        # labels of the step.
        loss = self._loss(logits, targets) * (num_tokens if weight is None else weight)
        return loss, Sums(loss.detach(), num_tokens)

    def _targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the labels out of ``batch``; return the target of each token, [b, s], and how many labels count.

        Labels are moved, so that logits stay whole: each position predicts the next one. Those of a row have been
        moved, together with what its logits are asked for.
        """
        labels, counted = batch.pop("labels"), batch.pop("num_tokens", None)
        num_tokens = (labels != self._loss.ignore_index).sum() if counted is None else counted
        if isinstance(batch.get("mask"), RowBounds):
            return labels, num_tokens
        last = torch.full_like(labels[..., :1], self._loss.ignore_index, dtype=torch.long)
        return torch.hstack((labels[..., 1:], last)), num_tokens

    def smallest_batch(self, dataset: Any) -> Batch:
        if not self.is_text(dataset[0]):  # a model would skip its encoder, and the collectives of that
            return super().smallest_batch(dataset)
        length = length_in_chunks(SHORT, self._num_chunks)
        if self._num_chunks > 1 and is_packed(dataset):  # packs cannot be padded, and need not be: they have one length
            of_pack = len(dataset[0]["tokens"])
            fewer = -(-of_pack // -(-of_pack // self._num_chunks))
            length = fewer if fewer < self._num_chunks else length  # tokens, each a chunk
        tokens = torch.arange(1, length + 1)[None]  # [1, s]; any text will do
        return {"tokens": tokens, "labels": tokens.clone()}

    def equalize_collectives(self) -> None:
        self._chunks_to_fill = self._num_chunks

    def divisor(self, sums: Sums) -> torch.Tensor:
        return sums.tokens

    def mean_loss(self, sums: Sums) -> Any:
        return sums.loss.item() / sums.tokens

    def recompile(self, again: Callable[[Any], Any]) -> None:
        self._loss = again(self._loss)


class Distillation(NextToken):
    """The mean loss over target tokens, mixed with the mean divergence from a teacher.

    Stock runs backward from the mean of each batch and then divides the gradient by the tokens of the step, so that it
    shrinks with the number of tokens. Here means are multiplied by their tokens first, as in supervised fine-tuning.
    """

    saves_memory_by = frozenset({"lora"})  # stock's recipes offload no activations

    def __init__(self, parts: StockParts) -> None:
        super().__init__(parts.collate, parts.loss, parts.activations, parts.num_chunks)
        assert parts.frozen is not None
        self.frozen_models = (parts.frozen,)
        self._teacher_loss, self._teacher_share = parts.teacher_loss, parts.teacher_share

    def loss(self, model: nn.Module, batch: Batch, weight: float | None) -> tuple[torch.Tensor, Sums]:
        targets, num_tokens = self._targets(batch)  # [b, s]
        with self._activations:
            logits = model(**batch)  # [b, s, vocabulary], or a list of chunks of s
        with torch.no_grad():
            of_teacher = self.frozen_models[0](**batch)
        if not isinstance(logits, list):
            targets = targets.reshape(-1)
            logits, of_teacher = (each.reshape(-1, each.size(-1)) for each in (logits, of_teacher))
        divergence = self._teacher_loss(logits, of_teacher, targets)
        class_loss = self._loss(logits, targets)
        del logits, of_teacher  # else they would be held through the backward pass
        share = num_tokens if weight is None else weight
        mixed = self._mixed(class_loss, divergence) * share
        sums = {name: loss.detach() * share for name, loss in zip(_LOSSES, (class_loss, divergence), strict=True)}
        return mixed, Sums(mixed.detach(), num_tokens, sums)

    def _mixed(self, class_loss: Any, divergence: Any) -> Any:
        return (1 - self._teacher_share) * class_loss + self._teacher_share * divergence

    def mean_loss(self, sums: Sums) -> Any:
        """Return the mixed loss of a step; on the device, which is not waited for."""
        per_token = sums.tokens.reciprocal()
        return self._mixed(*(sums.metrics[name] * per_token for name in _LOSSES))

    def metrics(self, sums: Sums) -> dict[str, Any]:
        """Return both mean losses of a step. On several devices stock logs those of the rank's last forward instead."""
        tokens = sums.tokens.cpu()  # once: each use of a result on the device would wait again
        return {name: sums.metrics[name].item() / tokens for name in _LOSSES}

    def recompile(self, again: Callable[[Any], Any]) -> None:
        super().recompile(again)
        self._teacher_loss = again(self._teacher_loss)


class FakeQuantized(NextToken):
    """Next-token prediction with fake-quantized weights. A probe runs with rounding on, which takes the most memory."""

    def __init__(self, parts: StockParts) -> None:
        super().__init__(parts.collate, parts.loss, parts.activations, parts.num_chunks)
        assert parts.model is not None
        self._model, self._mode = parts.model, parts.quantizer_mode
        self._first_step = parts.fake_quantized_from
        self._rounds = True

    def begin_step(self, step: int, samples: int) -> None:
        first = self._first_step
        if first is None:
            return
        rounds = step > 0 and step >= first
        if rounds == self._rounds:
            return
        self._rounds = rounds
        if rounds:
            log.info("step %d: fake quantization is on from here", step)
            self._model.apply(quantization._get_enable_fake_quant(self._mode))
        else:
            log.info("step %d: fake quantization is off until step %s", step, first)
            self._model.apply(quantization._get_disable_fake_quant(self._mode))


class Preferences(Objective):
    """The mean loss over pairs, as stock's DPO recipes compute it.

    A pair is two sequences of one forward, which are padded alike; its length is that of the longer one. Stock's
    collate function makes (tokens, labels) of pairs, both [2b, s], all chosen answers first. Its loss takes the log
    probabilities of policy and reference, and returns the loss of each pair and the rewards of its answers. Without a
    frozen model the reference is the policy without its adapters.
    """

    def __init__(self, parts: StockParts) -> None:
        self._collate, self._loss, self._activations = parts.collate, parts.loss, parts.activations
        self.frozen_models = () if parts.frozen is None else (parts.frozen,)
        self._num_ranks = parts.num_ranks
        self._pairs = 0  # of the optimizer step on this rank

    def tokens(self, sample: Sample) -> Sequence[int]:
        longer: Sequence[int] = max((sample[f"{kind}_input_ids"] for kind in ANSWERS), key=len)
        return longer

    def counts(self, samples: Sequence[Sample]) -> Counts:
        return Counts(len(samples), len(samples))

    def stretch(self, sample: Sample, length: int) -> Sample | None:
        stretched = {key: repeat_to(values, length) for key, values in sample.items()}
        for kind in ANSWERS:
            stretched[f"{kind}_labels"] = list(stretched[f"{kind}_input_ids"])
        return stretched

    def collate(self, samples: Sequence[Sample]) -> Batch:
        tokens, labels = self._collate(list(samples))
        return {"tokens": tokens, "labels": labels}

    @property
    def lays(self) -> bool:
        return _function_of(self._collate) is padded_collate_dpo

    def size_in_row(self, sample: Sample) -> int:
        return -(-sum(len(sample[f"{kind}_input_ids"]) for kind in ANSWERS) // len(ANSWERS))

    def lay(self, samples: Sequence[Sample]) -> Batch:
        answers = [(pair[f"{kind}_input_ids"], pair[f"{kind}_labels"]) for kind in ANSWERS for pair in samples]
        return _row(answers, CROSS_ENTROPY_IGNORE_IDX)

    def begin_step(self, step: int, samples: int) -> None:
        self._pairs = samples

    def loss(self, model: nn.Module, batch: Batch, weight: float | None) -> tuple[torch.Tensor, Sums]:
        labels, bounds = batch.pop("labels"), batch.get("mask")
        tokens = batch["tokens"]
        if bounds is None:
            pairs, of_chosen = tokens.shape[0] // 2, tokens.shape[0] // 2
        else:
            pairs = len(bounds.lengths) // 2
            of_chosen = sum(bounds.lengths[:pairs])
        log_probs, logits = self._forward(model, batch, labels)
        halves = logits.tensor_split([of_chosen], 0 if bounds is None else 1)
        means = {f"logits/{kind}": half.detach().mean() for kind, half in zip(ANSWERS, halves, strict=True)}
        # Free them before the reference's forward; no backward needs them.
        del logits, halves
        frozen = self.frozen_models
        reference, adapters = (frozen[0], contextlib.nullcontext()) if frozen else (model, disable_adapter(model))
        with torch.no_grad(), adapters:
            of_reference, _ = self._forward(reference, batch, labels)
        chosen, rejected = _halves(log_probs)
        losses, chosen_rewards, rejected_rewards = self._loss(chosen, rejected, *_halves(of_reference))
        loss = losses.mean()
        # A part of a batch has the share of its pairs, of which it may have more than this rank has drawn; a whole one
        # is divided by the number of batches, as in stock.
        share = pairs / max(self._pairs, pairs) if weight is None else weight / (self._pairs or pairs)
        loss = loss / max(self._pairs // pairs, 1) if weight is None else loss * share
        metrics = {
            "rewards/chosen": chosen_rewards.mean(),
            "rewards/rejected": rejected_rewards.mean(),
            "rewards/accuracies": (chosen_rewards > rejected_rewards).float().mean(),
            "rewards/margins": (chosen_rewards - rejected_rewards).mean(),
            "log_probs/rejected": rejected.detach().mean(),
            "log_probs/chosen": chosen.detach().mean(),
            **means,
        }
        num_tokens = torch.full((), tokens.numel(), device=tokens.device)  # no copy, which would wait for the device
        if share != 1:
            metrics = {name: share * value for name, value in metrics.items()}
        return loss, Sums(loss.detach(), num_tokens, metrics)

    def _forward(self, model: nn.Module, batch: Batch, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log probability of each answer, [2b], and the logits, [2b, s, vocabulary] or as a row."""
        with self._activations:
            logits = model(**batch)
        bounds = batch.get("mask")
        log_probs = rlhf.get_batch_log_probs(logits, labels) if bounds is None else _in_row(logits, labels, bounds)
        return log_probs, logits

    def mean_loss(self, sums: Sums) -> Any:
        """Return the mean over all pairs. Stock's LoRA recipe logs its sum over ranks."""
        return sums.loss.item() / self._num_ranks

    def metrics(self, sums: Sums) -> dict[str, Any]:
        """Return rewards, log probabilities and logits over all pairs; on one device stock takes the last forward's."""
        if self._num_ranks == 1:
            return {name: value.cpu() for name, value in sums.metrics.items()}
        means = {name: (value / self._num_ranks).cpu() for name, value in sums.metrics.items()}
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means

    def recompile(self, again: Callable[[Any], Any]) -> None:
        self._loss = again(self._loss)


def _halves(both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = both.shape[0] // 2
    return both[:half], both[half:]


def _function_of(collate: Any) -> Any:
    while isinstance(collate, functools.partial):
        collate = collate.func
    return collate


def _row(texts: Sequence[tuple[Sequence[int], Sequence[int]]], ignore_index: int) -> Batch:
    """Return texts, each of tokens and labels, as one row, [1, tokens]."""
    labels = [torch.tensor(labels) for _, labels in texts]
    for of_text in labels:
        of_text[0] = ignore_index  # it would be predicted from the text before
    bounds = SampleBounds([len(tokens) for tokens, _ in texts])
    tokens = torch.cat([torch.tensor(tokens) for tokens, _ in texts])[None]
    return {"tokens": tokens, "labels": torch.cat(labels)[None], "mask": bounds, "input_pos": bounds.positions()}


def _in_row(logits: torch.Tensor, labels: torch.Tensor, bounds: SampleBounds) -> torch.Tensor:
    """Return the log probability of each text of a row, [texts], as torchtune has that of each row of a batch."""
    targets = torch.hstack((labels[:, 1:], torch.full_like(labels[:, :1], CROSS_ENTROPY_IGNORE_IDX)))
    counted = targets != CROSS_ENTROPY_IGNORE_IDX
    log_probs = rlhf.logits_to_logprobs(logits, targets.masked_fill(~counted, 0)) * counted  # [1, tokens]
    # Sums of neighbours as differences of running ones, in as few kernels as a batch takes; exact in double precision.
    running = functional.pad(log_probs.double().cumsum(1), (1, 0))
    return running[0, bounds.offsets(running)].diff().to(log_probs.dtype)


def next_token(parts: StockParts) -> NextToken:
    """Return the objective of supervised fine-tuning."""
    return NextToken(parts.collate, parts.loss, parts.activations, parts.num_chunks)


# What users name, as the function above.
distillation, fake_quantized, preferences = Distillation, FakeQuantized, Preferences
OF_STOCK = (next_token, distillation, fake_quantized, preferences)
"""Make the objectives of stock's recipes."""


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
