"""The PPO recipe: stock's set-up, extended where it has to be; a probe of rollouts and backward passes; our loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory import MemoryMeter, release_cached_memory
from adaptive_batching._probe.find import find_largest
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._probe.sizing import ProbeRequest, Sizing, size_up
from adaptive_batching._report.record import Report
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._torchtune.ppo.ppo_loop import PPOLoop, Rollout, RolloutWork
from adaptive_batching._torchtune.ppo.ppo_settings import check_ppo_settings
from adaptive_batching._torchtune.ppo.stock_ppo import StockPPO, Trajectories, host_of, longest, run_of
from adaptive_batching._torchtune.stock import checkpoints
from adaptive_batching._torchtune.stock.loading import replaced_in
from adaptive_batching._torchtune.stock.objective import worst_case_sample
from adaptive_batching._torchtune.train.growing import StockSchedule
from adaptive_batching._torchtune.train.loop import Training
from adaptive_batching._torchtune.train.probing import CacheInputs, Probe, Probed, cached_probe
from adaptive_batching._torchtune.train.recipe import AdaptiveBatching
from adaptive_batching._torchtune.train.session import Session
from adaptive_batching._trace.training import TrainingStep

log = logging.getLogger(__name__)


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

    validates = False
    _batches_of_a_step = 1  # gradients are accumulated within a batch

    _session: PPOSession | None

    def __init__(self, cfg: DictConfig) -> None:
        check_ppo_settings(cfg)
        super().__init__(cfg)
        self._value_checkpoints = Path(cfg.value_checkpointer.output_dir)

    def _settle(self, cfg: DictConfig, report: Report | None) -> None:
        stock = StockPPO(self, cfg.ppo_batch_size)
        host = host_of(self, stock, Trajectories(stock), self.ranks, self._backward_optimizers)
        self._host = host
        run = run_of(self, int(cfg.num_steps), self.learning_rate())
        self._session = PPOSession(host, run, self._settings, self._increase, report, self._stored, stock=stock)
        self._session.settle(self._cache_inputs(cfg))

    def note_progress(self, *, epochs_run: int, global_step: int, steps_per_epoch: int) -> None:
        """Let stock know how far the run is; ``global_step`` counts rollouts."""
        self._epochs_run, self._steps_run = epochs_run, global_step

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return float(self._host.optimizers[0].param_groups[0]["lr"])

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
        assert self._session is not None, "set up first"
        self._session.note_random_state()
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

    def _setup_checkpointers(
        self, policy: DictConfig, ref_policy: DictConfig, value: DictConfig, reward: DictConfig
    ) -> Any:
        if self._settings.enabled and self._resume_from_checkpoint:
            checkpoints.take_value_model_of(policy, value)
        return super()._setup_checkpointers(policy, ref_policy, value, reward)  # type: ignore[misc]

    def _state_to_store(self) -> dict[str, Any] | None:
        return None if self._session is None else self._session.state_dict(self._steps_run)


@dataclass
class PPOSession(Session):
    """Everything that a PPO run has settled on before it trains; see :class:`Session`."""

    stock: StockPPO = field(kw_only=True)
    _rollout_rows: int | None = field(default=None, init=False)
    """Trajectories that fit in a forward of a rollout; None where no probe has run."""

    _rollout_limit: TokenLimit = field(default_factory=TokenLimit, init=False)

    def _sizing(self, cache_inputs: CacheInputs) -> Sizing:
        """Return what is asked of a probe of backward passes: a batch has as many of equal size as configured."""
        run, stock = self.run, self.stock
        return size_up(
            self.settings, batch_size=run.batch_size, accumulation=run.accumulation, samples=self.host.samples_per_rank,
            run_samples=run.samples, equal_parts=stock.parts, holds_gradients=stock.backwards > 1,
        )  # fmt: skip

    def _find_maximum(self, sizing: Sizing, cache_inputs: CacheInputs, report: Report) -> Probed:
        """Find the largest batch of trajectories of a run, and what fits in a forward of each phase.

        A batch that is not split is as many backward passes as the config has in one, each of the largest size.
        """
        host, stock, run, settings = self.host, self.stock, self.run, self.settings
        parts, objective = stock.parts, host.objective
        assert isinstance(objective, Trajectories)
        if not sizing.probes:
            report.maximum(sizing.upper, sizing.request.upper_reason)
            return Probed(sizing.unprobed)
        most_tokens = getattr(stock.model.policy, "max_seq_len", None)  # of prompt and response
        prompt = worst_case_sample(
            host.loader.dataset,
            objective,
            sequence_length=settings.sequence_length,
            tokenizer_max=host.max_length,
            model_max=None if most_tokens is None else most_tokens - stock.max_generated_tokens,
        )
        length, generated = len(objective.tokens(prompt)), stock.max_generated_tokens
        one = longest(stock, length)
        row_bytes = sum(tensor.nbytes for tensor in (*one.trajectory, one.advantages, one.returns))
        # Is the batch as many backward passes of the size that is found as the config has in one?
        follows, upper = sizing.bounds_batch, sizing.upper
        worst = objective.at_worst(one, lambda rows: (rows * parts if follows else upper) * row_bytes)
        [sample] = worst.rows([0])
        log.info("probing backward passes, of prompts of %d tokens and %d generated", length, generated)
        as_worst, folder = replace(host, objective=worst), report.directory
        probe = Probe(as_worst, run, sizing, cache_inputs, sample, folder)
        start = time.perf_counter()
        of_probe = probe.find()
        waited = time.perf_counter() - start
        length_of_rows = len(worst.tokens(sample))
        report.probe(of_probe.result, sequence_length=length_of_rows, of="most in a backward", waited=waited)
        probed = probe.probed(of_probe)
        most_rows = probed.sizes.maximum if follows else upper
        step = self._rollout_step(length, most_rows, row_bytes)
        rollout = self._probe_rollouts(step, most_rows, length, cache_inputs, folder)
        report.rollout(rollout, prompt_length=length, generated=generated)
        self._rollout_rows = rollout.batch_size
        return probed

    def _probe_rollouts(
        self, step: TrainingStep, most_rows: int, prompt_tokens: int, cache_inputs: CacheInputs, folder: Path
    ) -> ProbeResult:
        """Find the most trajectories that fit in a forward while those of the largest batch are held."""
        log.info("probing rollouts of these lengths")
        remedy = (
            f"set max_generated_tokens below {self.stock.max_generated_tokens}, or tokenizer.max_seq_len below "
            f"{prompt_tokens}"
        )

        # Rows of a forward are no size of training.
        request = ProbeRequest(most_rows, "the largest batch", rounds=False, coarse=True)

        def find(settings: AdaptiveBatchingConfig, meter: MemoryMeter) -> ProbeResult:
            return find_largest(step, settings, meter, request, remedy=remedy, scratch=folder)

        facts = {"recipe": f"{self.host.name}, rollout", "held": most_rows, "sequence_length": prompt_tokens}
        inputs, path = replace(cache_inputs, stored=None), folder / "probe_rollout.json"
        return cached_probe(self.host, self.settings, inputs, facts, request, path, find).result

    def _rollout_step(self, prompt_tokens: int, held_rows: int, row_bytes: int) -> TrainingStep:
        """Return a rollout to measure. It is not traced: that takes as long as to run it, token by token."""
        host, stock = self.host, self.stock

        def make_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
            token = 1 if stock.pad_id == 0 else 0
            prompts = torch.full((rows, prompt_tokens), token, device=stock.device)
            if prompt_tokens > 1:
                prompts[0, 0] = stock.pad_id  # with padding anywhere, each row has an attention mask of its own
            return prompts, torch.empty(held_rows * row_bytes, dtype=torch.uint8, device=stock.device)

        def run(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
            before = stock.rng.get_state()
            try:
                stock.generate(batch[0])
            finally:
                stock.rng.set_state(before)

        def discard() -> None:
            stock.forget()
            release_cached_memory(host.device)

        return TrainingStep(
            host.model, host.optimizers, make_batch, lambda *_: run, discard, updates=False, can_be_traced=False
        )

    def _stock_schedule(self) -> StockSchedule:
        return StockSchedule(self.host, self.run, self.stock.total_rollouts)

    def _loop(self, training: Training) -> PPOLoop:
        # Checkpointing of activations saves nothing where none are kept.
        of_rollout = replace(self.host, checkpoints_activations=True)
        work = RolloutWork(of_rollout, self.stock, self._batch_dependent, self._rollout_rows)
        runner = StepRunner(work, self._rollout_limit, recovers=self.settings.recover_from_oom)
        learning = self._work(training)
        return PPOLoop(training, self.stock, Rollout(work, runner), learning, self._runner(learning))

    def state_dict(self, global_step: int) -> dict[str, Any] | None:
        """Return what a checkpoint holds after ``global_step`` rollouts; None with all fields unset."""
        state = super().state_dict(global_step)
        if state is None:
            return None
        state["rollout_limit"] = self._rollout_limit.state_dict()
        if self.host.backward_optimizers is not None:  # of these stock stores those of the value model alone
            state["policy_optimizers"] = [optimizer.state_dict() for optimizer in self._policy_optimizers()]
        return state

    def _restore(self, stored: Mapping[str, Any]) -> None:
        super()._restore(stored)
        self._rollout_limit.load_state_dict(stored["rollout_limit"])
        for optimizer, state in zip(self._policy_optimizers(), stored.get("policy_optimizers", []), strict=False):
            optimizer.load_state_dict(state)

    def _policy_optimizers(self) -> list[Any]:
        backward_optimizers = self.host.backward_optimizers
        return (
            []
            if backward_optimizers is None
            else [backward_optimizers.optimizer_of(p) for p in self.stock.model.policy.parameters()]
        )
