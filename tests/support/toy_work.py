"""A computation of nothing in particular, for tests of what runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from adaptive_batching._ranks.agree import ALONE, Ranks
from adaptive_batching._ranks.fsdp import MicroBatchCollectives
from adaptive_batching._step.data_parallel import DataParallel
from adaptive_batching._step.failed_part import Words
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.runner import Outcome, StepRunner
from adaptive_batching._step.work import Part, Work


class ToyWork(Work[list[int], Part, Any]):
    """Runs numbers, which are their own lengths, by a function, in the fewest parts within the limit."""

    def __init__(
        self,
        run: Callable[[Sequence[int]], Any] = list,
        discard: Callable[[], None] = lambda: None,
        device: torch.device | None = None,
    ) -> None:
        self.run, self.forget, self.device = run, discard, device  # type: ignore[method-assign]
        self.trained: list[nn.Parameter] = []
        self.limit = TokenLimit()

    def parameters(self) -> list[nn.Parameter]:
        return self.trained

    def split(self, samples: list[int]) -> Iterator[list[Part]]:
        longest = max(samples, default=1)
        most = len(samples) if self.limit.max_tokens is None else max(self.limit.max_tokens // longest, 1)
        parts = [samples[at : at + most] for at in range(0, len(samples), most)] if samples else []
        yield [Part(part, len(part) * max(part), longest=max(part)) for part in parts]

    def runs(self, parts: Sequence[Part]) -> list[Callable[[], Any]]:
        return [lambda part=part: self.run(part.samples) for part in parts]  # type: ignore[misc]

    def filler(self) -> Part:
        return Part([1], 1, weight=0)

    def as_batch(self, lists: Sequence[list[int]]) -> list[Part]:
        return [Part(samples, self.tokens(samples), longest=max(samples)) for samples in lists]

    def tokens(self, samples: list[int]) -> int:
        return len(samples) * max(samples)

    def length(self, sample: int) -> int:
        return sample

    def words(self) -> Words:
        return Words("train less")


def run_parts(
    runs: Sequence[Callable[[], Any]],
    ranks: Ranks = ALONE,
    collectives: MicroBatchCollectives | None = None,
    discard: Callable[[], None] = lambda: None,
) -> Outcome[Any]:
    """Run parts once; ``discard`` is called where what they leave behind is dropped."""
    work = ToyWork(discard=discard)
    roots = [] if collectives is None else [nn.Linear(1, 1)]
    parallel = DataParallel(ranks, work.parameters, roots, collectives=collectives)
    return StepRunner(work, parallel).run_once(runs)
