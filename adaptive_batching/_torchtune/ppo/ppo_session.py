"""A PPO run from its settings to its loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from adaptive_batching._growth.increase import Accumulation, InParts
from adaptive_batching._micro_batches.limits import TokenLimit
from adaptive_batching._report.record import Report
from adaptive_batching._torchtune.cutting import Cutter, Recovery
from adaptive_batching._torchtune.loop import Training
from adaptive_batching._torchtune.ppo.learning import Learning
from adaptive_batching._torchtune.ppo.phases import find_sizes
from adaptive_batching._torchtune.ppo.ppo_loop import PPOLoop
from adaptive_batching._torchtune.ppo.rollout import Rollout
from adaptive_batching._torchtune.ppo.stock_ppo import StockPPO
from adaptive_batching._torchtune.ppo.trajectories import Trajectories
from adaptive_batching._torchtune.probing import Circumstances, Probed
from adaptive_batching._torchtune.session import Session


@dataclass
class PPOSession(Session):
    """Everything that a PPO run has settled on before it trains; see :class:`Session`."""

    stock: StockPPO = field(kw_only=True)
    _rollout_rows: int | None = field(default=None, init=False)
    _rollout_limit: TokenLimit = field(default_factory=TokenLimit, init=False)

    def _accumulation(self) -> Accumulation:
        return InParts(parts=self.stock.sizes.parts)

    def _find_maximum(self, circumstances: Circumstances, report: Report) -> Probed:
        found = find_sizes(self.host, self.stock, self.run, self.settings, circumstances, report)
        self._rollout_rows = found.rollout_rows
        return found.batch

    def _stock_schedule(self) -> StockSchedule:
        return StockSchedule(self.host, self.run, self.stock.total_rollouts)

    def _loop(self, training: Training) -> PPOLoop:
        host, stock = self.host, self.stock
        objective = host.objective
        assert isinstance(objective, Trajectories)
        # Checkpointing of activations saves nothing where none are kept.
        of_rollout = replace(host, checkpoints_activations=True)
        recovers = self.settings.recover_from_oom
        recovery = Recovery(of_rollout, self._rollout_limit, self._batch_dependent, recovers=recovers)
        cutter, counts_retries = Cutter(host, self.execution), self.growth is not None
        return PPOLoop(
            training,
            stock,
            Rollout(of_rollout, stock, self._rollout_limit, recovery, self._rollout_rows),
            Learning(host, objective, stock.sizes, cutter, self._recovery(), counts_retries=counts_retries),
        )

    def state_dict(self, global_step: int) -> dict[str, Any] | None:
        """Return what a checkpoint holds after ``global_step`` rollouts; None with all fields unset."""
        state = super().state_dict(global_step)
        if state is None:
            return None
        state["rollout_limit"] = self._rollout_limit.state_dict()
        if self.host.gate is not None:  # of these stock stores those of the value model alone
            state["policy_optimizers"] = [optimizer.state_dict() for optimizer in self._policy_optimizers()]
        return state

    def _restore(self, stored: Mapping[str, Any]) -> None:
        super()._restore(stored)
        self._rollout_limit.load_state_dict(stored["rollout_limit"])
        for optimizer, state in zip(self._policy_optimizers(), stored.get("policy_optimizers", []), strict=False):
            optimizer.load_state_dict(state)

    def _policy_optimizers(self) -> list[Any]:
        gate = self.host.gate
        return [] if gate is None else [gate.optimizer_of(p) for p in self.stock.model.policy.parameters()]
