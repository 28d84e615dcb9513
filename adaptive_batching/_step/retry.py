"""Retries after running out of memory: the only place where samples run again, as they were or in smaller parts."""

from __future__ import annotations

import collections
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch

from adaptive_batching._memory import allocator_advice, bytes_in_use
from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._ranks.agree import ALONE, Ranks
from adaptive_batching._shortage import LongerSample, StepStarts, cause_of, read_message
from adaptive_batching._step.limits import TokenLimit
from adaptive_batching._step.run import Outcome

log = logging.getLogger(__name__)

Part = TypeVar("Part")
T = TypeVar("T")

# The allocator may have to start over when sizes change, and once more to settle; doing so step after step makes
# training crawl.
_RETRIES_IN_ROW_TO_SHRINK = 3
_MOST_TOLD = 100  # recoveries that are kept for the record


class Retry(ABC, Generic[Part]):
    """Runs the samples of a step, or of a part of it, until they fit, alike on every rank.

    If as many tokens have run before, memory may only have been scattered, or something else have taken some: the
    samples first run again as they were, and if that fails, with an eighth less. Otherwise they run with half. Where
    the allocator has had to empty its cache to find room in several steps in a row, later ones run with an eighth less;
    a step that runs again as it was counts as one of these.

    ``limit`` knows what has run, before a resume as well; a probe has run ``largest_that_ran`` padded tokens. If not
    ``enabled``, nothing is lowered, and :meth:`why_never` has to say why nothing runs again.
    """

    what = "the step's samples"  # that run again, for messages

    def __init__(
        self,
        limit: TokenLimit,
        device: torch.device | None = None,
        ranks: Ranks = ALONE,
        *,
        enabled: bool = True,
        largest_that_ran: int = 0,
    ) -> None:
        limit.note(largest_that_ran)
        self.limit = limit
        self.failures = 0  # how often what runs now has run out of memory
        self._device = device
        self._ranks = ranks
        self._enabled = enabled
        self._unit = ""
        self._recovered: collections.deque[tuple[str, int | None]] = collections.deque(maxlen=_MOST_TOLD)
        self._shrank = self._retried = False
        self._tokens_retried = 0
        self._retried_in_row = 0
        self._starts = StepStarts()
        self._most_tokens_that_ran = 0  # of a single sample

    @abstractmethod
    def size(self, part: Part) -> tuple[int, int]:
        """Return the samples of a part, and its padded tokens."""

    @abstractmethod
    def describe(self, part: Part) -> str:
        """Return the size of a part in words: ``3 samples of up to 40 tokens``."""

    def unit(self, part: Part) -> str:
        return "padded tokens"

    def longest(self, part: Part) -> int | None:
        """Return the tokens of a part's longest sample; None if samples have no length."""
        return None

    def name_of_longest(self, part: Part) -> str:
        """Say which sample of a part is the longest: ``number 7 of dataset``; empty if that is not known."""
        return ""

    @abstractmethod
    def shorter(self, part: Part) -> str:
        """Say which it is, and what to do about a single sample that does not fit."""

    def smaller_batch(self) -> str:
        """Return what to do where parts do not add up to the whole."""
        return "use a smaller batch size"

    @abstractmethod
    def less_memory(self) -> str:
        """Return what takes less memory whatever the samples."""

    def why_never(self, part: Part) -> str | None:
        """Return why a part does not run again, whatever its size; None if it may."""
        return None

    def batch_dependent_module(self) -> str | None:
        """Name what computes over the batch, so that parts do not add up to it; None if nothing does."""
        return None

    def price_of_parts(self) -> str:
        """Return what running in parts costs, to follow what is said of it."""
        return ""

    def put_back(self) -> None:
        """Restore what parts change besides gradients, such as the state of random numbers."""

    def start(self) -> None:
        """Begin with the samples of a step, or of a part of it that can run again by itself."""
        self.failures = 0
        if self._device is not None:
            self._starts.note(bytes_in_use(self._device))

    def run_until_fits(
        self, attempt: Callable[[bool], Iterable[tuple[Sequence[Part], Outcome[T]]]]
    ) -> list[tuple[Sequence[Part], Outcome[T]]]:
        """Run ``attempt`` until nothing in it fails, and return what it has yielded then.

        It splits its samples within the limit, runs them in one go or several, and yields the parts and the outcome of
        each. It is told if it runs again, all that it has yielded being dropped. If smaller parts are no way out, that
        is a :class:`DoesNotFitError`.
        """
        again = False
        while True:
            done = []
            for parts, outcome in attempt(again):
                if outcome.failed:
                    break
                self.note(parts, outcome)
                done.append((parts, outcome))
            else:
                return done
            self.recover(parts, outcome)
            again = True

    def note(self, parts: Sequence[Part], outcome: Outcome[Any]) -> None:
        """Record parts that have run."""
        samples, tokens = max(map(self.size, parts), key=lambda size: size[1])
        self.limit.note(tokens)
        self._most_tokens_that_ran = max(self._most_tokens_that_ran, *(self.longest(part) or 0 for part in parts))
        if outcome.retried:
            self._unit = self.unit(parts[0])
            self._note_retry(samples, tokens)

    def recover(self, parts: Sequence[Part], outcome: Outcome[Any]) -> None:
        """Decide how samples run again of which a part ran out of memory, on this rank or another."""
        failed = None if outcome.failed_here is None else parts[outcome.failed_here]
        samples, tokens = (0, 0) if failed is None else self.size(failed)
        fitted_before = self._ranks.all(tokens <= self.limit.largest_that_ran and self.failures < 2)
        cause = None if failed is None else self._cause(failed, tokens, outcome.error)
        because = "" if cause is None else f": {cause}"
        why = None if failed is None else self.why_never(failed)
        if failed is not None and why is None and samples == 1 and not (fitted_before and self.failures == 0):
            why = f"out of memory with {self.describe(failed)}, which cannot be split{self.shorter(failed)}"
        if self._ranks.any(why is not None):
            if why is not None and cause is not None:
                why += f". Memory ran out because {cause}"
            raise DoesNotFitError(
                why or "out of memory on another rank, whose error says what would help"
            ) from outcome.error
        self._check_that_parts_add_up()
        # The same limit everywhere: from the largest that has failed. The first rank says what has, on each.
        found = self._ranks.gather(None if failed is None else (tokens, f"with {self.describe(failed)}{because}"))
        failures = {rank: each for rank, each in enumerate(found) if each is not None}
        self._unit = self.unit(parts[0])
        self.failures += 1
        how = "as they were"
        if fitted_before and self.failures == 1:
            self.limit.num_recoveries += 1
            self._note_retry(samples, tokens)
        else:
            self.limit.shrink(max(tokens for tokens, _ in failures.values()), fitted_before=fitted_before)
            self._shrank = True
            how = f"with at most {self.limit.max_tokens} {self._unit} per forward{self.price_of_parts()}"
        is_alone = self._ranks.size == 1
        on = ", ".join(on if is_alone else f"on rank {rank} {on}" for rank, (_, on) in failures.items())
        log.warning(
            "out of memory %s; running %s again %s (recovery %d)", on, self.what, how, self.limit.num_recoveries
        )
        self._recovered.append((on, self.limit.max_tokens))
        self.put_back()

    def _cause(self, failed: Part, tokens: int, error: Exception | None) -> str | None:
        """Say why memory ran out, where it is clear."""
        longest, longer = self.longest(failed) or 0, None
        if 0 < self._most_tokens_that_ran < longest and tokens > self.limit.largest_that_ran:
            longer = LongerSample(longest, self._most_tokens_that_ran, self.name_of_longest(failed))
        setting = None if self._device is None else allocator_advice(self._device)
        return cause_of(read_message(str(error)), self._starts, longer, setting)

    def take_recovered(self) -> list[tuple[str, int | None]]:
        """Return what has run out of memory since the last call, in words, each with the limit after it."""
        recovered = [*self._recovered]
        self._recovered.clear()
        return recovered

    def end_step(self) -> None:
        """Note that all samples of a step have run."""
        if not self._shrank and not self._shrink_if_thrashing():
            self.limit.note_clean_step()
        self._shrank = self._retried = False
        self._tokens_retried = 0

    def _note_retry(self, samples: int, tokens: int) -> None:
        self._retried = True
        self._tokens_retried = max(self._tokens_retried, tokens if samples > 1 else 0)

    def _check_that_parts_add_up(self) -> None:
        try:
            module = self.batch_dependent_module()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFitError(
                "out of memory, even in a forward of a few tokens; nothing larger will fit. To use less memory: "
                f"{self.less_memory()}"
            ) from error
        if module is not None:
            raise DoesNotFitError(
                f"out of memory, and splitting the batch would change the result: {module} computes over the batch; "
                f"{self.smaller_batch()}, or {self.less_memory()}"
            )

    def _shrink_if_thrashing(self) -> bool:
        """Lower the limit where the allocator empties its cache to find room, step after step; the step stands."""
        self._retried_in_row = self._retried_in_row + 1 if self._retried else 0
        if self._retried_in_row < _RETRIES_IN_ROW_TO_SHRINK:
            return False
        self._retried_in_row = 0
        if not self._enabled:
            return False
        tokens = int(self._ranks.largest(self._tokens_retried))
        if tokens == 0 or self.batch_dependent_module() is not None:
            return False  # there is nothing to split
        self.limit.lower(tokens)
        advice = None if self._device is None else allocator_advice(self._device)
        more = "" if advice is None else f". Setting the environment variable {advice} may help"
        log.warning(
            "memory%s is so tight that every step empties the allocator's cache (num_alloc_retries); from now on a "
            "forward holds at most %d %s, an eighth less than the largest%s",
            "" if self._device is None else f" of {self._device}", self.limit.max_tokens, self._unit, more
        )  # fmt: skip
        return True
