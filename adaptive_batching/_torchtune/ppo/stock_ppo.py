"""A stock PPO recipe as the rest of this package sees it: the only reader of its underscored attributes."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torchtune import rlhf
from torchtune.modules import delete_kv_caches
from torchtune.rlhf import PPOStats, Trajectory

from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._torchtune.host import Gate, Host, MemoryHistory, StockRun
from adaptive_batching._torchtune.objective import Objective


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

    def __init__(self, recipe: Any, ppo_batch_size: int) -> None:
        self._recipe = recipe
        self.model = PolicyAndValue(recipe._policy_model, recipe._value_model)
        self.loss = recipe._loss_fn
        self.rng: torch.Generator = recipe._rng
        self.device: torch.device = recipe._device
        self.pad_id: int = recipe._tokenizer.pad_id
        self.vocabulary: int = recipe._policy_model.tok_embeddings.num_embeddings
        self.max_generated_tokens: int = recipe._max_generated_tokens
        self.total_rollouts: int = recipe._total_steps
        self.rollout_rows: int = recipe._forward_batch_size
        self.epochs: int = recipe._ppo_epochs
        """Times that a batch of trajectories is learned from."""
        self.steps: int = recipe.batch_size // ppo_batch_size
        """Optimizer steps of each of them, which a batch keeps as it grows."""
        self.backwards: int = recipe._gradient_accumulation_steps
        """Backward passes of an optimizer step."""
        self.parts = self.steps * self.backwards
        """Parts of a batch of trajectories that each have a backward pass."""

    def generate(self, prompts: torch.Tensor) -> Trajectory:
        """Generate a trajectory for each of ``prompts``, [b, s], all in one forward.

        Attention masks, [b, L, L], take more than all else, and are left out: :meth:`masks` makes them again.
        """
        self._recipe._forward_batch_size = len(prompts)  # which caches of keys and values are made for
        with torch.no_grad():
            trajectory = self._recipe.generate_trajectory(prompts)
        return trajectory._replace(masks=trajectory.masks.new_empty(len(prompts), 0))

    def masks(self, query_responses: torch.Tensor) -> torch.Tensor:
        """Return attention masks, [b, L, L]: torchtune's ``get_causal_mask_from_padding_mask`` waits for the device."""
        is_token = query_responses != self.pad_id
        masks = is_token.new_ones(is_token.shape[1], is_token.shape[1]).tril() & is_token[:, None]
        masks.diagonal(dim1=1, dim2=2).fill_(True)
        return masks

    def judge(self, trajectory: Trajectory) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return advantages, whitened over the whole batch, returns, and the divergence as such and as a reward."""
        recipe = self._recipe
        rewards, kl, kl_rewards = rlhf.get_rewards_ppo(
            trajectory.scores, trajectory.logprobs, trajectory.ref_logprobs, recipe._kl_coeff, trajectory.value_seq_idxs
        )
        advantages, returns = rlhf.estimate_advantages(
            trajectory.values, rewards, recipe._gamma, recipe._lmbda, masks=~trajectory.response_padding_masks
        )
        return advantages, returns, kl, kl_rewards

    def learn(
        self,
        model: PolicyAndValue,
        trajectory: Trajectory,
        estimates: tuple[torch.Tensor, torch.Tensor],
        context_length: int,
        shares: tuple[float, torch.Tensor] | None,
    ) -> PPOStats:
        """Run forward and backward of ``model``, the recipe's or a copy, on a trajectory with attention masks.

        Estimates are advantages and returns, [b, t]. Shares are those of a part in the losses of the batch that it was
        cut from, of policy and value model; None for a whole batch, which is computed as in stock.
        """
        recipe = self._recipe
        if model is not self.model or shares is not None:
            recipe = copy.copy(recipe)
            recipe._policy_model, recipe._value_model = model.policy, model.value
        if shares is not None:
            of_policy, of_value = shares
            loss_fn = copy.copy(self.loss)
            loss_fn.value_coeff = self.loss.value_coeff * (of_value / of_policy)

            def loss_of_part(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
                loss, *others = loss_fn(*args, **kwargs)
                return loss * of_policy, *others

            recipe._loss_fn = loss_of_part
        stats: PPOStats = recipe.ppo_step(trajectory, *estimates, context_length)
        return stats

    def forget(self) -> None:
        """Drop the caches that a rollout which broke off has left."""
        policy: Any = self.model.policy
        if policy.caches_are_setup():
            delete_kv_caches(policy)


def host_of(recipe: Any, stock: StockPPO, objective: Objective, ranks: Ranks, gate: Gate) -> Host:
    """Read a recipe that has been set up; ``gate`` holds the optimizers back, if they step in the backward pass."""
    in_backward = bool(recipe._optimizer_in_bwd)
    return Host(
        name=type(recipe).__name__,
        objective=objective,
        model=stock.model,
        optimizers=gate.optimizers if in_backward else [recipe._optimizer],
        loader=recipe._dataloader,
        device=recipe._device,
        ranks=ranks,
        gate=gate if in_backward else None,
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
        samples=num_samples,
    )
