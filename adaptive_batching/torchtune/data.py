"""Samples for the training loop, in batches whose size can change between epochs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.nn import functional
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.datasets import ConcatDataset, PackedDataset
from tqdm import tqdm

from adaptive_batching.config import ConfigError

Sample = dict[str, Any]
STATE_KEY = "adaptive_batching"
TEXT_KEYS = frozenset({"tokens", "labels", "mask"})  # a sample of these alone can be made longer or shorter
_PACKED_KEYS = frozenset({"input_pos", "seq_lens"})


class SampleLoader:
    """A stock loader that yields lists of *samples*; they are collated later, when they are run.

    The order of the samples is that of the stock loader, whatever the batch size.

    Args:
        stock: The loader that the stock recipe built: its data set, sampler and collate function are used.
        extra_state: What a checkpoint is to hold beside the loader's own state; None adds nothing.
    """

    def __init__(
        self, stock: StatefulDataLoader, extra_state: Callable[[], dict[str, Any] | None] = lambda: None
    ) -> None:
        self.dataset = stock.dataset
        self.sampler = stock.sampler
        self.collate: Callable[[list[Sample]], dict[str, Any]] = stock.collate_fn
        self._extra_state = extra_state
        self._batches = _Batches(self.sampler, stock.batch_size)
        self._loader = StatefulDataLoader(_Indexed(self.dataset), batch_sampler=self._batches, collate_fn=_as_list)

    @property
    def batch_size(self) -> int:
        """Samples of the next batch."""
        return int(self._batches.batch_size)

    def set_batch_size(self, batch_size: int) -> None:
        """Change the size of the batches that have not been loaded yet."""
        self._batches.set_batch_size(batch_size)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[Sample]]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict()
        extra = self._extra_state()
        return state if extra is None else {**state, STATE_KEY: extra}


class _Batches(BatchSampler):
    """Stock's batches of indices, but of whatever size is set when one is drawn."""

    def __init__(self, sampler: Any, batch_size: int) -> None:
        super().__init__(sampler, batch_size, drop_last=True)
        self._iterator: Any = None

    def __iter__(self) -> Any:
        self._iterator = super().__iter__()
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
        sample = _IndexedSample(self._dataset[index])
        sample.index = index
        return sample


class _IndexedSample(Sample):
    index: int


def index_of(sample: Sample) -> int | None:
    """The number of a loaded sample in its data set, from 0; None for one that no loader has yielded."""
    return getattr(sample, "index", None)


def is_multimodal(sample: Sample) -> bool:
    """Whether a sample has more than text: images, or whatever else its tokens refer to."""
    return not set(sample) <= TEXT_KEYS | _PACKED_KEYS


def sizes(samples: Sequence[Sample], length_in_forward: Callable[[int], int] = lambda length: length) -> list[int]:
    """Return the share of a micro-batch that each sample takes: its tokens, or 1 if multimodal, where they say little.

    Args:
        samples: Text or multimodal ones.
        length_in_forward: Gives the tokens that a sample of some length takes in a forward, with what it is padded by.
    """
    return [1 if is_multimodal(sample) else length_in_forward(len(sample["tokens"])) for sample in samples]


def pad_to(batch: dict[str, Any], length: int, ignore_index: int) -> dict[str, Any]:
    """Text that has been collated, padded on the right to ``length`` with labels to be ignored.

    That is exact: under a causal mask no token before sees the padding, and it has no part in the loss. What has more
    than tokens and labels stays as it is.
    """
    missing = length - batch["tokens"].shape[1]  # tokens: [b, s]
    if missing <= 0 or set(batch) != {"tokens", "labels"}:
        return batch
    return {
        "tokens": functional.pad(batch["tokens"], (0, missing)),
        "labels": functional.pad(batch["labels"], (0, missing), value=ignore_index),
    }


def check_data_fills_a_step(num_samples: int, batch_size: int, accumulation: int) -> None:
    """Refuse data that would not fill one optimizer step.

    Raises:
        ConfigError: If there are fewer samples than one optimizer step takes.
    """
    if num_samples == 0:
        raise ConfigError("dataset is empty; check its source, split and filters")
    if num_samples < batch_size * accumulation:
        raise ConfigError(
            f"dataset has {num_samples} samples, fewer than one optimizer step takes (batch_size={batch_size} x "
            f"gradient_accumulation_steps={accumulation}); lower either, so that their product is at most {num_samples}"
        )


def is_packed(dataset: Any) -> bool:
    """Whether samples are packs of one length, in one data set or several."""
    return isinstance(dataset, PackedDataset) or (isinstance(dataset, ConcatDataset) and dataset.packed)


def worst_case_sample(
    dataset: Any, *, sequence_length: int | None, tokenizer_max: int | None, model_max: int | None
) -> tuple[Sample, int]:
    """A sample as long as training can meet, and its length in tokens.

    Args:
        dataset: The training data; packed data have one length only.
        sequence_length: The length asked for; None: ``tokenizer_max``, else that of the longest sample.
        tokenizer_max: What the tokenizer truncates to, if it does.
        model_max: The longest sample that the model takes, if it has a limit.

    Raises:
        ConfigError: If ``sequence_length`` is asked for where the length of the data is fixed, or if the sample is
            longer than the model takes.
    """
    sample = dict(dataset[0])
    packed = is_packed(dataset)
    fixed = packed or not set(sample) <= TEXT_KEYS  # tokens that refer to images cannot be repeated or cut
    if fixed:
        sample = sample if packed else _longest(dataset)
        length = len(sample["tokens"])
        if sequence_length is not None and sequence_length != length:
            kind = "packed" if packed else "multimodal"
            raise ConfigError(
                f"adaptive_batching.sequence_length={sequence_length} cannot be used with {kind} data, whose longest "
                f"sample has {length} tokens; leave it null"
            )
    elif sequence_length is not None or tokenizer_max is not None:
        length = sequence_length or min(n for n in (tokenizer_max, model_max) if n is not None)
        sample = stretch(sample, length)
    else:
        sample = _longest(dataset)
        length = len(sample["tokens"])
    if model_max is not None and length > model_max:
        source = "the longest sample has" if sequence_length is None else "adaptive_batching.sequence_length asks for"
        raise ConfigError(f"{source} {length} tokens, and the model takes {model_max}; set tokenizer.max_seq_len")
    return sample, length


def stretch(sample: Sample, length: int) -> Sample:
    """A copy of ``sample`` with its tokens repeated or cut to ``length``, at least one of them a target."""

    def fit(values: Any) -> list[Any]:
        repeated: list[Any] = list(values) * (length // len(values) + 1)
        return repeated[:length]

    stretched = {key: fit(values) for key, values in sample.items()}
    if all(label == CROSS_ENTROPY_IGNORE_IDX for label in stretched["labels"][1:]):
        stretched["labels"] = list(stretched["tokens"])
    return stretched


def repeat(sample: Sample, count: int) -> list[Sample]:
    """``count`` copies, so that a collate function that changes its input does no harm."""
    return [copy.copy(sample) for _ in range(count)]


def _longest(dataset: Any) -> Sample:
    longest: Sample = {}
    for index in tqdm(range(len(dataset)), desc="Looking for the longest sample", dynamic_ncols=True):
        sample = dataset[index]
        if not longest or len(sample["tokens"]) > len(longest["tokens"]):
            longest = dict(sample)
    return longest


def _as_list(samples: list[Sample]) -> list[Sample]:
    return samples
