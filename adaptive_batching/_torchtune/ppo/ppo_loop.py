"""The training loop of PPO.

That of the other recipes turns each batch into one gradient. Here a batch of prompts becomes trajectories first, which
are whitened together and then learned from in several optimizer steps, in several random orders. So a rollout is the
step that the batch size is decided for, and it has two phases that each run out of memory in a way of their own.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torchtune.rlhf import PPOStats
from tqdm import tqdm

from adaptive_batching._device import without_waiting
from adaptive_batching._micro_batches.run import Outcome
from adaptive_batching._torchtune.cutting import Cutter, MicroBatch
from adaptive_batching._torchtune.data import Sample, index_of
from adaptive_batching._torchtune.gradients import apply_gradients, gather_gradients
from adaptive_batching._torchtune.loop import Loop, Training
from adaptive_batching._torchtune.objective import Sums
from adaptive_batching._torchtune.ppo.rollout import Rollout
from adaptive_batching._torchtune.ppo.stock_ppo import Experience, StockPPO, Trajectories
from adaptive_batching._torchtune.recovery import Recovery
from adaptive_batching._torchtune.step_cost import recorded_memory


class PPOLoop(Loop):
    """Trains policy and value model, in steps that are rollouts and all that is learned from them."""

    _outlet: Any  # AdaptivePPO

    def __init__(
        self, training: Training, stock: StockPPO, rollout: Rollout, cutter: Cutter, recovery: Recovery
    ) -> None:
        super().__init__(training)
        self._stock = stock
        self._rollout = rollout
        self._cutter = cutter
        self._recovery = recovery

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
        schedule = self._schedule
        prompts = without_waiting(self._host.loader.collate(samples)["tokens"], self._host.device)  # [b, s]
        start = time.perf_counter()
        trajectory = self._rollout.run(samples, prompts)
        of_rollout = time.perf_counter() - start
        advantages, returns, *divergence = self._stock.judge(trajectory)
        start = time.perf_counter()
        numbers = [index_of(sample) for sample in samples]
        steps, ran = self._learn(Experience(trajectory, advantages, returns, prompts.shape[1], numbers))
        of_learning = time.perf_counter() - start
        schedule.take_step(torch.tensor(prompts.numel()))
        self.global_step += 1
        self._outlet.global_step += len(steps)
        self._note_progress(epochs_run=epoch)
        stats = PPOStats(*map(torch.stack, zip(*steps, strict=True)))
        recoveries = self._rollout.recovery.num_recoveries + self._recovery.num_recoveries
        if self.global_step % self._run.log_every == 0:
            added: dict[str, float] = schedule.metrics()
            if schedule.adapts:
                added["ppo_batch_size_samples"] = len(samples) // self._stock.steps
            if schedule.adapts or recoveries:
                added["out_of_memory_recoveries"] = recoveries
            tokens_per_second = prompts.numel() / of_rollout, prompts.numel() / of_learning
            self._outlet.log_rollout(added, trajectory, stats, *divergence, *tokens_per_second)
        if not schedule.adapts and not self._watchers:
            return  # nothing waits for the device
        loss, rate = float(stats.loss.mean()), self._outlet.learning_rate()
        for watcher in self._watchers:
            watcher.step(epoch, self.global_step, len(samples), loss, rate, recoveries)
        if self._record_step(loss, of_rollout + of_learning, ran):
            self._show_total()

    def _learn(self, experience: Experience) -> tuple[list[PPOStats], list[MicroBatch]]:
        """Take all optimizer steps, in stock's order; return what came of each, and all micro-batches.

        DoesNotFitError if a single trajectory does not fit.
        """
        stock, objective, num_rows = self._stock, self._host.objective, len(experience.advantages)
        assert isinstance(objective, Trajectories)
        objective.see(experience)
        in_step, in_backward = num_rows // stock.steps, num_rows // stock.parts
        stats: list[PPOStats] = []
        all_ran: list[MicroBatch] = []
        for _ in range(stock.epochs):
            order = torch.randperm(num_rows, device=self._host.device).tolist()
            for first in range(0, num_rows, in_step):
                starts = range(first, first + in_step, in_backward)
                sums, ran = self._take_step([objective.rows(order[at : at + in_backward]) for at in starts])
                stats.append(PPOStats(loss=sums.loss, **sums.metrics))
                all_ran += ran
        return stats, all_ran

    def _take_step(self, batches: list[list[Sample]]) -> tuple[Sums, list[MicroBatch]]:
        self._recovery.start()
        ran = self._recovery.run_until_fits(lambda again: self._gather(batches))
        sums = reduce(operator.add, [each for _, outcome in ran for each in outcome.results])
        with self._recovery.fatal():
            apply_gradients(self._host, sums)
        self._cutter.read_timings()
        self._recovery.end_step()
        return sums, [micro_batch for micro_batches, _ in ran for micro_batch in micro_batches]

    def _gather(self, batches: list[list[Sample]]) -> Iterator[tuple[Sequence[MicroBatch], Outcome[Sums]]]:
        """Run each backward pass."""
        for batch in batches:
            micro_batches = self._cutter.cut(batch)
            counts_retries = self._schedule.adapts
            outcome = gather_gradients(self._host, micro_batches, self._cutter.timed, counts_retries=counts_retries)
            if outcome.failed:
                self._cutter.forget_timings()
            yield micro_batches, outcome
