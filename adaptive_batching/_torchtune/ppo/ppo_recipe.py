"""Code of the PPO recipe: stock's set-up, extended where it has to be, and our loop in place of stock's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune.rlhf import PPOStats, Trajectory

from adaptive_batching._report.record import Report
from adaptive_batching._torchtune.checkpoints import (
    WITHIN_TRAINING,
    kept_if_disk_is_full,
    saved_as_step,
    saved_last,
    with_batch_state,
)
from adaptive_batching._torchtune.ppo import stock_ppo as stocks
from adaptive_batching._torchtune.ppo.ppo_session import PPOSession
from adaptive_batching._torchtune.ppo.trajectories import Trajectories
from adaptive_batching._torchtune.probing import Circumstances
from adaptive_batching._torchtune.recipe import AdaptiveBatching
from adaptive_batching._torchtune.resuming import take_value_model_of
from adaptive_batching._torchtune.settings import check_ppo_settings


class AdaptivePPO(AdaptiveBatching):
    """Mixed into stock's PPO recipe, before it in the list of bases.

    ``batch_size`` counts the trajectories of a rollout. As it grows, ``ppo_batch_size`` grows with it, so that a batch
    keeps its number of optimizer steps. ``forward_batch_size`` and the micro-batches of a backward pass change nothing
    that the optimizer sees.

    A step of ``save_every_n_steps`` is a rollout with all that is learned from it, several optimizer steps.
    """

    # Set by the stock recipe
    _resume_from_checkpoint: bool

    validates = False
    _batches_of_a_step = 1  # gradients are accumulated within a batch

    _session: PPOSession | None

    def __init__(self, cfg: DictConfig) -> None:
        check_ppo_settings(cfg)
        super().__init__(cfg)
        self._value_checkpoints = Path(cfg.value_checkpointer.output_dir)

    def _settle(self, cfg: DictConfig, report: Report | None) -> None:
        stock = stocks.StockPPO(self, cfg.ppo_batch_size)
        host = stocks.host_of(self, stock, Trajectories(stock), self.ranks, self._gate)
        self._host = host
        run = stocks.run_of(self, int(cfg.num_steps), self.learning_rate())
        circumstances = Circumstances(cfg)
        self._session = PPOSession(host, run, self._settings, self._increase, report, self._stored, stock=stock)
        self._session.settle(circumstances)

    def note_progress(self, *, epochs_run: int, global_step: int, steps_per_epoch: int) -> None:
        """Let stock know how far the run is; ``global_step`` counts rollouts."""
        stocks.note_progress(self, epochs_run=epochs_run, rollouts=global_step)

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return float(self._host.optimizers[0].param_groups[0]["lr"])

    def log_rollout(
        self,
        trajectory: Trajectory,
        stats: PPOStats,
        divergence: tuple[torch.Tensor, torch.Tensor],
        tokens_per_second: tuple[float, float],
        added: dict[str, float],
    ) -> None:
        """Log what stock logs of a rollout, and ``added``."""
        logger, collected = self._metric_logger, _Collected()
        self._metric_logger = collected
        try:
            of_stock: Any = super(AdaptiveBatching, self)
            of_stock.log_metrics(trajectory, stats, *divergence, *tokens_per_second)
        finally:
            self._metric_logger = logger
        self.log_metrics({**collected.metrics, **added}, self.global_step)

    def save_epoch(self, epoch: int, *, is_last: bool) -> None:
        """Save the checkpoints that end ``epoch``, as stock does."""
        of_policy = kept_if_disk_is_full(self._checkpoints, epoch)
        with of_policy, kept_if_disk_is_full(self._value_checkpoints, epoch):
            self._save_both(epoch, is_last=is_last)

    def save_step(self, step: int, *, is_last: bool) -> None:
        """Save the checkpoints after the ``step``-th rollout, both of them or neither; the last have no state."""
        policy, value = stocks.checkpointers_of(self)
        with saved_as_step(step, (policy, self._checkpoints), (value, self._value_checkpoints)):
            self._save_both(WITHIN_TRAINING, is_last=is_last)

    def _save_both(self, epoch: int, *, is_last: bool) -> None:
        assert self._session is not None, "set up first"
        self._session.note_random_state()
        policy, _ = stocks.checkpointers_of(self)
        with saved_last(policy), with_batch_state(policy, self._state_to_store()):
            self.save_checkpoint(epoch, is_intermediate_checkpoint=not is_last)  # type: ignore[attr-defined]

    def _setup_checkpointers(
        self, policy: DictConfig, ref_policy: DictConfig, value: DictConfig, reward: DictConfig
    ) -> Any:
        if self._settings.enabled and self._resume_from_checkpoint:
            take_value_model_of(policy, value)
        return super()._setup_checkpointers(policy, ref_policy, value, reward)  # type: ignore[misc]

    def _state_to_store(self) -> dict[str, Any] | None:
        return None if self._session is None else self._session.state_dict(stocks.rollouts_of(self))


class _Collected:
    """Takes the metrics of a step in place of a logger."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    def log_dict(self, metrics: dict[str, Any], step: int) -> None:
        self.metrics = metrics
