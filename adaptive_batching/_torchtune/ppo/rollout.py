"""Rollouts: trajectories for a batch of prompts, in parts that fit, which change no sample that is drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from torchtune.generation import _generation
from torchtune.rlhf import Trajectory

from adaptive_batching._memory import release_cached_memory
from adaptive_batching._micro_batches.limits import TokenLimit
from adaptive_batching._micro_batches.run import Outcome, run_micro_batches
from adaptive_batching._torchtune.cutting import MicroBatch
from adaptive_batching._torchtune.data import Sample
from adaptive_batching._torchtune.host import Host
from adaptive_batching._torchtune.ppo.stock_ppo import StockPPO
from adaptive_batching._torchtune.recovery import Recovery


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
        self.recovery = recovery
        self._most_rows = most_rows

    def run(self, samples: Sequence[Sample], prompts: torch.Tensor) -> Trajectory:
        """Return a trajectory, without attention masks, for each of ``prompts``, [b, s] and padded on the left.

        DoesNotFitError if the trajectory of a single prompt does not fit.
        """
        stock, num_rows = self._stock, len(prompts)
        length = prompts.shape[1] + stock.max_generated_tokens
        chunk = min(stock.rollout_rows, num_rows)
        draws = Draws(stock.rng, num_rows, chunk, stock.max_generated_tokens, stock.vocabulary)
        parts: list[Trajectory] = []
        start = 0

        def attempt(again: bool) -> list[tuple[Sequence[MicroBatch], Outcome[Trajectory]]]:
            end = self._end_of(start, draws, num_rows, chunk, length)
            part = [MicroBatch(list(samples[start:end]), (end - start) * length)]

            def generate() -> Trajectory:
                with draws.of(start, end):
                    return stock.generate(prompts[start:end])

            return [(part, run_micro_batches([generate], self._host.ranks, None, self._discard))]

        while start < num_rows:
            self.recovery.start()
            [([part], outcome)] = self.recovery.run_until_fits(attempt)
            parts += outcome.results
            start += len(part.samples)
        draws.finish()
        self.recovery.end_step()
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

    def _discard(self) -> None:
        self._stock.forget()
        release_cached_memory(self._host.device)


class Draws:
    """Has any rows of a batch sampled with the numbers that stock draws for them.

    Stock generates a batch in chunks, one after the other, and draws a number for each row of a chunk and each piece of
    the vocabulary, token by token. So the numbers of a row depend on the chunk that it is in, and on all chunks before.
    A part that is no such chunk draws for the whole of each chunk that it has rows of, and takes its own.

    A chunk has ``chunk`` rows, the last one maybe fewer, and ``tokens`` draws of ``vocabulary`` numbers for each row.
    """

    def __init__(self, rng: torch.Generator, num_rows: int, chunk: int, tokens: int, vocabulary: int) -> None:
        self._rng = rng
        self._num_rows = num_rows
        self._chunk = chunk
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._starts = [rng.get_state()]  # of the generator, at the beginning of each chunk

    def end_of_chunk(self, row: int) -> int:
        """Return the row after the last one of the chunk that ``row`` is in."""
        return min((row // self._chunk + 1) * self._chunk, self._num_rows)

    @contextlib.contextmanager
    def of(self, start: int, end: int) -> Iterator[None]:
        """Have a rollout of rows ``start`` to ``end`` inside draw their numbers."""
        first, last = start // self._chunk, (end - 1) // self._chunk
        before = start - first * self._chunk
        if before == 0 and end == self.end_of_chunk(start):
            self._rng.set_state(self._start_of(first))
            yield
            self._note_start(first + 1, self._rng)
            return
        generators = [self._generator(number) for number in range(first, last + 1)]
        sample = _generation.generate_next_token

        def sample_with_own(*args: object, q: object = None, **kwargs: object) -> object:
            drawn = [self._draw(generator, number) for number, generator in enumerate(generators, first)]
            return sample(*args, q=torch.cat(drawn)[before : before + end - start], **kwargs)

        with mock.patch.object(_generation, "generate_next_token", sample_with_own):
            yield
        for number, generator in enumerate(generators, first + 1):
            self._note_start(number, generator)

    def finish(self) -> None:
        """Leave the generator where the whole batch leaves it in stock."""
        self._rng.set_state(self._start_of(-(-self._num_rows // self._chunk)))

    def _start_of(self, number: int) -> torch.Tensor:
        while len(self._starts) <= number:
            last = len(self._starts) - 1
            generator = self._generator(last)
            for _ in range(self._tokens):
                self._draw(generator, last)
            self._note_start(last + 1, generator)
        return self._starts[number]

    def _note_start(self, number: int, generator: torch.Generator) -> None:
        if number == len(self._starts):
            self._starts.append(generator.get_state())

    def _generator(self, number: int) -> torch.Generator:
        generator = torch.Generator(self._rng.device)
        generator.set_state(self._start_of(number))
        return generator

    def _draw(self, generator: torch.Generator, number: int) -> torch.Tensor:
        rows = self.end_of_chunk(number * self._chunk) - number * self._chunk
        # As torchtune's generate has it.
        return torch.empty((rows, self._vocabulary), device=generator.device).exponential_(1, generator=generator)
