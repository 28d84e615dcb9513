"""The data of a trainer's run: how much there is, and which samples are the longest and the shortest."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, RandomSampler

from adaptive_batching._loop.samples import collated
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._snapshot import Snapshot
from adaptive_batching._transformers.handed_out import (
    PairLength,
    Sample,
    count_numbers,
    handing_out_samples,
    has_decoder,
    length_function,
    reading,
    without_left_out,
)
from adaptive_batching._transformers.refusals import check_loader

_TO_MEASURE = 32  # samples of which some are run to know the loss
_LISTED = 10_000  # batches of an epoch, from which some are taken
_OF_BATCH = 8  # samples of such a batch that are read
_LIBRARIES = ("torch", "transformers", "accelerate", "trl")


class Extremes(NamedTuple):
    """The longest and the shortest sample. If lengths are unknown: those of most and of fewest numbers among some."""

    tokens: int  # of the longest; 1 if they are unknown
    mean_tokens: float
    longest: Sample
    shortest: Sample


class TrainingData:
    """The samples of a loader that trains, read one by one; random numbers stay as they are.

    ``before`` is that of an earlier run, whose extremes are these if it has read the same.

    Raises:
        ConfigError: If the loader cannot be used; ``resizes`` if its batches are to have another size.
    """

    def __init__(self, trainer: Any, loader: Any, *, resizes: bool, before: TrainingData | None = None) -> None:
        self.loader = loader
        self._trainer, self._read = trainer, (trainer.train_dataset, trainer.data_collator)
        self.samplers = check_loader(trainer, loader, int(trainer.args.per_device_train_batch_size), resizes=resizes)
        """Of batches, each of which is told their size."""

        self.num_samples = self._drawn()
        """Samples that all devices draw in an epoch, which may be others than the data has."""

        with reading(loader.dataset, trainer.args.device):
            count = len(loader.dataset)
            few = min(count, _TO_MEASURE)
            some = [self._sample(number * count // few) for number in range(few)]
            self.some = without_left_out(some, trainer.data_collator)
            """Samples from all of the data."""

            self.length = self._length_function(self.some[0])
            """Tokens of a sample; None if they are unknown, as of images."""

        self._extremes: Extremes | None = None
        if before is not None and all(map(operator.is_, before._read, self._read)):
            self._extremes = before._extremes

    @property
    def extremes(self) -> Extremes:
        """The longest and the shortest sample, for which all are read once."""
        if self._extremes is None:
            with reading(self.loader.dataset, self._trainer.args.device):
                self._extremes = self._find_extremes()
        return self._extremes

    @property
    def draws_from_all(self) -> bool:
        """True if each batch has samples from all of the data, whatever their kind."""
        sampler = getattr(self.samplers[-1], "sampler", None)
        return type(self.samplers[-1]) is BatchSampler and type(sampler) in (RandomSampler, SeedableRandomSampler)

    @property
    def has_own_sampler(self) -> bool:
        """True if somebody's own sampler makes the batches, which may know what kind of sample goes with which."""
        samplers = [*self.samplers, getattr(self.samplers[-1], "sampler", None)]
        return any(type(each).__module__.partition(".")[0] not in _LIBRARIES for each in samplers if each is not None)

    def some_batches(self, ranks: Ranks, most: int) -> list[list[Sample]]:
        """Return a few samples of each of some batches, as samplers make them, from all of an epoch and all ranks."""
        samplers = [*self.samplers, getattr(self.samplers[-1], "sampler", None)]
        with reading(self.loader.dataset, self._trainer.args.device):
            before = Snapshot(samplers)
            batches = list(itertools.islice(self.samplers[0], _LISTED))
            before.put_back()
            own = [batches[number * len(batches) // most][:_OF_BATCH] for number in range(min(most, len(batches)))]
            made = [[self._sample(index) for index in batch] for of_rank in ranks.gather(own) for batch in of_rank]
            return [without_left_out(batch, self._trainer.data_collator) for batch in made]

    def set_batch_size(self, size: int) -> None:
        for sampler in self.samplers:
            sampler.batch_size = size
        self._trainer._train_batch_size = size

    def num_batches(self, size: int) -> int:
        """Return the batches of an epoch on a device; the loader then has this size."""
        self.set_batch_size(size)
        return max(len(self.loader), 1)

    def _drawn(self) -> int:
        innermost, is_shared = self.samplers[-1], len(self.samplers) > 1
        sampler: Any = getattr(innermost, "sampler", None)
        if not hasattr(sampler, "__len__"):
            return len(self.loader.dataset)
        return len(sampler) * (1 if is_shared else int(self._trainer.args.world_size))

    def _sample(self, index: int) -> Sample:
        of_samples = handing_out_samples(self.loader, self._trainer.data_collator)
        return of_samples.collate_fn([self.loader.dataset[index]]).features[0]

    def _length_function(self, sample: Sample) -> Callable[[Sample], int] | None:
        trainer = self._trainer
        targets = has_decoder(trainer.model)
        length = length_function(sample, getattr(trainer.data_collator, "max_length", None), targets=targets)
        if length is not None and targets and {"input_ids", "labels"} <= sample.keys():
            return PairLength(self.loader.dataset, self._sample)
        return length

    def _find_extremes(self) -> Extremes:
        data, length, collator = self.loader.dataset, self.length, self._trainer.data_collator
        if length is None:
            some = [self._sample(index) for index in range(min(len(data), _TO_MEASURE))]
            some = without_left_out(some, collator)
            by_size = sorted(some, key=lambda sample: count_numbers(collated([sample], collator)))
            return Extremes(1, 1.0, by_size[-1], by_size[0])
        by_length = sorted((length(data[index]), index) for index in range(len(data)))
        mean = sum(tokens for tokens, _ in by_length) / len(by_length)
        (tokens, longest), (_, shortest) = self._first_kept(reversed(by_length)), self._first_kept(by_length)
        extremes = Extremes(tokens, mean, longest, shortest)
        if isinstance(length, PairLength):
            extremes = extremes._replace(tokens=length(length.longest), longest=length.longest)
        return extremes

    def _first_kept(self, by_length: Iterable[tuple[int, int]]) -> tuple[int, Sample]:
        """Return the first sample that the collate function does not leave out, after its length."""
        for tokens, index in by_length:
            sample = self._sample(index)
            if without_left_out([sample, self.some[0]], self._trainer.data_collator)[0] is sample:
                return tokens, sample
        raise AssertionError("some samples are kept")
