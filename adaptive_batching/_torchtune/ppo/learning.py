"""Optimizer steps on a batch of trajectories, each run again in smaller parts if it runs out of memory."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torchtune.rlhf import PPOStats

from adaptive_batching._micro_batches.run import Outcome
from adaptive_batching._torchtune.cutting import Cutter, MicroBatch, Recovery
from adaptive_batching._torchtune.data import Sample
from adaptive_batching._torchtune.gradients import apply_gradients, gather_gradients
from adaptive_batching._torchtune.host import Host
from adaptive_batching._torchtune.objective import Sums
from adaptive_batching._torchtune.ppo.stock_ppo import Sizes
from adaptive_batching._torchtune.ppo.trajectories import Experience, Trajectories, stats_of


class Learning:
    """Takes the optimizer steps of a batch; with ``counts_retries`` notices when the allocator empties its cache."""

    def __init__(
        self,
        host: Host,
        objective: Trajectories,
        sizes: Sizes,
        cutter: Cutter,
        recovery: Recovery,
        *,
        counts_retries: bool,
    ) -> None:
        self._host = host
        self._objective = objective
        self._sizes = sizes
        self._cutter = cutter
        self._recovery = recovery
        self._counts_retries = counts_retries
        self.ran: list[MicroBatch] = []
        """Micro-batches of the last batch of trajectories."""

    @property
    def num_recoveries(self) -> int:
        return self._recovery.num_recoveries

    def run(self, experience: Experience) -> list[PPOStats]:
        """Take all optimizer steps, in stock's order; DoesNotFitError if a single trajectory does not fit."""
        self._objective.see(experience)
        self.ran = []
        num_rows = len(experience.advantages)
        in_step, in_backward = num_rows // self._sizes.steps, num_rows // self._sizes.parts
        stats = []
        for _ in range(self._sizes.epochs):
            order = torch.randperm(num_rows, device=self._host.device).tolist()
            for first in range(0, num_rows, in_step):
                starts = range(first, first + in_step, in_backward)
                stats.append(self._step([self._objective.rows(order[at : at + in_backward]) for at in starts]))
        return stats

    def _step(self, batches: list[list[Sample]]) -> PPOStats:
        self._recovery.start()
        ran = self._recovery.run_until_fits(lambda again: self._gather(batches))
        sums = reduce(operator.add, [each for _, outcome in ran for each in outcome.results])
        self.ran += [micro_batch for micro_batches, _ in ran for micro_batch in micro_batches]
        with self._recovery.fatal():
            apply_gradients(self._host, sums)
        self._cutter.read_timings()
        self._recovery.end_step()
        return stats_of(sums)

    def _gather(self, batches: list[list[Sample]]) -> Iterator[tuple[Sequence[MicroBatch], Outcome[Sums]]]:
        """Run each backward pass."""
        for batch in batches:
            micro_batches = self._cutter.cut(batch)
            outcome = gather_gradients(
                self._host, micro_batches, self._cutter.timed, counts_retries=self._counts_retries
            )
            if outcome.failed:
                self._cutter.forget_timings()
            yield micro_batches, outcome
