"""The PPO recipe: stock's set-up, extended where it has to be, and our loop in place of stock's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from adaptive_batching._report.record import Report
from adaptive_batching._torchtune.ppo.ppo_run import PPORun
from adaptive_batching._torchtune.ppo.ppo_settings import check_ppo_settings
from adaptive_batching._torchtune.ppo.stock_ppo import StockPPO, Trajectories, host_of, run_of
from adaptive_batching._torchtune.ppo.value_model import take_value_model_of
from adaptive_batching._torchtune.stock import checkpoints
from adaptive_batching._torchtune.stock.loading import replaced_in
from adaptive_batching._torchtune.train.recipe import AdaptiveBatching, unless_off


class AdaptivePPO(AdaptiveBatching):
    """Mixed into stock's PPO recipe, before it in the list of bases.

    ``batch_size`` counts the trajectories of a rollout. As it grows, ``ppo_batch_size`` grows with it, so that a batch
    keeps its number of optimizer steps. ``forward_batch_size`` and the micro-batches of a backward pass change nothing
    that the optimizer sees.

    A step of ``save_every_n_steps`` is a rollout with all that is learned from it, several optimizer steps.
    """

    # Set by the stock recipe
    _epochs_run: int
    _policy_checkpointer: Any
    _steps_run: int
    _value_checkpointer: Any

    validates = takes_objective = False
    check_settings = staticmethod(check_ppo_settings)
    loads: Mapping[str, str] = {
        "checkpointer": "policy_model", "ref_policy_checkpointer": "policy_model",
        "value_checkpointer": "reward_and_value_model", "reward_checkpointer": "reward_and_value_model",
    }  # fmt: skip
    _batches_of_a_step = 1  # gradients are accumulated within a batch

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        self._value_checkpoints = Path(cfg.value_checkpointer.output_dir)

    def _make_plan(self, cfg: DictConfig, report: Report) -> None:
        stock = StockPPO(self, cfg.ppo_batch_size, int(cfg.num_steps))
        self._host = host_of(self, stock, Trajectories(stock), self.ranks, self._backward_optimizers)
        stock_run = run_of(self, stock.num_samples, self.learning_rate())
        run = PPORun(stock, self._host, stock_run, self._settings, self._increase, report, self._stored)
        run.make_plan(self._cache_inputs(cfg))
        self._planned_run = run

    def note_progress(self, *, epochs_run: int, global_step: int, steps_per_epoch: int) -> None:
        """Let stock know how far the run is; ``global_step`` counts rollouts."""
        self._epochs_run, self._steps_run = epochs_run, global_step

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return float(self._host.optimizers[0].param_groups[0]["lr"])

    @unless_off  # stock has a method of that name, with other arguments
    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        """Hand metrics to stock's logger."""
        super().log_metrics(metrics, step)

    def log_rollout(self, added: dict[str, float], *of_stock: Any) -> None:
        """Log what stock logs of a rollout, which takes ``of_stock``, and ``added``."""
        collected: dict[str, Any] = {}
        with replaced_in(self._metric_logger, log_dict=lambda metrics, step: collected.update(metrics)):
            super(AdaptiveBatching, self).log_metrics(*of_stock)  # type: ignore[misc]
        self.log_metrics({**collected, **added}, self.global_step)

    def save_epoch(self, epoch: int, *, is_last: bool) -> None:
        """Save the checkpoints that end ``epoch``, as stock does."""
        self._save_both(epoch, f"epoch_{epoch}", is_last=is_last)

    def save_step(self, step: int, *, is_last: bool) -> None:
        """Save the checkpoints after the ``step``-th rollout, both of them or neither; the last have no state."""
        self._save_both(checkpoints.WITHIN_TRAINING, f"step_{step}", is_last=is_last)

    def _save_both(self, epoch: int, name: str, *, is_last: bool) -> None:
        assert self._planned_run is not None, "set up first"
        self._planned_run.note_random_state()
        policy, waiting = self._policy_checkpointer, list[Any]()
        save = policy.save_checkpoint
        # That of the policy has the state, which makes a checkpoint complete, and so is saved after the value model's.
        both = (policy, self._checkpoints), (self._value_checkpointer, self._value_checkpoints)
        with checkpoints.saved_as(name, *both):
            with (
                replaced_in(policy, save_checkpoint=lambda *args, **kwargs: waiting.append((args, kwargs))),
                checkpoints.with_batch_state(policy, self._state_to_store()),
            ):
                self.save_checkpoint(epoch, is_intermediate_checkpoint=not is_last)  # type: ignore[attr-defined]
            [(args, kwargs)] = waiting
            save(*args, **kwargs)

    def _check_that_epochs_are_left(self) -> None:
        """Do nothing: ``num_steps`` ends the run, and where it is resumed the epochs of the first one hold."""

    @unless_off
    def _setup_checkpointers(
        self, policy: DictConfig, ref_policy: DictConfig, value: DictConfig, reward: DictConfig
    ) -> Any:
        if self._resume_from_checkpoint:
            take_value_model_of(policy, value)
        return super()._setup_checkpointers(policy, ref_policy, value, reward)  # type: ignore[misc]
