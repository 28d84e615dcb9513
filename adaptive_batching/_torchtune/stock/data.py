"""Samples for the training loop, in batches whose size can change between epochs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.datasets import ConcatDataset, PackedDataset

from adaptive_batching._values import ConfigError

Sample = dict[str, Any]
STATE_KEY = "adaptive_batching"
TEXT_KEYS = frozenset({"tokens", "labels", "mask"})  # a sample of these alone can be made longer or shorter


class SampleLoader:
    """A stock loader that yields lists of *samples* in stock's order, which are collated later, when they run.

    A last batch that is not full is left out. ``extra_state`` returns what a checkpoint holds besides the loader's own
    state, or None.
    """

    def __init__(self, stock: DataLoader[Any], extra_state: Callable[[], Any] = lambda: None) -> None:
        self.dataset: Any = stock.dataset
        self.sampler: Any = stock.sampler
        self.collate: Callable[[list[Sample]], Any] = stock.collate_fn
        self._extra_state = extra_state
        self._batches = _Batches(self.sampler, stock.batch_size or 1)
        self._indexed = _Indexed(self.dataset)
        # Each iterator of it draws from torch's global random state: one an epoch, as in stock, for dropout's sake.
        self._loader = StatefulDataLoader(self._indexed, batch_sampler=self._batches, collate_fn=list)

    @property
    def batch_size(self) -> int:
        return int(self._batches.batch_size)

    def set_batch_size(self, batch_size: int) -> None:
        self._batches.set_batch_size(batch_size)

    def load(self, indices: Iterable[int]) -> list[Sample]:
        return [self._indexed[index] for index in indices]

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[Sample]]:
        return iter(self._loader)

    def iter_from(self, start: int) -> Iterator[list[Sample]]:
        """Iterate over the batches of an epoch from its ``start``-th sample on; those before it are not loaded."""
        self._batches.start = start
        try:
            return iter(self._loader)
        finally:
            self._batches.start = 0

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict()
        extra = self._extra_state()
        return state if extra is None else {**state, STATE_KEY: extra}


class _Batches(BatchSampler):
    """Stock's batches of indices, each of the size that is set when it is drawn."""

    def __init__(self, sampler: Any, batch_size: int) -> None:
        super().__init__(sampler, batch_size, drop_last=True)
        self.start = 0
        self._iterator: Any = None

    def __iter__(self) -> Any:
        self._iterator = super().__iter__()
        for _ in range(self.start):
            next(self._iterator.sampler_iter)
        return self._iterator

    def set_batch_size(self, batch_size: int) -> None:
        self.batch_size = batch_size
        if self._iterator is not None:
            self._iterator.batch_size = batch_size


class _Indexed(Dataset[Sample]):
    """A data set whose samples know their number in it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        return indexed(self._dataset[index], index)


class _IndexedSample(Sample):
    index: int | None


def indexed(sample: Sample, index: int | None) -> Sample:
    copied = _IndexedSample(sample)
    copied.index = index
    return copied


def index_of(sample: Sample) -> int | None:
    """Return the index of a loaded sample in its data set; None for one that no loader has yielded."""
    return getattr(sample, "index", None)


def check_data_fills_a_step(num_samples: int, batch_size: int, accumulation: int) -> None:
    if num_samples == 0:
        raise ConfigError("dataset is empty; check its source, split and filters")
    if num_samples < batch_size * accumulation:
        raise ConfigError(
            f"dataset has {num_samples} samples, fewer than one optimizer step takes (batch_size={batch_size} x "
            f"gradient_accumulation_steps={accumulation}); lower either, so that their product is at most {num_samples}"
        )


def is_packed(dataset: Any) -> bool:
    """Return True if samples are packs of one length, in one data set or several."""
    return isinstance(dataset, PackedDataset) or (isinstance(dataset, ConcatDataset) and dataset.packed)


def stretch(sample: Sample, length: int) -> Sample | None:
    """Return ``sample`` with ``length`` tokens, at least one of them a target; None of a pack or of more than text."""
    if not set(sample) <= TEXT_KEYS:
        return None
    stretched = {key: repeat_to(values, length) for key, values in sample.items()}
    if all(label == CROSS_ENTROPY_IGNORE_IDX for label in stretched["labels"][1:]):
        stretched["labels"] = list(stretched["tokens"])
    return stretched


def repeat_to(values: Sequence[Any], length: int) -> list[Any]:
    repeated: list[Any] = list(values) * (length // len(values) + 1)
    return repeated[:length]


def repeat(sample: Sample, count: int) -> list[Sample]:
    """Return ``count`` copies, so that a collate function that changes its input does no harm."""
    return [copy.copy(sample) for _ in range(count)]
