"""Training data that stream: what comes first stands for all, and is read in an iteration of its own."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard
from transformers.trainer_utils import has_length

from adaptive_batching._loop.samples import collated
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._transformers.handed_out import PairLength, Sample, lengthened, reading, without_left_out
from adaptive_batching._transformers.refusals import check_stream
from adaptive_batching._transformers.training_data import Extremes, TrainingData
from adaptive_batching._values import ConfigError

log = logging.getLogger(__name__)

_FIRST = 1000  # samples of which the longest is taken for that of the stream
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")  # in a model's config


class StreamedData(TrainingData):
    """The samples of a stream, whose order is its own, and whose number need not be known.

    Ranks may read different parts of it. What is looked at before training is that of the first, on all of them.
    """

    def __init__(self, trainer: Any, loader: Any, *, ranks: Ranks, grows: bool, **given: Any) -> None:
        self._ranks = ranks
        check_stream(loader.dataset, grows=grows, dispatches=False)
        super().__init__(trainer, loader, **given)
        if isinstance(self.length, PairLength):
            _ = self.longest_pair  # all ranks ask for it here, and not when one of them counts tokens

    @property
    def _data(self) -> Any:
        data = self.loader.dataset
        return data.dataset if isinstance(data, IterableDatasetShard) else data

    @property
    def has_length(self) -> bool:
        return bool(has_length(self._data))

    @property
    def num_samples(self) -> int:
        """Samples that all devices draw in an epoch; of a stream without a length, those of the run."""
        if self.has_length:
            return len(self._data)
        args, size = self._trainer.args, self._trainer._train_batch_size
        return int(args.max_steps * args.gradient_accumulation_steps * size * args.world_size)

    @property
    def draws_from_all(self) -> bool:
        return False

    @property
    def has_own_sampler(self) -> bool:
        return True

    def set_batch_size(self, size: int) -> None:
        super().set_batch_size(size)
        for loader in self.loaders:  # from which Accelerate makes another that skips
            vars(getattr(loader, "base_dataloader", loader))["batch_size"] = size
        if isinstance(self.loader.dataset, IterableDatasetShard):
            self.loader.dataset.batch_size = size

    def num_batches(self, size: int) -> int:
        if self.has_length:
            return super().num_batches(size)
        return -(-self.num_samples // (size * int(self._trainer.args.world_size)))

    def some_batches(self, ranks: Ranks, most: int) -> list[list[Sample]]:
        """Return some of the first batches."""
        size = int(self._trainer.args.per_device_train_batch_size)
        with reading(self._data, self._trainer.args.device):
            rows = ranks.on_first(lambda: self._first(size * most))
        batches = [list(map(self._sample_of, rows[at : at + size])) for at in range(0, len(rows), size)]
        return [without_left_out(batch, self._trainer.data_collator) for batch in batches]

    def _first(self, count: int) -> list[Any]:
        return list(itertools.islice(self._data, count))

    def _rows_to_measure(self, most: int) -> list[Any]:
        name = f"train_dataset is a {type(self._data).__name__}, "

        def read() -> list[Any]:
            remedy = (
                "samples that are looked at before training would be lost: give a data set whose __iter__ begins again "
                "each time, in the same order, such as datasets.IterableDataset.from_generator(function)"
            )
            one, other = iter(self._data), iter(self._data)
            if one is other:
                raise ConfigError(f"{name}which cannot begin again; {remedy}")
            firsts = []
            for rows in (one, other):
                with reading(self._data, self._trainer.args.device):
                    firsts += list(itertools.islice(rows, 1))
            if not firsts:
                raise ConfigError(f"{name}which has no samples")
            if len(firsts) < 2 or not _same(*firsts):
                raise ConfigError(f"{name}which begins with another sample when it begins again; {remedy}")
            return self._first(most)

        return self._ranks.on_first(read)

    def _row(self, index: int) -> Any:
        return self._rows[index] if index in self._rows else next(itertools.islice(self._data, index, None))

    def _in_order(self) -> Iterator[Any]:
        return itertools.islice(self._data, _FIRST)

    def _read_sizes(self) -> list[Any]:
        return self._ranks.on_first(super()._read_sizes)

    def _column(self) -> None:
        return None

    def _say_that_it_takes_long(self, count: int, seconds: float) -> None:
        log.warning(
            "the first %d samples of a stream are read to find the longest (%d in %.1f s so far)",
            _FIRST, count, seconds,
        )  # fmt: skip

    def _find_extremes(self) -> Extremes:
        if self.length is None:
            return self._ranks.on_first(super()._find_extremes)
        count = len(self._sizes)  # asks all ranks
        found = self._ranks.on_first(super()._find_extremes)
        allowed = self._allowed()
        if allowed is not None and found.tokens < allowed and (longest := self._of_length(found.longest, allowed)):
            log.info(
                "samples of train_dataset are taken to have up to %d tokens (max_length), because it is a stream: the "
                "longest of its first %d has %d", allowed, count, found.tokens,
            )  # fmt: skip
            return found._replace(tokens=allowed, longest=longest)
        log.info(
            "train_dataset is a stream: the longest of its first %d samples has %d tokens, and is taken for the "
            "longest of all; a longer one that does not fit with others runs by itself", count, found.tokens,
        )  # fmt: skip
        return found

    def _allowed(self) -> int | None:
        """Return the most tokens that the arguments allow a sample, and the model has positions for; None if unknown.

        What the model has positions for is no bound by itself: it is often a hundred times as much as samples have.
        """
        trainer = self._trainer
        given = [getattr(source, "max_length", None) for source in (trainer.args, trainer.data_collator)]
        bounds = [value for value in given if isinstance(value, int)]
        config = getattr(trainer.model, "config", None)
        positions = [getattr(config, name, None) for name in _POSITIONS]
        return min([*bounds, *(value for value in positions if isinstance(value, int))]) if bounds else None

    def _of_length(self, sample: Sample, tokens: int) -> Sample | None:
        """Return a sample of so many tokens, made of another; None if that is no such sample."""
        made = lengthened(sample, tokens)
        if made is None or self.length is None or self.length(made) != tokens:
            return None
        try:
            collated([made, sample], self._trainer.data_collator)
        except Exception:  # of a field that is not of tokens, although it has as many
            return None
        return made


def _same(one: Any, other: Any) -> bool:
    """Return True if two samples have the same values."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if hasattr(one, "tobytes"):  # an array, or an image
        return bool(one.tobytes() == other.tobytes()) and getattr(one, "shape", None) == getattr(other, "shape", None)
    return bool(one == other)
