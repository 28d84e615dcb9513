"""Samples on their way from a data loader to the step that collates them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

Sample = Any


class Samples:
    """Samples of a batch as the data set has them; in place of a collate function, what a loader hands out.

    They are collated when they run, in parts that fit: rows of a collated batch cannot be told apart where DPO and
    reward collators put two rows of a sample far apart, or ``padding_free`` makes one row of all samples. This is no
    list, because Accelerate would look for tensors in every token of one.
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
_IMAGES = {"image", "images", "pixel_values", "pixel_values_videos"}


def length_function(sample: Sample, at_most: int | None = None) -> Callable[[Sample], int] | None:
    """Return the function that counts the tokens of samples like this one; None if their number alone is known.

    ``at_most`` is the length that a collate function cuts pairs of answers to.
    """
    if not isinstance(sample, Mapping) or _IMAGES & sample.keys():
        return None
    for together, longest in _LENGTHS:
        if {*together, *longest} <= sample.keys():

            def length(sample: Sample, together: Any = together, longest: Any = longest) -> int:
                found = sum(len(sample[key]) for key in together) + max([len(sample[key]) for key in longest] or [0])
                return found if at_most is None or not longest else min(found, at_most)

            return length
    return None


def count_numbers(batch: Mapping[str, Any]) -> int:
    """Return how many numbers the tensors of a batch have."""
    return sum(value.numel() for value in batch.values() if isinstance(value, torch.Tensor))


@contextlib.contextmanager
def handing_out_samples(trainer: Any) -> Iterator[None]:
    """Make the data loaders that ``trainer`` makes inside hand out :class:`Samples`."""
    collator = trainer.data_collator
    trainer.data_collator = Samples
    try:
        yield
    finally:
        trainer.data_collator = collator


@contextlib.contextmanager
def alone(trainer: Any) -> Iterator[None]:
    """Have ``trainer`` gather nothing from other ranks inside, as TRL gathers metrics in every forward."""
    names = ("gather", "gather_for_metrics", "reduce")
    with replaced(trainer.accelerator, **dict.fromkeys(names, lambda value, *args, **kwargs: value)):
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
