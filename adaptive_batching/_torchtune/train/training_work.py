"""Forward and backward of the batches of an optimizer step: how they are split, and what watches them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from adaptive_batching import _state
from adaptive_batching._memory.caching_allocator import num_allocation_retries
from adaptive_batching._torchtune.stock.data import Sample
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.objective import Sums
from adaptive_batching._torchtune.train.recipe_work import RecipeWork, runs_of
from adaptive_batching._torchtune.train.splitting import MicroBatch, Splitter, size_of_gradients


class TrainingWork(RecipeWork[list[list[Sample]], Sums]):
    """Forward and backward of the batches of an optimizer step.

    With ``together`` the samples of all batches are sorted and split together.
    """

    def __init__(
        self,
        host: Host,
        splitter: Splitter,
        find_batch_dependent_module: Callable[[], str | None] = lambda: None,
        *,
        together: bool = False,
    ) -> None:
        super().__init__(host, find_batch_dependent_module)
        self.splitter, self.together, self.limit = splitter, together, splitter.limit
        self._last: list[Sample] = []  # batch that was split

    def begin(self) -> None:
        super().begin()
        self.splitter.begin_step()

    def split(self, groups: Sequence[list[list[Sample]]]) -> Iterator[list[MicroBatch]]:
        batches = [batch for group in groups for batch in group]
        self._last = batches[0]
        if self.together:
            yield self.splitter.split_together(batches)
        else:
            for self._last in batches:
                yield self.splitter.split(self._last)

    def tokens(self, samples: list[Sample]) -> int:
        return self.splitter.tokens(samples)

    def may_differ(self, parts: Sequence[MicroBatch]) -> bool:
        return self.splitter.may_differ

    def filler(self) -> MicroBatch:
        return self.splitter.filler(self._last)

    def compared(self, parts: Sequence[MicroBatch]) -> list[list[Sample]]:
        counts = self._host.objective.counts
        lists = [[sample for sample in part.samples if counts([sample]).terms] for part in parts if part.weight]
        return [samples for samples in lists if samples]

    def as_batch(self, lists: Sequence[list[Sample]]) -> list[MicroBatch]:
        return self.splitter.weighted(list(lists))

    def runs(self, parts: Sequence[MicroBatch]) -> list[Callable[[], Sums]]:
        return runs_of(self._host, parts, self._around)

    @contextlib.contextmanager
    def _around(self, part: MicroBatch) -> Iterator[None]:
        with contextlib.nullcontext() if _state.rehearsing else self.splitter.timed(part):  # as in an audit
            yield

    def num_retries(self) -> int:
        return num_allocation_retries(self._host.device)

    def put_back(self) -> None:
        super().put_back()
        self.splitter.timer.forget()

    def shorter(self, part: MicroBatch) -> str:
        is_split = self._host.steps_in_backward and self.splitter.limit.learned is not None
        held = f", on top of {size_of_gradients(self._host)} of gradients that a split batch has to hold"
        return f"{held if is_split else ''}{super().shorter(part)}"

    def price_of_parts(self) -> str:
        if not self._host.steps_in_backward:
            return ""
        return f", which holds {size_of_gradients(self._host)} of gradients until the last of them"
