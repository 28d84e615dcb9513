"""Rollouts: the trajectories of a batch of prompts, generated in parts that fit, with the numbers that stock draws."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from unittest import mock

import torch
from torch import nn
from torchtune.generation import _generation
from torchtune.rlhf import Trajectory

from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._torchtune.ppo.stock_ppo import StockPPO
from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.train.recipe_work import MicroBatch, RecipeWork


class RolloutWork(RecipeWork[range, Trajectory]):
    """Generates the trajectories of a batch of prompts, in parts that change no sample that is drawn.

    A part has at most ``most_rows``, which a probe has found; None for the config's rows.
    """

    def __init__(
        self,
        host: Host,
        stock: StockPPO,
        find_batch_dependent_module: Callable[[], str | None],
        most_rows: int | None,
        limit: TokenLimit,
    ) -> None:
        super().__init__(host, find_batch_dependent_module)
        self._stock, self._most_rows, self.limit = stock, most_rows, limit

    def see(self, samples: Sequence[Sample], prompts: torch.Tensor) -> None:
        """Take note of the batch that rows are of."""
        stock = self._stock
        self._samples, self._prompts = samples, prompts
        self._length = prompts.shape[1] + stock.max_generated_tokens
        self._chunk = min(stock.rollout_rows, len(prompts))
        self.draws = RolloutRandomNumbers(
            stock.rng, len(prompts), self._chunk, stock.max_generated_tokens, stock.vocabulary
        )

    def split(self, samples: range) -> Iterator[list[MicroBatch]]:
        """Yield one part of the rows that are left; parts are as even as can be."""
        most = self.limit.samples(self._length, self._most_rows or self._chunk)
        # Within a chunk no draw is made twice.
        left = (self.draws.end_of_chunk(samples.start) if most <= self._chunk else samples.stop) - samples.start
        num_parts = -(-left // most)
        rows = samples[: -(-left // num_parts)]
        self._start = rows.start
        prompts = list(self._samples[rows.start : rows.stop])
        yield [MicroBatch(prompts, len(rows) * self._length, longest=max(map(self.length, prompts)))]

    def runs(self, parts: Sequence[MicroBatch]) -> list[Callable[[], Trajectory]]:
        return [partial(self._generate, self._start, self._start + len(part.samples)) for part in parts]

    def _generate(self, start: int, end: int) -> Trajectory:
        with self.draws.for_rows(start, end):
            return self._stock.generate(self._prompts[start:end])

    def parameters(self) -> list[nn.Parameter]:
        return []

    def forget(self) -> None:
        self._stock.forget()


class Rollout:
    """The trajectories of a batch of prompts; a part that runs out of memory runs again in smaller ones."""

    def __init__(self, work: RolloutWork, runner: StepRunner[range, MicroBatch, Trajectory]) -> None:
        self._work, self.runner = work, runner

    def run(self, samples: Sequence[Sample], prompts: torch.Tensor) -> Trajectory:
        """Return a trajectory, without attention masks, for each of ``prompts``, [b, s] and padded on the left.

        DoesNotFitError if the trajectory of a single prompt does not fit.
        """
        self._work.see(samples, prompts)
        rows, trajectories = range(len(prompts)), list[Trajectory]()
        while rows:
            [(part, trajectory)] = self.runner.run(rows)
            trajectories.append(trajectory)
            rows = rows[len(part.samples) :]
        self._work.draws.finish()
        self.runner.end_step()
        return Trajectory(*map(torch.cat, zip(*trajectories, strict=True)))


class RolloutRandomNumbers:
    """Has any rows of a batch sampled with the numbers that stock draws for them.

    Stock generates a batch in chunks, one after the other, and draws a number for each row of a chunk and each piece of
    the vocabulary, token by token. So the numbers of a row depend on the chunk that it is in, and on all chunks before.
    A part that is no such chunk draws for the whole of each chunk that it has rows of, and takes its own.

    A chunk has ``chunk`` rows, the last one maybe fewer, and ``tokens`` draws of ``vocabulary`` numbers for each row:
    stock passes no stop tokens to ``generate``, so it never stops early.
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
    def for_rows(self, start: int, end: int) -> Iterator[None]:
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
