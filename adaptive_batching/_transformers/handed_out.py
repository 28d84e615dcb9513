"""Samples on their way from a data loader to the step that collates them."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import DataLoader
from transformers.trainer_utils import RemoveColumnsCollator

from adaptive_batching import _state
from adaptive_batching._device import unchanged_random_state
from adaptive_batching._loop.samples import collated
from adaptive_batching._state import draws_put_back
from adaptive_batching._values import ConfigError

Sample = Any


class Samples:
    """An uncollated batch. Used as ``collate_fn``, it makes a loader yield these.

    They are collated when they run, in parts that fit: rows of a collated batch cannot be told apart where DPO and
    reward collators put two rows of a sample far apart, or ``padding_free`` makes one row of all samples. So the
    training process collates, rather than a loader's workers, which cannot know the parts: which fit, and which run
    again in smaller ones, shows in training alone. This is no list, because Accelerate would look for tensors in every
    token of one.
    """

    def __init__(self, features: list[Sample]) -> None:
        self.features = features


class StepInputs(dict[str, torch.Tensor]):
    """The batches of an optimizer step, to train on.

    To ``Trainer``, which counts tokens, it is a mapping of inputs: :meth:`note` gives it inputs of the size that ran,
    which take no memory.
    """

    def __init__(self, batches: Sequence[list[Sample]] = ()) -> None:
        super().__init__()
        self.batches = batches
        self.forwards = self.tokens = self.padded_tokens = 0

    def note(self, main_input: str, tokens: int, padded_tokens: int, forwards: int = 0) -> None:
        self.forwards, self.tokens, self.padded_tokens = forwards, tokens, padded_tokens
        self[main_input] = torch.zeros(1, dtype=torch.long).expand(padded_tokens)
        self["attention_mask"] = torch.ones(1, dtype=torch.long).expand(tokens)


# Fields whose tokens make up those of a sample: the sum of the first group, and the longest of the second.
_LENGTHS = [
    (("input_ids",), ()),
    (("prompt_ids",), ("chosen_ids", "rejected_ids")),
    (("prompt_input_ids",), ("chosen_input_ids", "rejected_input_ids")),
    ((), ("chosen_ids", "rejected_ids")),
    ((), ("input_ids_chosen", "input_ids_rejected")),
]
TARGETS = {"labels", "decoder_input_ids", "decoder_attention_mask"}
_OF_A_WHOLE = {"position_ids", "seq_lengths"}  # which count the tokens of a sample
_IMAGES = {"image", "images", "pixel_values", "pixel_values_videos"}


def length_function(
    sample: Sample, at_most: int | None = None, *, targets: bool = False
) -> Callable[[Sample], int] | None:
    """Return the function that counts the tokens of samples like this one; None if their number alone is known.

    ``at_most`` is the length that a collate function cuts pairs of answers to. With ``targets``, which a decoder reads,
    labels are tokens, too, unless a sample has one label. Choices count as they are padded, to the longest of a sample.
    """
    if not isinstance(sample, Mapping) or any(sample[key] is not None for key in _IMAGES & sample.keys()):
        return None
    with_targets = [(("input_ids", "labels"), ())] if targets and has_tokens(sample.get("labels")) else []
    for together, longest in [*with_targets, *_LENGTHS]:
        if {*together, *longest} <= sample.keys():

            def length(sample: Sample, together: Any = together, longest: Any = longest) -> int:
                if sample is None:  # which a collate function leaves out
                    return 0
                tokens = most = 0
                for key in together:
                    tokens += _num_tokens(sample[key])
                for key in longest:
                    most = max(most, _num_tokens(sample[key]))
                tokens += most
                return tokens if at_most is None or not longest else min(tokens, at_most)

            return length
    return None


def lengthened(sample: Sample, tokens: int) -> Sample | None:
    """Return a sample of so many tokens, those of another over and over; None if it has fields that this would break.

    A prompt stays as it is, and all answers become as long as the sample allows.
    """
    for together, longest in _LENGTHS:
        if not {*together, *longest} <= sample.keys():
            continue
        of_prompt = sum(len(sample[key]) for key in together) if longest else 0
        made = dict(sample)
        for name in longest or together:
            side = next((side for side in ("chosen", "rejected") if side in name), "")
            for key, value in sample.items():
                if isinstance(value, str) or not has_tokens(value) or (longest and side not in key):
                    continue
                if key in _OF_A_WHOLE or len(value) != len(sample[name]) or not len(value):
                    return None
                places = [place % len(value) for place in range(tokens - of_prompt)]
                made[key] = [value[place] for place in places] if isinstance(value, (list, tuple)) else value[places]
        return made
    return None


def has_tokens(value: Any) -> bool:
    """Return True if a field of a sample has a length, which a label that is a number has not."""
    try:
        len(value)
    except TypeError:  # also of a tensor without dimensions
        return False
    return True


def _num_tokens(value: Any) -> int:
    if len(value) and has_tokens(value[0]):  # choices
        return len(value) * max(map(len, value))
    return len(value)


def has_decoder(model: Any) -> bool:
    """Return True if a model has a decoder besides its encoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


class PairLength:
    """Counts tokens of samples for an encoder and a decoder, each of which pads to the longest of a part.

    A sample counts as the tokens of the longest input and the longest target, times the larger of two shares: of its
    input in the longest input, and of its target in the longest target. Samples that count no more than others that fit
    then have no more tokens on either side, of which one may take far more memory than the other.
    """

    def __init__(self, longest: Callable[[], tuple[int, int]]) -> None:
        self._longest = longest  # which may have to read all of the data

    def __call__(self, sample: Sample) -> int:
        return 0 if sample is None else self.of(len(sample["input_ids"]), len(sample["labels"]))

    def of(self, source: int, target: int) -> int:
        most = self._longest()
        return max(
            -(-size * sum(most) // max(longest, 1)) for size, longest in zip((source, target), most, strict=True)
        )


class CollatedLength:
    """Counts the tokens that a collate function makes of a sample, as one that tokenizes: each is collated once, alone.

    Random numbers that it draws meanwhile are drawn again.
    """

    def __init__(self, collate: Callable[[list[Sample]], Any], *, targets: bool) -> None:
        self._collate, self._targets = collate, targets
        self._known: dict[bytes, int] = {}

    def __call__(self, sample: Sample) -> int:
        try:
            key = hashlib.sha256(pickle.dumps(sample)).digest()
        except Exception:  # of an object of somebody's own, which is then collated again
            return self._count(sample)
        if key not in self._known:
            self._known[key] = self._count(sample)
        return self._known[key]

    def knows(self, samples: Sequence[Sample]) -> bool:
        """Return True if the batches of samples are of text, and have unlike lengths."""
        if any(isinstance(sample, Mapping) and _IMAGES & sample.keys() for sample in samples):
            return False
        batches = [collated([sample], self._collate) for sample in samples]
        return all(map(self._is_counted, batches)) and len(set(map(self, samples))) > 1

    @staticmethod
    def _is_counted(batch: Any) -> bool:
        """Return True for rows of tokens with nothing else of unknown size, such as images."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or _IMAGES & batch.keys():
            return False
        tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
        return not any(value.is_floating_point() and value.dim() > 2 for value in tensors)

    def _count(self, sample: Sample) -> int:
        with unchanged_random_state(torch.device("cpu")):
            try:
                batch = collated([sample], self._collate)
            except Exception:  # of a sample that is left out, or one that fails where it trains
                return 0
        if not self._is_counted(batch):
            return 0
        labels = batch.get("labels")
        of_labels = labels.numel() if self._targets and isinstance(labels, torch.Tensor) and labels.dim() == 2 else 0
        return int(batch["input_ids"].numel()) + of_labels


def rows_of(batch: Any) -> int:
    """Return the rows of a batch, by its labels or else its first tensor; 0 if there is no batch."""
    if batch is None or not len(batch):
        return 0
    values = [batch.get("labels"), *batch.values()] if isinstance(batch, Mapping) else []
    return next((len(value) for value in values if isinstance(value, torch.Tensor) and value.dim() > 0), 1)


def without_left_out(samples: Sequence[Sample], collate: Callable[[list[Sample]], Any]) -> list[Sample]:
    """Return those of ``samples`` that a collate function makes a batch of: it may leave others out, and fail on these.

    Raises:
        Exception: The error of ``collate`` if it fails on a sample among others, too, or on all of them.
    """
    kept: list[Sample] = []
    failed: list[tuple[Sample, Exception | None]] = []
    for sample in samples:
        try:
            if rows_of(collated([sample], collate)):
                kept.append(sample)
            else:
                failed.append((sample, None))
        except Exception as error:  # of an empty batch, as a rule
            failed.append((sample, error))
    for sample, failure in failed:
        if kept and is_left_out([sample], kept[:1], collate):
            continue
        raise failure or ConfigError(
            "data_collator leaves out every sample that it was given, so that no batch is left"
        )
    return kept


def is_left_out(samples: Sequence[Sample], other: Sequence[Sample], collate: Callable[[list[Sample]], Any]) -> bool:
    """Return True if a collate function makes the same rows of ``samples`` and ``other`` as of ``other`` alone."""
    try:
        return rows_of(collated([*samples, *other], collate)) == rows_of(collated(other, collate))
    except Exception:
        return False


def count_numbers(batch: Mapping[str, Any]) -> int:
    """Return how many numbers the tensors of a batch have."""
    return sum(value.numel() for value in batch.values() if isinstance(value, torch.Tensor))


def handing_out_samples(loader: Any, collator: Any) -> Any:
    """Return a data loader like ``loader`` that hands out :class:`Samples`; None if that is not possible.

    It has the same data, samplers and settings. ``loader`` itself stays what it was, for everybody but the loop of
    ``Trainer``. Possible is a loader of torch, prepared by Accelerate or not, that collates with ``collator``.
    """
    if type(loader) is DataLoaderDispatcher:
        # Of one process, as was checked. It looks for tensors in a batch, and else does what a shard does.
        as_shard = {"device": None, "rng_types": None, "synchronized_generator": None}
        return handing_out_samples(_copy_of(loader, kind=DataLoaderShard, **as_shard), collator)
    if type(loader) is DataLoaderShard:
        inner = handing_out_samples(loader.base_dataloader, collator)
        return None if inner is None else _copy_of(loader, base_dataloader=inner)  # that of a stream has no length
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    collate = loader.collate_fn
    if isinstance(collate, RemoveColumnsCollator) and _is_same(collate.data_collator, collator):
        return _copy_of(loader, collate_fn=_copy_of(collate, data_collator=Samples), _iterator=None)
    return _copy_of(loader, collate_fn=Samples, _iterator=None) if _is_same(collate, collator) else None


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, MethodType) and one == other)  # each access makes another method


def _copy_of(original: Any, *, kind: type | None = None, **attributes: Any) -> Any:
    """Return a shallow copy with other attributes; ``copy.copy`` fails on the loaders of Accelerate."""
    copy: Any = object.__new__(kind or type(original))
    vars(copy).update({**vars(original), **attributes})
    return copy


@contextlib.contextmanager
def reading(data: Any, device: torch.device) -> Iterator[None]:
    """Put generators of random numbers back on exit, because samples that are read may be drawn or augmented.

    They are those of the process, and those that ``data`` has as attributes.
    """
    with draws_put_back(data), unchanged_random_state(device):
        yield


@contextlib.contextmanager
def without_gathering(trainer: Any) -> Iterator[None]:
    """Have ``trainer`` gather nothing from other ranks inside, as TRL gathers metrics in every forward.

    In a rehearsal it is :func:`unlogged`, too.
    """
    names = ("gather", "gather_for_metrics", "reduce")
    around = unlogged(trainer) if _state.rehearsing else contextlib.nullcontext()
    with replaced(trainer.accelerator, **dict.fromkeys(names, lambda value, *args, **kwargs: value)), around:
        yield


@contextlib.contextmanager
def unlogged(trainer: Any) -> Iterator[None]:
    """Have nothing reach loggers, callbacks or the history of ``trainer`` inside, such as what a loss logs."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def call_event(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return control

    with (
        replaced(trainer, log=nothing),
        replaced(trainer.accelerator, log=nothing),
        replaced(trainer.callback_handler, call_event=call_event),
    ):
        yield


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give an object attributes of its own inside, in place of those that it has."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)
