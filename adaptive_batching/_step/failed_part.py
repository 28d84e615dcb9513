"""A part that ran out of memory, as a value, and all that messages say of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adaptive_batching._values import memory_size, plural


@dataclass(frozen=True)
class FailedPart:
    """A part that ran out of memory."""

    tokens: int
    """Tokens that its forward computes, padding included; where samples have no length, their number."""

    samples: int
    """Number of its samples."""

    longest: int | None
    """Tokens of its longest sample; None if samples have no length."""

    unit: str = "padded tokens"
    """The unit of ``tokens``, in words."""

    name: str = ""
    """Of the longest sample, such as ``number 7 of the dataset``; empty if that is not known."""

    first_tokens: Sequence[int] = ()
    """Of the longest sample, by which its text is found; empty if they are not known."""

    shorten: str = "shorten it"
    """How to make a single sample shorter; empty if there is no way."""

    gradient_bytes: int = 0
    """Gradients that a step in parts holds and a whole one does not, as where optimizers step within backward."""

    has_updated: bool = False
    """True if its backward has updated parameters."""


@dataclass(frozen=True)
class Words:
    """How a host names its samples, and what it says helps, for messages: the beginnings of sentences."""

    less_memory: str
    """A way to use less memory, whatever the samples."""

    smaller_batch: str = "use a smaller batch size"
    """A way out if splitting the batch would change the result."""

    smaller_parts: str = ""
    """A way out if every step first runs out of memory; empty for that of ``smaller_batch``."""

    noun: str = "sample"
    everything: str = "the step's samples"
    """All that runs again."""


def describe(failed: FailedPart, words: Words) -> str:
    """Return the size of a part: ``3 samples of up to 40 tokens``."""
    up_to = "" if failed.longest is None else f" of up to {failed.longest} tokens"
    return f"{plural(failed.samples, words.noun)}{up_to}"


def single(failed: FailedPart, words: Words, *, is_split: bool) -> str:
    """Say that a sample does not fit by itself, which one it is, and what helps; ``is_split`` if the step was."""
    held = ""
    if failed.gradient_bytes and is_split:
        held = f", on top of {memory_size(failed.gradient_bytes)} of gradients that a split batch has to hold"
    helps = f"{failed.shorten}, or {words.less_memory}" if failed.shorten else words.less_memory
    if failed.first_tokens:
        begins = f"{failed.name}, which begins with the tokens {[*failed.first_tokens]}"
        helps = f": {begins}. {sentence(helps)}"
    else:
        helps = f"; {helps}"
    return f"out of memory with {describe(failed, words)}, which cannot be split{held}{helps}"


def after_update(failed: FailedPart, words: Words) -> str:
    """Say that a part cannot run again because its backward has updated parameters."""
    return (
        f"{_in_a_forward_or_backward(failed, words)}, after its backward pass had updated parameters "
        f"(optimizer_in_bwd=True), so it cannot run again; resume from the last checkpoint, and "
        f"{words.smaller_batch}, or {words.less_memory}"
    )


def without_recovery(failed: FailedPart, words: Words) -> str:
    """Say what lets a part run again."""
    remedy = "set adaptive_batching.recover_from_oom=True to run it in smaller parts"
    return f"{_in_a_forward_or_backward(failed, words)}; {remedy}"


def without_the_others(failed: FailedPart, words: Words, why: str) -> str:
    """Say that a part cannot run again because other ranks cannot be told, and ``why``."""
    advice = f"{sentence(words.smaller_batch)}, or {words.less_memory}"
    return f"{_in_a_forward_or_backward(failed, words)}; it cannot run in smaller parts: {why}. {advice}"


def over_the_batch(module: str, words: Words) -> str:
    """Say that nothing can be split because ``module`` computes over the batch."""
    return (
        f"out of memory, and splitting the batch would change the result: {module} computes over the batch; "
        f"{words.smaller_batch}, or {words.less_memory}"
    )


def in_every_step(words: Words) -> str:
    """Say that every step has to run again, and what helps."""
    helps = sentence(words.smaller_parts or words.smaller_batch)
    return (
        f"every step runs out of memory before it succeeds, which makes training slow. {helps}, or {words.less_memory}"
    )


def again_in_parts(failed: FailedPart | None, max_tokens: int | None, unit: str) -> str:
    """Say how samples run again, with no more than ``max_tokens`` in a forward, and what that costs."""
    held = ""
    if failed is not None and failed.gradient_bytes:
        held = f", which holds {memory_size(failed.gradient_bytes)} of gradients until the last of them"
    return f"with at most {max_tokens} {unit} per forward pass{held}"


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _in_a_forward_or_backward(failed: FailedPart, words: Words) -> str:
    return f"out of memory in a forward or backward pass of {describe(failed, words)}"
