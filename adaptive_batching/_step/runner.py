"""How a step runs, fails and runs again, on one rank and on many: the only place where samples run again."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch

from adaptive_batching._device import RandomState
from adaptive_batching._memory.caching_allocator import BYTES_IN_USE, allocator_advice, counted
from adaptive_batching._memory.out_of_memory import forget_frames, is_out_of_memory
from adaptive_batching._memory.shortage import LongerSample, StepStarts, cause_of, read_message
from adaptive_batching._memory.unused_memory import release_cached_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._ranks.agree import ALONE, is_lost_rank
from adaptive_batching._ranks.fsdp import CannotRecoverError, MicroBatchCollectives
from adaptive_batching._step import failed_part
from adaptive_batching._step.data_parallel import DataParallel
from adaptive_batching._step.failed_part import FailedPart, Words
from adaptive_batching._step.judge import Audit
from adaptive_batching._step.work import P, R, Samples, Work

T = TypeVar("T")

log = logging.getLogger(__name__)

# The allocator may have to start over when sizes change, and once more to settle; doing so step after step makes
# training crawl.
_RETRIES_IN_ROW_TO_SHRINK = 3
_RECOVERIES_IN_ROW_TO_WARN = 3
_MOST_REPORTED = 100  # recoveries that are kept for the record


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The outcome of running parts; ``failed`` and ``retried`` are the same on all ranks."""

    results: list[T]  # of the parts that ran on this rank
    failed: bool  # any rank ran out of memory
    retried: bool = False  # an allocator had to empty its cache to find room
    failed_here: int | None = None  # number of the part that ran out of memory on this rank, from 0
    error: Exception | None = None  # of that part, without tracebacks, which would keep its tensors alive

    def raise_if_failed(self) -> None:
        """Raise an out-of-memory error on every rank if one of them has run out of memory."""
        if self.failed:
            raise torch.OutOfMemoryError("out of memory on this rank or another") from self.error


class StepRunner(Generic[Samples, P, R]):
    """Runs the samples of a step in parts, and if one runs out of memory, all of them again, alike on every rank.

    :meth:`step` runs all samples of a step, such as an optimizer step or a forward of an evaluation. Where a step has
    several stages that stand once they have run, such as a rollout, each is a :meth:`run`, and :meth:`end_step` ends
    it. No sample is lost and none counts twice: what a failed attempt has left in gradients is dropped, and random
    numbers and all that forwards change are put back.

    If as many tokens have run before, memory may only have been scattered, or something else have taken some: the
    samples first run again as they were, and if that fails, with an eighth less. Otherwise they run with half. Where
    the allocator has had to empty its cache to find room in several steps in a row, later ones run with an eighth less;
    a step that runs again as it was counts as one of these.

    Args:
        work: The host's computation.
        parallel: Ranks that run their parts together.
        audit: Compares parts with their union now and then; None for what has no gradient.
        recovers: False to let nothing run again, and to say what would.
        largest_that_ran: Padded tokens of the largest forward that a probe has seen to fit.
    """

    def __init__(
        self,
        work: Work[Samples, P, R],
        parallel: DataParallel | None = None,
        *,
        audit: Audit | None = None,
        recovers: bool = True,
        largest_that_ran: int = 0,
    ) -> None:
        self.limit = work.limit
        self.limit.note(largest_that_ran)
        self._work = work
        self._parallel = DataParallel(ALONE, work.parameters) if parallel is None else parallel
        self._audit = audit
        self._recovers = recovers
        self._failures = 0  # how often the samples have run out of memory
        self._steps = 0  # that have ended
        self._recovered: collections.deque[tuple[str, int | None]] = collections.deque(maxlen=_MOST_REPORTED)
        self._shrank = self._ran_again = False  # since the last step ended
        self._retried: P | None = None  # a part of it whose allocator had to start over
        self._tokens_retried = 0
        self._retried_in_row = self._recovered_in_row = 0
        self._warned = False
        self._starts = StepStarts()
        self._longest_that_ran = 0  # tokens of a sample

    @property
    def num_recoveries(self) -> int:
        """Number of times that samples have had to run again."""
        return self.limit.num_recoveries

    def take_recovered(self) -> list[tuple[str, int | None]]:
        """Return what has run out of memory since the last call, in words, each with the limit after it."""
        recovered = [*self._recovered]
        self._recovered.clear()
        return recovered

    # The main path

    def step(self, samples: Samples) -> list[tuple[P, R]]:
        """Run the samples of a step, as :meth:`run` does, and let the limit rise if it was a clean one."""
        done = self.run(samples)
        self.end_step()
        return done

    def run(self, samples: Samples) -> list[tuple[P, R]]:
        """Run samples in parts that fit, all of them again if memory runs out; return the parts, each with its result.

        Raises:
            DoesNotFitError: If smaller parts are no way out.
            ConfigError: If parts do not add up to their union.
            Exception: Any other error of a part; an :class:`OtherRankError` repeats it on ranks that run along.
        """
        work, ranks, roots = self._work, self._parallel.ranks, self._parallel.roots
        state = work.state if self._recovers else None
        self._failures = 0
        if work.device is not None:
            self._starts.note(counted(work.device, BYTES_IN_USE))
        if state is not None:
            state.save()
        random_state = None if state is None or work.device is None else RandomState(work.device)
        done: list[tuple[P, R]] = []
        groups = iter(work.split(samples))
        while (parts := next(groups, None)) is not None:
            if ranks.size > 1:
                parts = self.filled_up(parts)
            if not parts:  # samples without anything to learn from
                continue
            # Ranks of a sharded model have as many parts, and decide alike; copies may not, and all have to look.
            is_split = len(parts) > 1 or (not roots and (ranks.size > 1 or work.rearranges))
            if self._audit is not None and is_split and self._audit.is_due(self._steps + 1, again=self._failures > 0):
                self._audit.look(work.compared(parts), self._run_as_batch)
            outcome = self.run_once(work.runs(parts))
            if outcome.failed:
                self._recover(parts, outcome)
                if random_state is not None:
                    random_state.put_back()
                done, groups = [], iter(work.split(samples))
                del outcome  # with results that take memory, which is short
                continue
            largest = max(parts, key=attrgetter("tokens"))
            self.limit.note(largest.tokens)
            self._longest_that_ran = max(self._longest_that_ran, max(parts, key=attrgetter("longest")).longest)
            if outcome.retried:
                self._note_retry(largest, len(largest.samples), largest.tokens)
            done += zip(parts, outcome.results, strict=True)
        if state is not None:
            state.end()
        return done

    def filled_up(self, parts: Sequence[P]) -> Sequence[P]:
        """Return ``parts`` and more without weight, so that a rank runs one, and under FSDP as many as every other."""
        most = len(parts)
        if not self._parallel.roots:
            most = max(most, 1) if self._parallel.ranks.size > 1 else most
        elif self._work.may_differ(parts):
            most = int(self._parallel.ranks.largest(most))
        return parts if len(parts) == most else [*parts, *(self._work.filler() for _ in range(most - len(parts)))]

    def run_once(self, runs: Sequence[Callable[[], T]]) -> Outcome[T]:
        """Run parts up to the first that runs out of memory on any rank, and drop all gradients then.

        Under FSDP, the rank that ran out of memory issues the collectives that its peers wait for, so that all come to
        the end of as many parts. Copies, as of DDP, communicate when all have run.

        Raises:
            CannotRecoverError: If what is left to issue is not known, or memory runs out again while it is issued.
            Exception: Any other error of a part; an :class:`OtherRankError` repeats it on all other ranks.
        """
        parallel, ranks, shards = self._parallel, self._parallel.agreeing, self._parallel.collectives
        results: list[T] = []
        failure: Exception | None = None
        broken: Exception | None = None  # an error of another kind, which waits until the other ranks can be told
        retries_before = self._work.num_retries()
        with parallel.without_sync():
            for number, run in enumerate(runs, 1):
                if shards is not None:
                    shards.start()
                try:
                    result = run()
                    if number == len(runs):
                        parallel.prepare_sum()
                    results.append(result)
                except Exception as error:
                    failure = error
                    if not is_out_of_memory(error):
                        if ranks.size == 1 or isinstance(error, CannotRecoverError) or is_lost_rank(error):
                            raise
                        broken = error
                if failure is not None:  # outside of "except", where the traceback would keep its tensors alive
                    if broken is None:
                        forget_frames(failure)
                    break
                if shards is not None:
                    shards.finish()
        try:
            if failure is not None:
                self._discard()
                if shards is not None:
                    _issue_the_rest(shards, len(runs) - len(results) - 1, failure)
            worst = 2 if failure is not None else 1 if self._work.num_retries() > retries_before else 0
            if ranks.size > 1:
                worst = int(ranks.largest(worst))
            if worst == 2:
                if shards is not None:
                    shards.reset()
                if shards is not None or failure is None:
                    # Also on the rank that failed: only now do the layers that it had gathered have their own
                    # parameters back, with the gradients of earlier parts.
                    self._discard()
                ranks.all_results(partial(_raise, broken))
        except Exception:
            if broken is not None:  # whatever has happened while the others were told
                raise broken from None
            raise
        return Outcome(results, worst == 2, worst == 1, len(results) if failure is not None else None, failure)

    def compare(self, one: list[Any], other: list[Any]) -> bool:
        """Audit two lists of samples before there is a step; see :meth:`Audit.compare`."""
        assert self._audit is not None
        return self._audit.compare(one, other, self._run_as_batch)

    def _run_as_batch(self, lists: Sequence[list[Any]]) -> float | None:
        """Leave the gradient of a batch that has these parts; return its number of losses, None if memory ran out."""
        parts = self.filled_up(self._work.as_batch(lists))
        outcome = self.run_once(self._work.runs(parts))
        return None if outcome.failed else self._work.number(outcome.results)

    def end_step(self) -> None:
        """Let the limit rise if all that has run since the last step was clean; warn where each step recovers."""
        if not self._shrank:
            self._retried_in_row = 0 if self._retried is None else self._retried_in_row + 1
            if self._retried is not None and self._retried_in_row == _RETRIES_IN_ROW_TO_SHRINK:
                self._retried_in_row = 0
                self._shrank = self._shrink_if_split(self._retried)
        if not self._shrank and not self._ran_again:
            self.limit.note_clean_step()
        self._shrank = self._ran_again = False
        self._retried, self._tokens_retried = None, 0
        self._steps += 1
        self._recovered_in_row = self._recovered_in_row + 1 if self._failures else 0
        if self._recovered_in_row == _RECOVERIES_IN_ROW_TO_WARN and not self._warned:
            self._warned = True
            log.warning(failed_part.in_every_step(self._work.words()))

    # Running out of memory

    def _recover(self, parts: Sequence[P], outcome: Outcome[R]) -> None:
        """Decide how samples run again of which a part ran out of memory, on this rank or another."""
        work, ranks, words = self._work, self._parallel.agreeing, self._work.words()
        part = None if outcome.failed_here is None else parts[outcome.failed_here]
        failed = None if part is None else work.failed(part)
        samples, tokens = (0, 0) if failed is None else (failed.samples, failed.tokens)
        fitted_before = ranks.all(self.limit.has_fitted(tokens) and self._failures < 2)
        as_they_were = fitted_before and self._failures == 0
        what = cause = why = None
        if part is not None and failed is not None:
            what = f"with {failed_part.describe(failed, words)}"
            if (cause := self._cause(part, failed, outcome.error)) is not None:
                what += f": {cause}"
            why = self._why_final(failed, words)
            if why is None and samples == 1 and not as_they_were:
                why = failed_part.single(failed, words, is_split=self.limit.learned is not None)
        if ranks.any(why is not None):
            if why is not None and cause is not None:
                why += f". Memory ran out because {cause}"
            raise DoesNotFitError(
                why or "out of memory on another rank, whose error says what would help"
            ) from outcome.error
        # The same limit everywhere: from the largest that has failed. The first rank says what has, on each.
        failures_of_ranks = ranks.gather(None if what is None else (tokens, what))
        failures = {rank: failure for rank, failure in enumerate(failures_of_ranks) if failure is not None}
        most_failed = max(tokens for tokens, _ in failures.values())
        if not as_they_were and (module := work.batch_dependent_module()) is not None:
            raise DoesNotFitError(failed_part.over_the_batch(module, words))
        self._failures += 1
        self._ran_again = True
        how = "unchanged"
        if as_they_were:
            self.limit.num_recoveries += 1
            self._note_retry(parts[0], samples, tokens)
        else:
            self.limit.shrink(most_failed, fitted_before=fitted_before)
            self._shrank = True
            how = failed_part.again_in_parts(failed, self.limit.max_tokens, work.failed(parts[0]).unit)
        on = ", ".join(what if ranks.size == 1 else f"on rank {rank} {what}" for rank, (_, what) in failures.items())
        log.warning(
            "out of memory %s; running %s again %s (recovery %d)", on, words.everything, how, self.num_recoveries
        )
        self._recovered.append((on, self.limit.max_tokens))
        work.put_back()
        if work.state is not None:
            work.state.put_back()

    def _why_final(self, failed: FailedPart, words: Words) -> str | None:
        """Return why a part does not run again, whatever its size; None if it may."""
        if failed.has_updated:
            return failed_part.after_update(failed, words)
        if not self._recovers:
            return failed_part.without_recovery(failed, words)
        if not self._parallel.agrees:
            return failed_part.without_the_others(failed, words, self._parallel.why_alone)
        return None

    def _cause(self, part: P, failed: FailedPart, error: Exception | None) -> str | None:
        """Say why memory ran out, where it is clear."""
        longer = None
        if 0 < self._longest_that_ran < part.longest and not self.limit.has_fitted(failed.tokens):
            longer = LongerSample(part.longest, self._longest_that_ran, failed.name)
        setting = None if self._work.device is None else allocator_advice(self._work.device)
        return cause_of(read_message(str(error)), self._starts, longer, setting)

    def _discard(self) -> None:
        """Drop what parts have left behind, gradients included, and really release its memory."""
        for parameter in self._work.parameters():
            parameter.grad = None
        self._work.forget()
        if self._work.device is not None:
            release_cached_memory(self._work.device)

    def _note_retry(self, part: P, samples: int, tokens: int) -> None:
        self._retried = part
        self._tokens_retried = max(self._tokens_retried, tokens if samples > 1 else 0)

    def _shrink_if_split(self, retried: P) -> bool:
        """Lower the limit, as the allocator empties its cache to find room in each step; False if nothing splits."""
        if not (self._recovers and self._parallel.agrees):
            return False
        tokens = int(self._parallel.ranks.largest(self._tokens_retried))
        if tokens == 0 or self._work.batch_dependent_module() is not None:
            return False  # there is nothing to split
        self.limit.lower(tokens)
        device, unit = self._work.device, self._work.failed(retried).unit
        advice = None if device is None else allocator_advice(device)
        more = "" if advice is None else f". Setting the environment variable {advice} may help"
        log.warning(
            "memory%s is so tight that every step empties the allocator's cache (num_alloc_retries); from now on a "
            "forward pass holds at most %d %s, an eighth less than the largest%s",
            "" if device is None else f" of {device}", self.limit.max_tokens, unit, more
        )  # fmt: skip
        return True


def _issue_the_rest(shards: MicroBatchCollectives, num_parts: int, failure: Exception) -> None:
    """Issue what other ranks wait for of the part that failed, and of ``num_parts`` after it."""
    if not shards.can_drain:
        raise CannotRecoverError(
            "memory ran out, and this rank cannot notify the others: the collectives of forward and backward passes "
            "vary, so what they wait for is unknown. Set a smaller batch_size or micro_batch_size, or sequences of "
            "one length (dataset.packed=True)"
        ) from failure
    again: Exception | None = None
    try:
        shards.drain(num_parts)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        again = error
    if again is not None:
        raise CannotRecoverError(
            "memory ran out, and again while notifying the other ranks, although this rank had released its memory: "
            "another process took it, or not even the smallest batch fits. Free the device, or set a smaller "
            "batch_size"
        ) from again


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
