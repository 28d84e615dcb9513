"""The training loop of PPO.

That of the other recipes turns each batch into one gradient. Here a batch of prompts becomes trajectories first, which
are whitened together and then learned from in several optimizer steps, in several random orders. So a rollout is the
step that the batch size is decided for, and it has two phases that each run out of memory in a way of their own.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torchtune.rlhf import PPOStats, Trajectory
from tqdm import tqdm

from adaptive_batching._device import without_waiting
from adaptive_batching._torchtune.data import Sample, index_of
from adaptive_batching._torchtune.host import Outlet
from adaptive_batching._torchtune.loop import Loop, Training
from adaptive_batching._torchtune.ppo.learning import Learning
from adaptive_batching._torchtune.ppo.rollout import Rollout
from adaptive_batching._torchtune.ppo.stock_ppo import StockPPO
from adaptive_batching._torchtune.ppo.trajectories import Experience
from adaptive_batching._torchtune.step_cost import recorded_memory


class PPOOutlet(Outlet, Protocol):
    """Takes what stock itself must see of a run, whose steps are rollouts."""

    global_step: int
    """Optimizer steps so far."""

    def log_rollout(
        self,
        trajectory: Trajectory,
        stats: PPOStats,
        divergence: tuple[torch.Tensor, torch.Tensor],
        tokens_per_second: tuple[float, float],
        added: dict[str, float],
    ) -> None: ...


class PPOLoop(Loop):
    """Trains policy and value model, in steps that are rollouts and all that is learned from them."""

    _outlet: PPOOutlet

    def __init__(self, training: Training, stock: StockPPO, rollout: Rollout, learning: Learning) -> None:
        super().__init__(training)
        self._stock = stock
        self._rollout = rollout
        self._learning = learning

    def run(self) -> None:
        """Train until the trajectories of the config are used up, and save checkpoints."""
        with tqdm(initial=self.global_step, dynamic_ncols=True) as self._progress:
            super().run()

    def _run_epoch(self, epoch: int) -> None:
        run, course = self._run, self._schedule.course
        self._show_total()
        if course.epoch_is_over:
            return  # what is left of the run's trajectories is less than a batch
        for index, samples in enumerate(self._schedule.batches()):
            with recorded_memory(run.memory_history, epoch, index):
                self._run_batch(epoch, samples)
                self._progress.update(1)
            run.profiler.step()
            if course.epoch_is_over:
                break
            self._save_within(epoch)

    def _show_total(self) -> None:
        """Show the rollouts of the whole run, if the size does not change any more."""
        self._progress.total = self.global_step + self._schedule.course.steps_left()

    def _run_batch(self, epoch: int, samples: list[Sample]) -> None:
        """Generate, and learn."""
        stock, schedule = self._stock, self._schedule
        prompts = without_waiting(self._host.loader.collate(samples)["tokens"], self._host.device)  # [b, s]
        start = time.perf_counter()
        trajectory = self._rollout.run(samples, prompts)
        of_rollout = time.perf_counter() - start
        advantages, returns, *divergence = stock.judge(trajectory)
        start = time.perf_counter()
        numbers = [index_of(sample) for sample in samples]
        stats = self._learning.run(Experience(trajectory, advantages, returns, prompts.shape[1], numbers))
        of_learning = time.perf_counter() - start
        schedule.take_step(torch.tensor(prompts.numel()))
        self.global_step += 1
        self._outlet.global_step += len(stats)
        self._note_progress(epochs_run=epoch)
        of_all = PPOStats(*map(torch.stack, zip(*stats, strict=True)))
        recoveries = self._rollout.num_recoveries + self._learning.num_recoveries
        if self.global_step % self._run.log_every == 0:
            added: dict[str, float] = schedule.metrics()
            if schedule.adapts:
                added["ppo_batch_size_samples"] = len(samples) // stock.sizes.steps
            if schedule.adapts or recoveries:
                added["out_of_memory_recoveries"] = recoveries
            tokens_per_second = prompts.numel() / of_rollout, prompts.numel() / of_learning
            self._outlet.log_rollout(trajectory, of_all, (divergence[0], divergence[1]), tokens_per_second, added)
        if not schedule.adapts and not self._watchers:
            return  # nothing waits for the device
        loss, rate = float(of_all.loss.mean()), self._outlet.learning_rate()
        for watcher in self._watchers:
            watcher.step(epoch, self.global_step, len(samples), loss, rate, recoveries)
        if self._record_step(loss, of_rollout + of_learning, self._learning.ran):
            self._show_total()
