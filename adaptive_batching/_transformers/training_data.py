"""The data of a trainer's run: how much there is, and which samples are the longest and the shortest."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, RandomSampler

from adaptive_batching._loop.samples import collated
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._state import draws_put_back
from adaptive_batching._transformers.handed_out import (
    TARGETS,
    CollatedLength,
    PairLength,
    Sample,
    Samples,
    count_numbers,
    handing_out_samples,
    has_decoder,
    has_tokens,
    length_function,
    reading,
    without_left_out,
)
from adaptive_batching._transformers.refusals import check_loader

log = logging.getLogger(__name__)

_LONG = 1.0  # seconds of a search that a line tells of
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

    ``before``: data of an earlier run, whose extremes are reused if data set and collator are the same objects.
    ``longest_pair`` is known of a run that goes on.

    Raises:
        ConfigError: If the loader cannot be used; ``resizes`` if its batches are to have another size.
    """

    def __init__(
        self,
        trainer: Any,
        loader: Any,
        *,
        resizes: bool,
        before: TrainingData | None = None,
        longest_pair: tuple[int, int] | None = None,
    ) -> None:
        self.loader = loader
        self.loaders = [loader]
        """That one, and those made of it, to which a stream's batch size is told."""

        self._trainer, self._read = trainer, (trainer.train_dataset, trainer.data_collator)
        self.samplers = check_loader(trainer, loader, int(trainer.args.per_device_train_batch_size), resizes=resizes)
        """Of batches, each of which is told their size."""

        self._longest_pair = longest_pair
        self._rows: dict[int, Any] = {}  # some of the data, by their place

        with reading(self._data, trainer.args.device):
            rows = self._rows_to_measure(_TO_MEASURE)
            self.some = without_left_out(list(map(self._sample_of, rows)), trainer.data_collator)
            """Samples from all of the data."""

            self.length = self._length_function(self.some[0])
            """Tokens of a sample; None if they are unknown, as of images."""

        self._extremes: Extremes | None = None
        if before is not None and all(map(operator.is_, before._read, self._read)):
            self._extremes, self._longest_pair = before._extremes, before._longest_pair

    @property
    def _data(self) -> Any:
        return self.loader.dataset

    @property
    def num_samples(self) -> int:
        """Samples that all devices draw in an epoch, which may be others than the data has."""
        return self._drawn()

    def _rows_to_measure(self, most: int) -> list[Any]:
        """Return a few rows from all of the data."""
        count = len(self._data)
        few = min(count, most)
        self._rows |= {index: self._data[index] for index in (number * count // few for number in range(few))}
        return [*self._rows.values()]

    @property
    def extremes(self) -> Extremes:
        """The longest and the shortest sample, for which all are read once."""
        if self._extremes is None:
            with reading(self._data, self._trainer.args.device):
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
        with reading(self._data, self._trainer.args.device):
            with _kept(samplers):
                batches = list(itertools.islice(self.samplers[0], _LISTED))
            own = [batches[number * len(batches) // most][:_OF_BATCH] for number in range(min(most, len(batches)))]
            made = [[self._sample(index) for index in batch] for of_rank in ranks.gather(own) for batch in of_rank]
            return [without_left_out(batch, self._trainer.data_collator) for batch in made]

    def set_batch_size(self, size: int) -> None:
        for sampler in self.samplers:
            sampler.batch_size = size
        self._trainer._train_batch_size = size

    @property
    def has_length(self) -> bool:
        """True if the samples of an epoch are known, which those of a stream need not be."""
        return True

    def num_batches(self, size: int) -> int:
        """Return the batches of an epoch on a device; the loader then has this size."""
        self.set_batch_size(size)
        return max(len(self.loader), 1)

    def _drawn(self) -> int:
        innermost, is_shared = self.samplers[-1], len(self.samplers) > 1
        sampler: Any = getattr(innermost, "sampler", None)
        if not hasattr(sampler, "__len__"):
            return len(self._data)
        return len(sampler) * (1 if is_shared else int(self._trainer.args.world_size))

    def _row(self, index: int) -> Any:
        """Return a row of the data; those that are looked at before training are kept, as reading may take long."""
        return self._rows[index] if index in self._rows else self._data[index]

    def _sample(self, index: int) -> Sample:
        return self._sample_of(self._row(index))

    def _sample_of(self, row: Any) -> Sample:
        return self._as_samples([row]).features[0]

    @functools.cached_property
    def _as_samples(self) -> Callable[[list[Any]], Samples]:
        """The collate function of the loader that hands out samples: rows -> an uncollated batch."""
        of_samples = handing_out_samples(self.loader, self._trainer.data_collator)
        return cast("Callable[[list[Any]], Samples]", of_samples.collate_fn)

    def _length_function(self, sample: Sample) -> Callable[[Sample], int] | None:
        trainer = self._trainer
        targets = has_decoder(trainer.model)
        length = length_function(sample, getattr(trainer.data_collator, "max_length", None), targets=targets)
        if length is not None and targets and "input_ids" in sample and has_tokens(sample.get("labels")):
            return PairLength(lambda: self.longest_pair)
        if length is None:
            of_collated = CollatedLength(trainer.data_collator, targets=targets)
            return of_collated if of_collated.knows(self.some) else None
        return length

    @property
    def longest_pair(self) -> tuple[int, int]:
        """Tokens of the longest input and of the longest target, for an encoder and a decoder."""
        if self._longest_pair is None:
            sources, targets = zip(*self._sizes, strict=True)
            self._longest_pair = (max(sources), max(targets))
        return self._longest_pair

    @functools.cached_property
    def _sizes(self) -> list[Any]:
        """The tokens of all samples, or those of their inputs and targets: of a column, or of reading all once."""
        column = self._column()
        return self._read_sizes() if column is None else column

    def _in_order(self) -> Iterator[Any]:
        return map(self._row, range(len(self._data)))

    def _read_sizes(self) -> list[Any]:
        data, sizes = self._data, list[Any]()
        extreme: dict[str, tuple[int, int, Any]] = {}  # the least and most of each size: tokens, place, row
        start, has_reported = time.monotonic(), False
        with reading(data, self._trainer.args.device):
            for index, row in enumerate(self._in_order()):
                sizes.append(size := self._size_of(row))
                for at, tokens in enumerate(size if isinstance(size, tuple) else (size,)):
                    for name, sign in ((f"most of {at}", 1), (f"least of {at}", -1)):
                        if name not in extreme or sign * tokens > sign * extreme[name][0]:
                            extreme[name] = tokens, index, row
                if not has_reported and (seconds := time.monotonic() - start) > _LONG:
                    has_reported = True
                    self._say_that_it_takes_long(index + 1, seconds)
        self._rows |= {index: row for _, index, row in extreme.values()}
        return sizes

    def _say_that_it_takes_long(self, count: int, seconds: float) -> None:
        log.warning(
            "all %d samples are read to find the longest (%d in %.1f s so far); a column %r of train_dataset, with the "
            "tokens of each, would save this",
            len(self._data), count, seconds, self._trainer.args.length_column_name,
        )  # fmt: skip

    def _size_of(self, row: Any) -> Any:
        if isinstance(self.length, PairLength):
            return (0, 0) if row is None else (len(row["input_ids"]), len(row["labels"]))
        assert self.length is not None
        return self.length(self._sample_of(row) if isinstance(self.length, CollatedLength) else row)

    def _column(self) -> list[int] | None:
        """Return the lengths that the data have in a column, if those of some samples are right."""
        data, name = self._trainer.train_dataset, getattr(self._trainer.args, "length_column_name", None)
        count = len(self._data)
        if isinstance(self.length, PairLength) or name not in (getattr(data, "column_names", None) or ()):
            return None
        without_transforms = data.with_format(None) if hasattr(data, "with_format") else data
        lengths = list(without_transforms[name])
        if len(lengths) == count and all(lengths[index] == self._size_of(row) for index, row in self._rows.items()):
            return lengths
        log.info("column %r of train_dataset is not used: it has other numbers than the tokens of samples", name)
        return None

    def _find_extremes(self) -> Extremes:
        length, collator = self.length, self._trainer.data_collator
        if length is None:
            by_size = sorted(self.some, key=lambda sample: count_numbers(collated([sample], collator)))
            return Extremes(1, 1.0, by_size[-1], by_size[0])
        sizes = self._sizes
        if isinstance(length, PairLength):
            sizes = [length.of(*size) for size in sizes]
        mean = sum(sizes) / len(sizes)
        tokens, longest = self._first_kept(sizes, sorted(range(len(sizes)), key=lambda index: -sizes[index]))
        _, shortest = self._first_kept(sizes, sorted(range(len(sizes)), key=lambda index: sizes[index]))
        if isinstance(length, PairLength):
            sources, targets = zip(*self._sizes, strict=True)
            source, target = (self._sample(of.index(max(of))) for of in (sources, targets))
            longest = {**source, **{key: target[key] for key in TARGETS & target.keys()}}
            tokens = length(longest)
        return Extremes(tokens, mean, longest, shortest)

    def _first_kept(self, sizes: Sequence[int], order: Sequence[int]) -> tuple[int, Sample]:
        """Return the first sample that the collate function does not leave out, after its length."""
        for index in order:
            sample = self._sample(index)
            if without_left_out([sample, self.some[0]], self._trainer.data_collator)[0] is sample:
                return sizes[index], sample
        raise AssertionError("some samples are kept")


@contextlib.contextmanager
def _kept(samplers: Sequence[Any]) -> Iterator[None]:
    """Put back what samplers have for attributes, what is in those that are lists, and generators of random numbers."""
    spaces = [(vars(sampler), dict(vars(sampler))) for sampler in samplers if hasattr(sampler, "__dict__")]  # not range
    lists = [(value, [*value]) for _, own in spaces for value in own.values() if isinstance(value, list)]
    try:
        with draws_put_back(*samplers):
            yield
    finally:
        for space, own in spaces:
            space.clear()
            space.update(own)
        for value, entries in lists:
            value[:] = entries
