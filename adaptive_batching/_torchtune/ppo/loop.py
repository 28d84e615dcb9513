"""The training loop of PPO.

That of the other recipes turns each batch into one gradient. Here a batch of prompts becomes trajectories first, which
are whitened together and then learned from in several optimizer steps, in several random orders. So a rollout is the
step that the batch size is decided for, and it has two phases that each run out of memory in a way of their own.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torchtune.rlhf import PPOStats, Trajectory
from tqdm import tqdm

from adaptive_batching._device import without_waiting
from adaptive_batching._report.events import Watcher
from adaptive_batching._torchtune.data import Sample, index_of
from adaptive_batching._torchtune.growing import Growth
from adaptive_batching._torchtune.host import Host, StockRun
from adaptive_batching._torchtune.ppo.learning import Learning
from adaptive_batching._torchtune.ppo.rollout import Rollout
from adaptive_batching._torchtune.ppo.stock import StockPPO
from adaptive_batching._torchtune.ppo.trajectories import Experience
from adaptive_batching._torchtune.step_cost import recorded_memory

log = logging.getLogger(__name__)


class PPOOutlet(Protocol):
    """Takes what stock itself must see of a run."""

    global_step: int
    """Optimizer steps so far."""

    def note_rollouts(self, *, epochs_run: int, rollouts: int) -> None: ...

    def log_rollout(
        self,
        trajectory: Trajectory,
        stats: PPOStats,
        divergence: tuple[torch.Tensor, torch.Tensor],
        tokens_per_second: tuple[float, float],
        added: dict[str, float],
    ) -> None: ...

    def save(self, epoch: int, *, is_last: bool) -> None: ...

    def save_step(self, step: int, *, is_last: bool) -> None:
        """Save the checkpoint after the ``step``-th rollout of the run and what is learned from it."""

    def learning_rate(self) -> float: ...


class PPOLoop:
    """Trains policy and value model. With adaptive batching off it does what stock's loop does, operation by operation.

    Steps of ``run`` are rollouts. Without ``growth`` the batches are stock's. Memory is limited for training, in the
    context of ``limited``; checkpoints are saved outside of it, every ``save_every`` rollouts or, if that is None, at
    the end of each epoch.
    """

    def __init__(
        self,
        host: Host,
        stock: StockPPO,
        run: StockRun,
        outlet: PPOOutlet,
        rollout: Rollout,
        learning: Learning,
        growth: Growth | None = None,
        *,
        watchers: Sequence[Watcher] = (),
        limited: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        save_every: int | None = None,
    ) -> None:
        self._host = host
        self._stock = stock
        self._run = run
        self._outlet = outlet
        self._rollout = rollout
        self._learning = learning
        self._growth = growth
        self._watchers = watchers
        self._limited = limited
        self._save_every = save_every
        self.rollouts = run.first_step

    def run(self) -> None:
        """Train until the trajectories of the config are used up, and save checkpoints."""
        host, run = self._host, self._run
        if not host.steps_in_backward:
            for optimizer in host.optimizers:
                optimizer.zero_grad()
        run.profiler.start()
        with tqdm(initial=self.rollouts, dynamic_ncols=True) as progress:
            for epoch in range(run.first_epoch, run.epochs):
                self._start_epoch(epoch)
                progress.total = self._total_rollouts
                training_of_epoch = self._run_epoch(epoch, progress)
                is_over = False
                while not is_over:
                    with self._limited():
                        is_over = next(training_of_epoch, True)
                    self._outlet.note_rollouts(epochs_run=epoch + is_over, rollouts=self.rollouts)
                    is_last = is_over and self._is_over(epoch)
                    self._save_if_due(epoch, is_last=is_last)
                if is_last:
                    break
        run.profiler.stop()

    def _save_if_due(self, epoch: int, *, is_last: bool) -> None:
        by_steps = self._save_every is not None
        if by_steps and not is_last and not self._is_step_to_save:
            return
        with contextlib.nullcontext() if self._growth is None else self._growth.unscaled():
            if by_steps:
                self._outlet.save_step(self.rollouts, is_last=is_last)
            else:
                self._outlet.save(epoch, is_last=is_last)

    @property
    def _is_step_to_save(self) -> bool:
        return self._save_every is not None and self.rollouts % self._save_every == 0

    @property
    def _total_rollouts(self) -> int:
        """Rollouts of the whole run, if the size does not change any more."""
        growth = self._growth
        return self._stock.total_rollouts if growth is None else self.rollouts + growth.course.steps_left()

    def _is_over(self, epoch: int) -> bool:
        if self._growth is None:
            return self.rollouts == self._stock.total_rollouts
        return self._growth.course.run_is_over or epoch + 1 == self._run.epochs

    def _start_epoch(self, epoch: int) -> None:
        if self._growth is None:
            return
        decision = self._growth.start_epoch(epoch)
        if decision is None:
            return
        expected = self._growth.course.expected()
        for watcher in self._watchers:
            watcher.epoch(
                epoch=epoch, step=self.rollouts, batch_size=decision.batch_size,
                global_batch_size=self._growth.global_batch_size, steps=expected.steps, samples=expected.samples,
                dropped_samples=expected.dropped_samples, reason=decision.reason,
            )  # fmt: skip

    def _run_epoch(self, epoch: int, progress: Any) -> Iterator[bool]:
        """Train an epoch; yield False where a checkpoint within it is due."""
        host, run, growth = self._host, self._run, self._growth
        host.loader.sampler.set_epoch(epoch)
        if growth is not None and growth.course.epoch_is_over:
            return  # what is left of the run's trajectories is less than a batch
        for index, samples in enumerate(host.loader if growth is None else growth.batches()):
            with recorded_memory(run.memory_history, epoch, index):
                size_has_changed = self._run_batch(epoch, samples)
                if size_has_changed:
                    progress.total = self._total_rollouts
                progress.update(1)
            run.profiler.step()
            if growth.course.epoch_is_over if growth is not None else self._is_over(epoch):
                break
            if self._is_step_to_save:
                yield False

    def _run_batch(self, epoch: int, samples: list[Sample]) -> bool:
        """Generate and learn; return True if batches have another size from now on."""
        stock, growth = self._stock, self._growth
        prompts = without_waiting(self._host.loader.collate(samples)["tokens"], self._host.device)  # [b, s]
        start = time.perf_counter()
        trajectory = self._rollout.run(samples, prompts)
        of_rollout = time.perf_counter() - start
        advantages, returns, *divergence = stock.judge(trajectory)
        start = time.perf_counter()
        numbers = [index_of(sample) for sample in samples]
        stats = self._learning.run(Experience(trajectory, advantages, returns, prompts.shape[1], numbers))
        of_learning = time.perf_counter() - start
        if growth is not None:
            growth.take_step(torch.tensor(prompts.numel()))
        self.rollouts += 1
        self._outlet.global_step += len(stats)
        self._outlet.note_rollouts(epochs_run=epoch, rollouts=self.rollouts)
        of_all = PPOStats(*map(torch.stack, zip(*stats, strict=True)))
        recoveries = self._rollout.num_recoveries + self._learning.num_recoveries
        if self.rollouts % self._run.log_every == 0:
            added: dict[str, float] = {}
            if growth is not None:
                added = {**growth.metrics(), "ppo_batch_size_samples": len(samples) // stock.sizes.steps}
            if growth is not None or recoveries:
                added["out_of_memory_recoveries"] = recoveries
            tokens_per_second = prompts.numel() / of_rollout, prompts.numel() / of_learning
            self._outlet.log_rollout(trajectory, of_all, (divergence[0], divergence[1]), tokens_per_second, added)
        if growth is None and not self._watchers:
            return False
        return self._tell(epoch, len(samples), float(of_all.loss.mean()), of_rollout + of_learning, recoveries)

    def _tell(self, epoch: int, num_samples: int, loss: float, seconds: float, recoveries: int) -> bool:
        """Have watchers and growth take note of a rollout; return True if batches have another size from now on."""
        for watcher in self._watchers:
            watcher.step(epoch, self.rollouts, num_samples, loss, self._outlet.learning_rate(), recoveries)
        decision = None if self._growth is None else self._growth.record_step(loss, seconds, self._learning.ran)
        if self._growth is None or decision is None or decision.batch_size == decision.previous:
            return False
        for watcher in self._watchers:
            watcher.change(
                epoch=decision.epoch, batch_size=decision.batch_size,
                global_batch_size=self._growth.global_batch_size, step=self.rollouts, reason=decision.reason,
            )  # fmt: skip
        return True
