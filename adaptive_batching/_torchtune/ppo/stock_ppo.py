"""A stock PPO recipe as the rest of this package sees it, and trajectories as it learns from them: rows of a batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torchtune import rlhf
from torchtune.modules import delete_kv_caches
from torchtune.rlhf import PPOStats, Trajectory

from adaptive_batching._device import without_waiting
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._torchtune.stock.data import Sample, indexed, stretch
from adaptive_batching._torchtune.stock.host import Host, MemoryHistory, OptimizersInBackward, StockRun
from adaptive_batching._torchtune.stock.objective import Batch, Counts, Objective, Sums

_OF_LEARNING = (
    "query_responses", "logprobs", "values", "position_ids", "response_padding_masks", "value_padding_masks",
)  # fmt: skip


class PolicyAndValue(nn.Module):
    """The two models that PPO trains, as one."""

    def __init__(self, policy: nn.Module, value: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.value = value

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and values; a step calls the models one by one."""
        return self.policy(tokens), self.value(tokens)


class StockPPO:
    """Stock's methods of a recipe that has been set up, run on any part of a batch. Sizes are in trajectories."""

    def __init__(self, recipe: Any, ppo_batch_size: int, num_samples: int) -> None:
        self.recipe = recipe
        self.num_samples = num_samples  # after which the run ends, be it within an epoch or after more than stock's
        self.model = PolicyAndValue(recipe._policy_model, recipe._value_model)
        self.loss = recipe._loss_fn
        self.rng: torch.Generator = recipe._rng
        self.device: torch.device = recipe._device
        self.pad_id: int = recipe._tokenizer.pad_id
        self.vocabulary: int = recipe._policy_model.tok_embeddings.num_embeddings
        self.max_generated_tokens: int = recipe._max_generated_tokens
        self.rollout_rows: int = recipe._forward_batch_size
        self.epochs: int = recipe._ppo_epochs  # times that a batch of trajectories is learned from
        self.steps: int = recipe.batch_size // ppo_batch_size  # of the optimizer in each, however large a batch is
        self.backwards: int = recipe._gradient_accumulation_steps  # passes in each of these
        self.parts = self.steps * self.backwards  # of a batch, that each have a backward pass

    def generate(self, prompts: torch.Tensor) -> Trajectory:
        """Generate a trajectory for each of ``prompts``, [b, s], all in one forward.

        Attention masks, [b, L, L], take more than all else, and are left out: :meth:`masks` makes them again.
        """
        self.recipe._forward_batch_size = len(prompts)  # which caches of keys and values are made for
        with torch.no_grad():
            trajectory = self.recipe.generate_trajectory(prompts)
        return trajectory._replace(masks=trajectory.masks.new_empty(len(prompts), 0))

    def masks(self, query_responses: torch.Tensor) -> torch.Tensor:
        """Return attention masks, [b, L, L]: torchtune's ``get_causal_mask_from_padding_mask`` waits for the device."""
        is_token = query_responses != self.pad_id
        masks = is_token.new_ones(is_token.shape[1], is_token.shape[1]).tril() & is_token[:, None]
        masks.diagonal(dim1=1, dim2=2).fill_(True)
        return masks

    def judge(self, trajectory: Trajectory) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return advantages, whitened over the whole batch, returns, and the divergence as such and as a reward."""
        recipe = self.recipe
        rewards, kl, kl_rewards = rlhf.get_rewards_ppo(
            trajectory.scores, trajectory.logprobs, trajectory.ref_logprobs, recipe._kl_coeff, trajectory.value_seq_idxs
        )
        advantages, returns = rlhf.estimate_advantages(
            trajectory.values, rewards, recipe._gamma, recipe._lmbda, masks=~trajectory.response_padding_masks
        )
        return advantages, returns, kl, kl_rewards

    def with_losses_of_part(self, of_policy: float, of_value: torch.Tensor) -> Any:
        """Return a copy of the recipe whose losses are those of a part, which has these shares in a batch's."""
        recipe, loss_fn = copy.copy(self.recipe), copy.copy(self.loss)
        # Of what the loss returns, only the sum of both losses has a graph.
        loss_fn.value_coeff = self.loss.value_coeff * (of_value / of_policy)

        def loss_of_part(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            loss, *others = loss_fn(*args, **kwargs)
            return loss * of_policy, *others

        recipe._loss_fn = loss_of_part
        return recipe

    def forget(self) -> None:
        """Drop the caches that a rollout which broke off has left."""
        policy: Any = self.model.policy
        if policy.caches_are_setup():
            delete_kv_caches(policy)


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
        """Return a copy that has seen ``longest``, and holds ``held_bytes(rows)`` in a backward pass of ``rows``."""
        worst = copy.copy(self)
        worst.see(longest)
        worst._held_bytes = held_bytes
        return worst

    def tokens(self, sample: Sample) -> Sequence[int]:
        if self.is_text(sample):
            return list(sample["tokens"])
        return list(self._seen.trajectory.query_responses[sample["row"]].tolist())

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
        stock, tokens, of_values = self._stock, batch["query_responses"], batch["value_share"]
        fields = {name: batch[name] for name in _OF_LEARNING}
        trajectory = Trajectory(**{**dict.fromkeys(Trajectory._fields), **fields, "masks": stock.masks(tokens)})
        # A whole batch is computed as in stock.
        recipe = copy.copy(stock.recipe) if weight is None else stock.with_losses_of_part(weight, of_values)
        recipe._policy_model, recipe._value_model = model.policy, model.value
        stats: PPOStats = recipe.ppo_step(trajectory, batch["advantages"], batch["returns"], self._seen.context_length)
        metrics = {name: value.detach() for name, value in stats._asdict().items() if name != "loss"}
        if weight is not None:
            weights = {"policy_loss": weight, "clipfrac": weight, "value_loss": of_values}
            metrics = {name: value * weights.get(name, batch["row_share"]) for name, value in metrics.items()}
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


def host_of(
    recipe: Any, stock: StockPPO, objective: Objective, ranks: Ranks, backward_optimizers: OptimizersInBackward
) -> Host:
    """Read a recipe that has been set up; ``backward_optimizers`` holds back those that step there."""
    in_backward = bool(recipe._optimizer_in_bwd)
    return Host(
        name=type(recipe).__name__,
        objective=objective,
        model=stock.model,
        optimizers=backward_optimizers.optimizers if in_backward else [recipe._optimizer],
        loader=recipe._dataloader,
        device=recipe._device,
        ranks=ranks,
        losses={"loss": stock.loss},
        backward_optimizers=backward_optimizers if in_backward else None,
        is_compiled=bool(recipe.compile),
        checkpoints_activations=any(isinstance(module, CheckpointWrapper) for module in stock.model.modules()),
        max_length=getattr(recipe._tokenizer, "max_seq_len", None),
    )


def run_of(recipe: Any, num_samples: int, learning_rate: float) -> StockRun:
    """Read how stock has laid the run out; its steps are rollouts.

    ``num_samples`` is ``num_steps`` of the config, which counts trajectories; the learning rate is constant.
    """
    per_epoch, history = max(len(recipe._dataloader), 1), None
    if recipe.profiler_profile_memory and recipe._device.type == "cuda":
        first = recipe.profiler_wait_steps + recipe.profiler_warmup_steps
        history = MemoryHistory(first, first + recipe.profiler_active_steps)
    return StockRun(
        batch_size=recipe.batch_size,
        accumulation=1,
        epochs=max(recipe._total_epochs, math.ceil(num_samples // recipe.batch_size / per_epoch)),  # a resumed run's
        steps_per_epoch=per_epoch,
        first_epoch=recipe._epochs_run,
        first_step=recipe._steps_run,
        rates=(learning_rate,),
        log_every=recipe._log_every_n_steps,
        profiler=recipe._profiler,
        memory_history=history,
    )
