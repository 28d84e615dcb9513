"""Steps of a plain loop whose samples ranks share out: of unlike lengths, of many types, and with faults."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from tests.loop import two_ranks
from tests.loop.test_step import Centred, Text, collate, length
from tests.loop.two_ranks import KINDS, error_of, make_model, make_step, weights_of

RANK, SIZE = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE"))
MAX_TOKENS, ROOM = 200, 100
LENGTHS: list[list[list[int]]] = [
    [[90, 80, 70, 60, 50, 3], [5, 4, 9], [7], [12, 2]],
    [[11, 6], [99, 88, 77, 66], [80, 3, 4], [5]],
    [[], [91, 82, 53, 9], [4, 4], [6, 60]],
    [[21], [70, 12, 5, 78, 9, 7], [65, 65], [3, 2]],
]
"""Tokens of the samples of each step, for each of up to four ranks; in one step, the first has none."""

FAULTS = ["forward on 1", "backward on 0"]
"""Where parts of many tokens run out of memory, from the second step on."""

CANNOT_BE_SENT = ["lambda on 1", "unreadable on 0"]
NO_FILLER = "lambda, and a rank without"
SETTINGS = ["off", "no limit on 1"]


def drawn(size: int, what: str = "") -> list[list[list[Text]]]:
    """Return the samples of each step for each of so many ranks, whose first token tells the rank that drew it.

    If they cannot be sent, no rank goes without.
    """
    generator = torch.Generator().manual_seed(0)

    def text(rank: int, tokens: int) -> Text:
        return torch.cat([torch.tensor([rank]), torch.randint(20, (tokens,), generator=generator)])

    least = [5] if what in CANNOT_BE_SENT else []
    return [[[text(rank, n) for n in own or least] for rank, own in enumerate(step[:size])] for step in LENGTHS]


@dataclass
class Held:
    text: Text
    more: Any = None


class Pair(NamedTuple):
    held: Held
    number: int


class Unreadable(Held):
    """Fails on one rank, when it is unpickled there."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["more"] == RANK:
            raise KeyError("from another version")
        vars(self).update(state)

    def __copy__(self) -> Held:
        return Held(self.text)


def as_sample(text: Text, what: str) -> Any:
    """Return a text as a sample of another type."""
    if what.startswith("unreadable"):
        return Unreadable(text, int(what[-1]))
    if what.startswith("lambda"):
        return Held(text, None if what.endswith("1") and RANK != 1 else lambda: 0)
    if what == "types":  # a slice, in objects in tuples in dicts
        return {
            "pair": Pair(Held(torch.cat([torch.zeros(10**6, dtype=torch.long), text])[10**6 :], [{"b": text[:1]}]), 1)
        }
    return text


def text_of(sample: Any) -> Text:
    held = sample["pair"].held if isinstance(sample, dict) else sample
    text: Text = held.text if isinstance(held, Held) else held
    return text


@contextmanager
def told(messages: list[str]) -> Iterator[None]:
    """Have all that is logged inside in a list."""
    log, handler = logging.getLogger("adaptive_batching"), logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def train(kind: str, what: str) -> dict[str, Any]:
    """Train on all steps, and return what came of it on this rank."""
    place, _, rank = what.partition(" on ")
    norm = Centred() if what.startswith("Centred") else None
    model = make_model(place, norm)
    prepared, step = make_step(
        kind, model, collate=lambda samples: collate([*map(text_of, samples)]),
        length=lambda sample: length(text_of(sample)), balance_ranks=not what.endswith("off"),
    )  # fmt: skip
    if what != "no limit on 1" or RANK != 1:
        step.max_tokens = 10**6 if norm is not None else MAX_TOKENS
    losses, moved, messages = list[float](), list[int](), list[str]()
    with told(messages), mock.patch.object(dist, "isend", side_effect=dist.isend) as isend:
        for number, batch in enumerate(drawn(SIZE, what)):
            if number == 1 and what in FAULTS and int(rank) == RANK:
                model.book.most_tokens = ROOM
            losses.append(step([as_sample(text, what) for text in batch[RANK]]).item())
            sharing = step._work._sharing
            share = None if sharing is None else sharing.last
            moved.append(0 if share is None else share.num_moved)
    return {
        "losses": losses, "weights": weights_of(prepared), "moved": moved, "recoveries": step.num_recoveries,
        "sent": sum(call.args[0].numel() for call in isend.call_args_list), "forwards": model.forwards,
        "told": [message for message in messages if "not balanced" in message],
    }  # fmt: skip


def runs(size: int) -> list[str]:
    """Return the names of the runs on so many ranks."""
    of_all = ["shared", "forward on 1", "lambda on 1"]
    of_ddp = [*of_all, *FAULTS, *CANNOT_BE_SENT, *SETTINGS, "types", NO_FILLER, "Centred", "Centred off"]
    of_fsdp = [*of_all, *FAULTS, "no limit on 1"]
    of_kinds = [of_ddp, of_fsdp] if size == 2 else [of_all] * 2
    return [f"{kind}, {what}" for kind, of in zip(KINDS, of_kinds, strict=True) for what in dict.fromkeys(of)]


def run_case(name: str) -> dict[str, Any] | str:
    """Return what came of a run, or the error that has ended it."""
    kind, what = name.split(", ", 1)
    found: list[dict[str, Any]] = []
    error = error_of(lambda: found.append(train(kind, what)))
    return error or found[0]


def run_all() -> dict[str, Any]:
    """Return what came of all runs on this rank, with those of two ranks that share nothing."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {name: run_case(name) for name in runs(SIZE)}
    return found if SIZE > 2 else {**found, **{name: case() for name, case in two_ranks.CASES.items()}}
