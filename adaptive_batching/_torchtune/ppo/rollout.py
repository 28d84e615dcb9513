"""Rollouts: trajectories for a batch of prompts, in parts that fit, which change no sample that is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torchtune.rlhf import Trajectory

from adaptive_batching._memory import release_cached_memory
from adaptive_batching._micro_batches.limits import TokenLimit
from adaptive_batching._micro_batches.run import Outcome, run_micro_batches
from adaptive_batching._torchtune.cutting import MicroBatch, Recovery
from adaptive_batching._torchtune.data import Sample
from adaptive_batching._torchtune.host import Host
from adaptive_batching._torchtune.ppo.draws import Draws
from adaptive_batching._torchtune.ppo.stock_ppo import StockPPO


class Rollout:
    """Generates the trajectories of a batch.

    A part that runs out of memory runs again in smaller ones; those before it stand. ``limit`` is in padded tokens of a
    forward, responses included, and lowered then; ``most_rows`` is what a probe has found, None for the config's rows.
    """

    def __init__(
        self, host: Host, stock: StockPPO, limit: TokenLimit, recovery: Recovery, most_rows: int | None = None
    ) -> None:
        self._host = host
        self._stock = stock
        self._limit = limit
        self._recovery = recovery
        self._most_rows = most_rows

    @property
    def num_recoveries(self) -> int:
        return self._recovery.num_recoveries

    def run(self, samples: Sequence[Sample], prompts: torch.Tensor) -> Trajectory:
        """Return a trajectory, without attention masks, for each of ``prompts``, [b, s] and padded on the left.

        DoesNotFitError if the trajectory of a single prompt does not fit.
        """
        stock, num_rows = self._stock, len(prompts)
        length = prompts.shape[1] + stock.max_generated_tokens
        chunk = min(stock.sizes.rollout_rows, num_rows)
        draws = Draws(stock.rng, num_rows, chunk, stock.max_generated_tokens, stock.vocabulary)
        parts: list[Trajectory] = []
        start = 0

        def attempt(again: bool) -> list[tuple[Sequence[MicroBatch], Outcome[Trajectory]]]:
            end = self._end_of(start, draws, num_rows, chunk, length)
            part = [MicroBatch(list(samples[start:end]), (end - start) * length)]
            run = partial(self._generate, prompts[start:end], draws, start)
            return [(part, run_micro_batches([run], self._host.ranks, None, self._discard))]

        while start < num_rows:
            self._recovery.start()
            [([part], outcome)] = self._recovery.run_until_fits(attempt)
            parts += outcome.results
            start += len(part.samples)
        draws.finish()
        self._recovery.end_step()
        return Trajectory(*map(torch.cat, zip(*parts, strict=True)))

    def _end_of(self, start: int, draws: Draws, num_rows: int, chunk: int, length: int) -> int:
        """Return the row after the last one of the part that begins with ``start``; parts are as even as can be."""
        most = self._most_rows or chunk
        if self._limit.max_tokens is not None:
            most = max(min(most, self._limit.max_tokens // length), 1)
        # Within a chunk no draw is made twice.
        left = (draws.end_of_chunk(start) if most <= chunk else num_rows) - start
        num_parts = -(-left // most)
        return start + -(-left // num_parts)

    def _generate(self, prompts: torch.Tensor, draws: Draws, start: int) -> Trajectory:
        with draws.of(start, start + len(prompts)):
            return self._stock.generate(prompts)

    def _discard(self) -> None:
        self._stock.forget()
        release_cached_memory(self._host.device)
