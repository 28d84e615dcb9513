"""The training loop of PPO.

That of the other recipes turns each batch into one gradient. Here a batch of prompts becomes trajectories first, which
are whitened together and then learned from in several optimizer steps, in several random orders. So a rollout is the
step that the batch size is decided for, and it has two phases that each run out of memory in a way of their own.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torchtune.rlhf import PPOStats
from tqdm import tqdm

from adaptive_batching._device import without_waiting
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._torchtune.ppo.rollouts import Rollout
from adaptive_batching._torchtune.ppo.stock_ppo import Experience, StockPPO, Trajectories
from adaptive_batching._torchtune.stock.data import Sample, index_of
from adaptive_batching._torchtune.stock.objective import Sums
from adaptive_batching._torchtune.train.recipe_work import MicroBatch, TrainingWork, apply_gradients
from adaptive_batching._torchtune.train.run import TrainingRun


class PPOLoop:
    """Trains policy and value model, in steps that are rollouts and all that is learned from them."""

    def __init__(
        self,
        training: TrainingRun,
        stock: StockPPO,
        rollout: Rollout,
        work: TrainingWork,
        runner: StepRunner[Iterable[list[Sample]], MicroBatch, Sums],
    ) -> None:
        self.training = training
        self._host, self._schedule = training.host, training.schedule
        self._hooks: Any = training.hooks  # AdaptivePPO
        self._stock, self._rollout = stock, rollout
        self._work, self._runner = work, runner

    def run(self) -> None:
        """Train until the trajectories of the config are used up, and save checkpoints."""
        training, run = self.training, self.training.run
        schedule, batch_schedule = self._schedule, self._schedule.batch_schedule
        with tqdm(initial=training.global_step, dynamic_ncols=True) as self._progress:
            training.begin()
            for epoch in itertools.count(run.first_epoch):
                with training.epoch(epoch):
                    self._show_total()
                    # What is left of the run's trajectories may be less than a batch.
                    for index, samples in enumerate(() if batch_schedule.epoch_is_over else schedule.batches()):
                        with training.recorded_memory(epoch, index):
                            self._run_batch(epoch, samples)
                            self._progress.update(1)
                        run.profiler.step()
                        if batch_schedule.epoch_is_over:
                            break
                        training.save_if_due(epoch)
                if batch_schedule.run_is_over:
                    break
            training.end()

    def _show_total(self) -> None:
        """Show the rollouts of the whole run, if the size does not change any more."""
        self._progress.total = self.training.global_step + self._schedule.batch_schedule.steps_left()

    def _run_batch(self, epoch: int, samples: list[Sample]) -> None:
        training, schedule = self.training, self._schedule
        prompts = without_waiting(self._host.loader.collate(samples)["tokens"], self._host.device)  # [b, s]
        start = time.perf_counter()
        trajectory = self._rollout.run(samples, prompts)
        of_rollout = time.perf_counter() - start
        advantages, returns, *divergence = self._stock.judge(trajectory)
        start = time.perf_counter()
        numbers = [index_of(sample) for sample in samples]
        steps = self._learn(Experience(trajectory, advantages, returns, prompts.shape[1], numbers))
        of_learning = time.perf_counter() - start
        schedule.take_step()
        self._hooks.global_step += len(steps)
        training.count_step(epoch)
        stats = PPOStats(*map(torch.stack, zip(*steps, strict=True)))
        recoveries = self._rollout.runner.num_recoveries + self._runner.num_recoveries
        if training.global_step % training.run.log_every == 0:
            added: dict[str, float] = schedule.metrics()
            added |= {"ppo_batch_size": len(samples) // self._stock.steps, "oom_retries": recoveries}
            tokens_per_second = prompts.numel() / of_rollout, prompts.numel() / of_learning
            self._hooks.log_rollout(added, trajectory, stats, *divergence, *tokens_per_second)
        loss, rate = float(stats.loss.mean()), self._hooks.learning_rate()
        recovered = [*self._rollout.runner.take_recovered(), *self._runner.take_recovered()]
        for watcher in training.watchers:
            for failed, max_tokens in recovered:
                watcher.recovery(epoch=epoch, step=training.global_step, failed=failed, max_tokens=max_tokens)
            watcher.step(epoch, training.global_step, len(samples), loss, rate, recoveries)
        if training.record_step(loss):
            self._show_total()

    def _learn(self, experience: Experience) -> list[PPOStats]:
        """Take all optimizer steps, in stock's order; return what came of each.

        DoesNotFitError if a single trajectory does not fit.
        """
        stock, objective, num_rows = self._stock, self._host.objective, len(experience.advantages)
        assert isinstance(objective, Trajectories)
        objective.see(experience)
        in_step, in_backward = num_rows // stock.steps, num_rows // stock.parts
        stats: list[PPOStats] = []
        for _ in range(stock.epochs):
            # From torch's global random state, which stock's checkpoints do not hold and ours do.
            order = torch.randperm(num_rows, device=self._host.device).tolist()
            for first in range(0, num_rows, in_step):
                starts = range(first, first + in_step, in_backward)
                sums = self._take_step([objective.rows(order[at : at + in_backward]) for at in starts])
                stats.append(PPOStats(loss=sums.loss, **sums.metrics))
        return stats

    def _take_step(self, batches: list[list[Sample]]) -> Sums:
        self._work.begin_step()
        sums = reduce(operator.add, (result for _, result in self._runner.step(batches)))
        with self._work.stepping():
            apply_gradients(self._host, sums)
        self._work.splitter.timer.read()
        return sums
