"""A PPO run from its settings to its loop: a probe of backward passes and of rollouts, and what follows from both."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory.meter import MemoryMeter
from adaptive_batching._memory.unused_memory import release_cached_memory
from adaptive_batching._probe.find import find_largest
from adaptive_batching._probe.probed_step import TrainingStep
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._probe.sizing import ProbeRequest, Sizing
from adaptive_batching._report.events import Watcher
from adaptive_batching._report.record import Report
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._torchtune.ppo.parts_of_batch import InParts, sizes_of_batch, sizing_of_part
from adaptive_batching._torchtune.ppo.ppo_loop import PPOLoop
from adaptive_batching._torchtune.ppo.rollouts import Rollout, RolloutWork
from adaptive_batching._torchtune.ppo.stock_ppo import StockPPO, Trajectories, longest
from adaptive_batching._torchtune.stock import compiling
from adaptive_batching._torchtune.stock.host import Host, StockRun, TrainingHooks
from adaptive_batching._torchtune.stock.objective import worst_case_sample
from adaptive_batching._torchtune.train.growing import Growth, Increase, make_controller, shape_of
from adaptive_batching._torchtune.train.probing import CacheInputs, Probe, Probed, cached_probe, sizing_of
from adaptive_batching._torchtune.train.recipe_work import SplitPolicy, Splitter, TrainingWork
from adaptive_batching._torchtune.train.run import (
    TrainingRun,
    before_memory_is_short,
    check_that_splitting_is_exact,
    restore,
)
from adaptive_batching._torchtune.train.training_step import batch_dependent_module
from adaptive_batching._values import Explore, memory_size

log = logging.getLogger(__name__)


class PPORun:
    """A run of PPO on one device, and all that is decided before it trains.

    Args:
        report: Of the run.
        stored: State of the run that is resumed; empty for a new one.
    """

    def __init__(
        self,
        stock: StockPPO,
        host: Host,
        run: StockRun,
        settings: AdaptiveBatchingConfig,
        increase: Increase,
        report: Report,
        stored: Mapping[str, Any],
    ) -> None:
        self.stock, self.host, self.run, self.settings, self.increase = stock, host, run, settings, increase
        self.split_policy = SplitPolicy()
        self.training: TrainingRun | None = None  # until there is a plan
        self._report, self._stored = report, stored
        self._batch_dependent = functools.cache(functools.partial(batch_dependent_module, host))
        self._rollout_rows: int | None = None  # trajectories that fit in a forward of a rollout, if probed
        self._rollout_limit = TokenLimit()

    def make_plan(self, cache_inputs: CacheInputs) -> None:
        """Decide all that is decided before training: what fits, how batches are split, how they grow."""
        host, run, stock, settings, increase = self.host, self.run, self.stock, self.settings, self.increase
        report, stored, split_policy = self._report, self._stored, self.split_policy
        before_memory_is_short(host, settings)
        # What is probed are backward passes: a batch has as many of equal size as configured.
        sizing = sizing_of_part(
            sizing_of(host, run, settings), stock.parts, run_samples=stock.num_samples,
            holds_gradients=stock.backwards > 1,
        )  # fmt: skip
        check_that_splitting_is_exact(sizing, self._batch_dependent)
        compiling.prepare(host, sizes_vary=settings.grows or sizing.bounds_forwards)

        if sizing.probes:
            probed, self._rollout_rows = self._probe(sizing, cache_inputs, report)
        else:
            probed = Probed(sizes_of_batch(sizing.unprobed, stock.parts))
            report.maximum(sizing.request.upper * stock.parts, sizing.request.upper_reason)
        accumulation = InParts(run.accumulation, stock.parts)
        controller = make_controller(host, run, increase, accumulation, probed.sizes, stored)
        if stored:
            self.run = run = replace(run, first_step=stored["global_step"])
            restore(stored, host, split_policy)
            self._rollout_limit.load_state_dict(stored["rollout_limit"])
            for optimizer, state in zip(self._policy_optimizers(), stored.get("policy_optimizers", []), strict=False):
                optimizer.load_state_dict(state)

        size = probed.sizes.micro_batch_size
        assert not isinstance(size, Explore), "refused with PPO's settings"
        split_policy.limit.bound, split_policy.samples_at_longest = probed.capacity, probed.sizes.fits
        split_policy.size = size

        shape = replace(shape_of(host, run, settings), run_samples=stock.num_samples)
        growth = Growth(host, run, increase, controller, shape, stored)
        self.training = TrainingRun(host, run, settings, probed, split_policy, growth)
        self.training.report_plan(report)

    def _probe(self, sizing: Sizing, cache_inputs: CacheInputs, report: Report) -> tuple[Probed, int]:
        """Find the largest batch of trajectories of a run, and what fits in a forward of each phase.

        A batch that is not split is as many backward passes as the config has in one, each of the largest size.
        Returned are what follows from the backward passes, and the trajectories of a rollout's forward.
        """
        host, stock, run, settings = self.host, self.stock, self.run, self.settings
        parts, objective = stock.parts, host.objective
        assert isinstance(objective, Trajectories)
        most_tokens = getattr(stock.model.policy, "max_seq_len", None)  # of prompt and response
        prompt = worst_case_sample(
            host.loader.dataset,
            objective,
            sequence_length=settings.sequence_length,
            tokenizer_max=host.max_length,
            model_max=None if most_tokens is None else most_tokens - stock.max_generated_tokens,
            ranks=host.ranks,
        )
        length, generated = len(objective.tokens(prompt)), stock.max_generated_tokens
        one = longest(stock, length)
        row_bytes = sum(tensor.nbytes for tensor in (*one.trajectory, one.advantages, one.returns))

        log.info("probing backward passes, of prompts of %d tokens and %d generated", length, generated)
        # Is the batch as many backward passes of the size that is found as the config has in one?
        follows, upper = sizing.bounds_batch, sizing.request.upper * parts
        worst = objective.at_worst(one, lambda rows: (rows * parts if follows else upper) * row_bytes)
        [sample] = worst.rows([0])
        probe = Probe(replace(host, objective=worst), run, sizing, cache_inputs, sample, report.directory)
        start = time.perf_counter()
        of_probe = probe.find()
        waited = time.perf_counter() - start
        length_of_rows = len(worst.tokens(sample))
        report.probe(of_probe.result, sequence_length=length_of_rows, of="in a backward pass", waited=waited)
        probed = probe.probed(of_probe)
        probed = replace(probed, sizes=sizes_of_batch(probed.sizes, parts))

        log.info("probing rollouts of these lengths")
        most_rows = probed.sizes.maximum if follows else upper
        held_bytes = most_rows * row_bytes  # of the trajectories of the largest batch, which are held meanwhile
        rollout = self._probe_rollouts(length, most_rows, held_bytes, cache_inputs, report.directory)
        peak = f"peak {memory_size(rollout.peak_bytes)} of {memory_size(rollout.budget_bytes)}"
        report.found(
            "rollout", ("most in a rollout", f"{rollout.batch_size}: {peak} at {length} + {generated} tokens"),
            prompt_length=length, generated=generated, **rollout.to_dict(),
        )  # fmt: skip
        return probed, rollout.batch_size

    def _probe_rollouts(
        self, prompt_tokens: int, most_rows: int, held_bytes: int, cache_inputs: CacheInputs, folder: Path
    ) -> ProbeResult:
        """Find the most trajectories that fit in a forward, of at most ``most_rows``, while ``held_bytes`` are held."""
        host, stock = self.host, self.stock
        # Rows of a forward are no size of training.
        request = ProbeRequest(most_rows, "the largest batch", rounds=False, coarse=True)
        remedy = (
            f"set max_generated_tokens below {stock.max_generated_tokens}, or tokenizer.max_seq_len below "
            f"{prompt_tokens}"
        )

        def find(settings: AdaptiveBatchingConfig, meter: MemoryMeter) -> ProbeResult:
            step = rollout_step(host, stock, prompt_tokens, held_bytes)
            return find_largest(step, settings, meter, request, remedy=remedy, scratch=folder)

        facts = {"recipe": f"{host.name}, rollout", "held": most_rows, "sequence_length": prompt_tokens}
        inputs, path = replace(cache_inputs, stored=None), folder / "probe_rollout.json"
        return cached_probe(host, self.settings, inputs, facts, request, path, find).result

    def train(self, hooks: TrainingHooks, watchers: Sequence[Watcher] = ()) -> None:
        """Train; the record of the run is told what happens before ``watchers`` are."""
        host, stock, training = self.host, self.stock, self.training
        assert training is not None, "make a plan first"
        recovers = self.settings.recover_from_oom is not False
        training.attend(hooks, [self._report, *watchers])

        # Checkpointing of activations saves nothing where none are kept.
        of_rollout = replace(host, checkpoints_activations=True, backward_optimizers=None)
        rollout_work = RolloutWork(of_rollout, stock, self._batch_dependent, self._rollout_rows, self._rollout_limit)
        rollout = Rollout(rollout_work, StepRunner(rollout_work, recovers=recovers))

        splitter = Splitter(host, self.split_policy)
        work = TrainingWork(host, splitter, self._batch_dependent)
        runner = StepRunner(work, recovers=recovers, largest_that_ran=training.probed.tokens)
        PPOLoop(training, stock, rollout, work, runner).run()

    def note_random_state(self) -> None:
        """Keep the random state for the checkpoint that is saved next."""
        assert self.training is not None, "make a plan first"
        self.training.note_random_state()

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a checkpoint that is saved now holds; None before there is a plan."""
        if self.training is None:
            return None
        state = self.training.state_dict()
        state["rollout_limit"] = self._rollout_limit.state_dict()
        if self.host.backward_optimizers is not None:  # of these stock stores those of the value model alone
            state["policy_optimizers"] = [optimizer.state_dict() for optimizer in self._policy_optimizers()]
        return state

    def _policy_optimizers(self) -> list[Any]:
        if (backward_optimizers := self.host.backward_optimizers) is None:
            return []
        return [backward_optimizers.optimizer_of(weight) for weight in self.stock.model.policy.parameters()]


def rollout_step(host: Host, stock: StockPPO, prompt_tokens: int, held_bytes: int) -> TrainingStep:
    """Return a rollout to measure."""

    def make_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        token = 1 if stock.pad_id == 0 else 0
        prompts = torch.full((rows, prompt_tokens), token, device=stock.device)
        if prompt_tokens > 1:
            prompts[0, 0] = stock.pad_id  # with padding anywhere, each row has an attention mask of its own
        return prompts, torch.empty(held_bytes, dtype=torch.uint8, device=stock.device)

    def run(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        before = stock.rng.get_state()
        try:
            stock.generate(batch[0])
        finally:
            stock.rng.set_state(before)

    def discard() -> None:
        stock.forget()
        release_cached_memory(host.device)

    return TrainingStep(host.model, host.optimizers, make_batch, run, discard, updates=False)
