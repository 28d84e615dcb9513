"""Random numbers of a rollout: those of stock, whatever the parts that it runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torchtune.generation import _generation


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
        self._starts = [rng.get_state()]

    def end_of_chunk(self, row: int) -> int:
        """Return the row after the last one of the chunk that ``row`` is in."""
        return min((row // self._chunk + 1) * self._chunk, self._num_rows)

    @contextlib.contextmanager
    def of(self, start: int, end: int) -> Iterator[None]:
        """Have a rollout of rows ``start`` to ``end`` inside draw their numbers."""
        first, last = start // self._chunk, (end - 1) // self._chunk
        if start == first * self._chunk and end == self.end_of_chunk(start):
            self._rng.set_state(self._start_of(first))
            yield
            self._note_start(first + 1, self._rng)
            return
        generators = [self._generator(number) for number in range(first, last + 1)]
        before = start - first * self._chunk

        def noise() -> torch.Tensor:
            drawn = [self._draw(generator, number) for number, generator in enumerate(generators, first)]
            return torch.cat(drawn)[before : before + end - start]

        with sampling_with(noise):
            yield
        for number, generator in enumerate(generators, first + 1):
            self._note_start(number, generator)

    def finish(self) -> None:
        """Leave the generator where the whole batch leaves it in stock."""
        self._rng.set_state(self._start_of(-(-self._num_rows // self._chunk)))

    def _start_of(self, number: int) -> torch.Tensor:
        """Return the generator's state at the beginning of a chunk."""
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


@contextlib.contextmanager
def sampling_with(noise: Callable[[], torch.Tensor]) -> Iterator[None]:
    """Have torchtune sample each next token with ``noise()``, [b, vocabulary], in place of what it has drawn."""
    sample = _generation.generate_next_token

    def with_noise(*args: object, q: object = None, **kwargs: object) -> object:
        return sample(*args, q=noise(), **kwargs)

    with mock.patch.object(_generation, "generate_next_token", with_noise):
        yield
