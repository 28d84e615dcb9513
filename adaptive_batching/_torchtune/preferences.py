"""Direct preference optimization: pairs of a chosen and a rejected answer, against a reference model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torchtune import rlhf
from torchtune.modules.peft import disable_adapter

from adaptive_batching._torchtune.data import Sample, repeat_to
from adaptive_batching._torchtune.objective import Batch, Counts, Objective, StockParts, Sums

KINDS = ("chosen", "rejected")
"""Answers of a pair, by the names that torchtune gives them."""


class _OfLast(Sums):
    """Sums of losses and tokens, and the metrics of the last forward alone, which is what stock logs."""

    def __add__(self, other: Sums) -> Sums:
        return _OfLast(self.loss + other.loss, self.tokens + other.tokens, other.metrics)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Sums:
        return _OfLast(*vars(super().map(function)).values())


class Preferences(Objective):
    """The mean loss over pairs, as stock's DPO recipes compute it.

    A pair is two sequences of one forward, which are padded alike; its length is that of the longer one. Stock's
    collate function makes (tokens, labels) of pairs, both [2b, s], all chosen answers first. Its loss takes the log
    probabilities of policy and reference, and returns the loss of each pair and the rewards of its answers. Without a
    frozen model the reference is the policy without its adapters.
    """

    sums_gradients = False

    def __init__(self, parts: StockParts) -> None:
        self._collate = parts.collate
        self._loss = parts.loss
        self._activations = parts.activations
        self.frozen_models = () if parts.frozen is None else (parts.frozen,)
        self._num_ranks = parts.num_ranks
        self._pairs = 0  # of the optimizer step on this rank

    def tokens(self, sample: Sample) -> Sequence[int]:
        longer: Sequence[int] = max((sample[f"{kind}_input_ids"] for kind in KINDS), key=len)
        return longer

    def counts(self, samples: Sequence[Sample]) -> Counts:
        return Counts(len(samples), len(samples))

    def stretch(self, sample: Sample, length: int) -> Sample | None:
        stretched = {key: repeat_to(values, length) for key, values in sample.items()}
        for kind in KINDS:
            stretched[f"{kind}_labels"] = list(stretched[f"{kind}_input_ids"])
        return stretched

    def collate(self, samples: Sequence[Sample]) -> Batch:
        tokens, labels = self._collate(list(samples))
        return {"tokens": tokens, "labels": labels}

    def begin_step(self, step: int, samples: int) -> None:
        self._pairs = samples

    def loss(self, model: nn.Module, batch: Batch, weight: float | None) -> tuple[torch.Tensor, Sums]:
        tokens, labels = batch["tokens"], batch["labels"]
        pairs = tokens.shape[0] // 2
        log_probs, logits = self._forward(model, tokens, labels)
        means = {f"logits/{kind}": half.detach().mean() for kind, half in zip(KINDS, _halves(logits), strict=True)}
        del logits  # so that they are freed before the reference's are made, where the backward pass needs them not
        reference, adapters = self._reference(model)
        with torch.no_grad(), adapters:
            of_reference, _ = self._forward(reference, tokens, labels)
        chosen, rejected = _halves(log_probs)
        losses, chosen_rewards, rejected_rewards = self._loss(chosen, rejected, *_halves(of_reference))
        loss = losses.mean()
        # A part of a batch has the share of its pairs; a whole one is divided by the number of batches, as in stock.
        share = (pairs if weight is None else weight) / max(self._pairs, pairs)
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
        if self._is_stock and self._num_ranks == 1:
            return loss, _OfLast(loss.detach(), num_tokens, metrics)
        if share != 1:
            metrics = {name: share * value for name, value in metrics.items()}
        return loss, Sums(loss.detach(), num_tokens, metrics)

    def _forward(
        self, model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log probability of each answer, [2b], and the logits, [2b, s, vocabulary]."""
        with self._activations:
            logits = model(tokens)
        return rlhf.get_batch_log_probs(logits, labels), logits

    def _reference(self, model: nn.Module) -> tuple[nn.Module, contextlib.AbstractContextManager[Any]]:
        if self.frozen_models:
            return self.frozen_models[0], contextlib.nullcontext()
        return model, disable_adapter(model)

    def mean_loss(self, sums: Sums) -> Any:
        """Return the mean over all pairs. Stock's LoRA recipe logs its sum over ranks, which is what is summed here."""
        as_summed = self._is_stock and not self.frozen_models
        return sums.loss.item() if as_summed else sums.loss.item() / self._num_ranks

    def metrics(self, sums: Sums) -> dict[str, Any]:
        """Return rewards, log probabilities and logits over all pairs; on one device stock takes the last forward's."""
        if self._num_ranks == 1:
            return {name: value.cpu() for name, value in sums.metrics.items()}
        found = {name: (value / self._num_ranks).cpu() for name, value in sums.metrics.items()}
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found

    def recompile(self, again: Callable[[Any], Any]) -> None:
        self._loss = again(self._loss)


def preferences(parts: StockParts) -> Preferences:
    """Return the objective of direct preference optimization."""
    return Preferences(parts)


def _halves(both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split what a forward has made into that of the chosen and that of the rejected answers."""
    half = both.shape[0] // 2
    return both[:half], both[half:]
