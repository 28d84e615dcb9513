"""Trajectories as PPO learns from them: rows of a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torchtune.rlhf import Trajectory

from adaptive_batching._device import without_waiting
from adaptive_batching._torchtune.data import Sample, indexed, stretch
from adaptive_batching._torchtune.objective import Batch, Counts, Objective, Sums
from adaptive_batching._torchtune.ppo.stock_ppo import PolicyAndValue, StockPPO

_OF_LEARNING = (
    "query_responses", "logprobs", "values", "position_ids", "response_padding_masks", "value_padding_masks",
)  # fmt: skip


@dataclass(frozen=True)
class Experience:
    """Trajectories, and what is made of them."""

    trajectory: Trajectory
    """Without attention masks."""

    advantages: torch.Tensor  # [b, t]
    returns: torch.Tensor  # [b, t]
    context_length: int
    """Tokens of a prompt."""

    numbers: Sequence[int | None] = ()
    """Numbers of the prompts in the data set."""

    def counts(self) -> tuple[list[int], list[int]]:
        """Return the tokens of each trajectory that are not padding, for the policy and for the value model."""
        masks = self.trajectory.response_padding_masks, self.trajectory.value_padding_masks
        of_policy, of_value = torch.stack(masks).logical_not().sum(dim=2).tolist()
        return of_policy, of_value


class Trajectories(Objective):
    """The clipped losses of policy and value model, as stock's recipe computes them.

    Samples are rows of the trajectories that were seen last, as :meth:`rows` gives them; samples of the loader are
    prompts. The loss of the policy is a mean over the tokens of responses, that of the value model a mean over these
    and, where a response has ended, one more. So a part of a batch has two shares.
    """

    sums_gradients = False
    saves_memory_by = frozenset()

    _seen: Experience
    _policy_tokens: list[int]
    _value_tokens: list[int]

    def __init__(self, stock: StockPPO) -> None:
        self._stock = stock
        self._held_bytes: Callable[[int], int] = lambda rows: 0

    def see(self, experience: Experience) -> None:
        """Have rows be those of ``experience`` from now on."""
        self._seen = experience
        self._policy_tokens, self._value_tokens = experience.counts()

    def rows(self, rows: Sequence[int]) -> list[Sample]:
        """Return the samples of one backward pass: rows whose losses are means over all of them."""
        tokens = sum(self._value_tokens[row] for row in rows)
        numbers = self._seen.numbers
        return [
            indexed({"row": row, "rows": len(rows), "value_tokens": tokens}, numbers[row] if numbers else None)
            for row in rows
        ]

    def at_worst(self, longest: Experience, held_bytes: Callable[[int], int]) -> Trajectories:
        """Return a copy that has seen ``longest``.

        ``held_bytes`` tells from the rows of a backward pass the bytes of all trajectories, which are held meanwhile.
        """
        worst = copy.copy(self)
        worst.see(longest)
        worst._held_bytes = held_bytes
        return worst

    def tokens(self, sample: Sample) -> Sequence[int]:
        if self.is_text(sample):
            prompt: Sequence[int] = sample["tokens"]
            return prompt
        row: Sequence[int] = self._seen.trajectory.query_responses[sample["row"]].tolist()
        return row

    def is_text(self, sample: Sample) -> bool:
        return "row" not in sample

    def stretch(self, sample: Sample, length: int) -> Sample | None:
        return stretch(sample, length) if self.is_text(sample) else None

    def counts(self, samples: Sequence[Sample]) -> Counts:
        tokens = sum(self._policy_tokens[sample["row"]] for sample in samples)
        return Counts(tokens, tokens)

    def weight_of(self, batch: Counts) -> int:
        return 1

    def collate(self, samples: Sequence[Sample]) -> Batch:
        experience, rows = self._seen, [sample["row"] for sample in samples]
        index = without_waiting(torch.tensor(rows), experience.advantages.device)
        tensors = {name: getattr(experience.trajectory, name) for name in _OF_LEARNING}
        tensors |= {"advantages": experience.advantages, "returns": experience.returns}
        batch = {name: tensor.index_select(0, index) for name, tensor in tensors.items()}
        value_tokens = sum(self._value_tokens[row] for row in rows)
        batch["value_share"] = torch.tensor(value_tokens / samples[0]["value_tokens"])
        batch["row_share"] = torch.tensor(len(rows) / samples[0]["rows"])
        held = self._held_bytes(len(rows))
        if held:
            batch["held"] = torch.empty(held, dtype=torch.uint8, device=index.device)
        return batch

    def loss(self, model: nn.Module, batch: Batch, weight: float | None) -> tuple[torch.Tensor, Sums]:
        """Run forward and backward, which stock has in one; the number returned has no model behind it any more."""
        assert isinstance(model, PolicyAndValue)
        tokens, of_values, of_rows = batch["query_responses"], batch["value_share"], batch["row_share"]
        known = {name: batch[name] for name in _OF_LEARNING}
        trajectory = Trajectory(**{**dict.fromkeys(Trajectory._fields), **known, "masks": self._stock.masks(tokens)})
        shares = None if weight is None else (weight, of_values)
        estimates, context_length = (batch["advantages"], batch["returns"]), self._seen.context_length
        stats = self._stock.learn(model, trajectory, estimates, context_length, shares)
        metrics = {name: value.detach() for name, value in stats._asdict().items() if name != "loss"}
        if weight is not None:
            weights = {"policy_loss": weight, "clipfrac": weight, "value_loss": of_values}
            metrics = {name: value * weights.get(name, of_rows) for name, value in metrics.items()}
        over = torch.zeros((), requires_grad=True)
        return over, Sums(stats.loss.detach(), torch.tensor(tokens.numel()), metrics)

    def forget(self) -> None:
        self._stock.forget()

    def batch_dependent_part(self) -> str | None:
        loss = self._stock.loss  # without this, its two parts cannot be weighed apart
        return None if hasattr(loss, "value_coeff") else f"{type(loss).__name__}, which has no value_coeff,"


def longest(stock: StockPPO, context_length: int) -> Experience:
    """Return one trajectory whose response does not end early, on the device."""
    generated, total = stock.max_generated_tokens, context_length + stock.max_generated_tokens
    weight = next(stock.model.parameters())
    numbers = torch.zeros(1, generated, dtype=weight.dtype, device=stock.device)
    mask = torch.zeros(1, generated, dtype=torch.bool, device=stock.device)
    last = torch.full((1,), generated - 1, device=stock.device)
    token = 1 if stock.pad_id == 0 else 0  # any but padding
    trajectory = Trajectory(
        query_responses=torch.full((1, total), token, device=stock.device),
        logprobs=numbers, ref_logprobs=numbers, values=numbers,
        masks=mask.new_empty(1, 0),
        position_ids=torch.arange(total, dtype=torch.int, device=stock.device)[None],
        response_padding_masks=mask, value_padding_masks=mask,
        value_seq_idxs=last, scores=numbers[:, 0], seq_lens=last,
    )  # fmt: skip
    return Experience(trajectory, numbers, numbers, context_length)
