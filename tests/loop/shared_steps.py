"""Steps of a plain loop whose samples ranks share out: of unlike lengths, of many types, and with faults."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from adaptive_batching import AdaptiveStep, _snapshot
from tests.loop import two_ranks
from tests.loop.test_step import Centred, Text, collate, length, loss
from tests.loop.two_ranks import CLIP, KINDS, error_of, make_model, weights_of, wrapped

RANK, SIZE = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE"))
MAX_TOKENS = 200
LENGTHS: list[list[list[int]]] = [
    [[90, 80, 70, 60, 50, 3], [5, 4, 9], [7], [12, 2]],
    [[11, 6], [99, 88, 77, 66], [80, 3, 4], [5]],
    [[], [91, 82, 53, 9], [4, 4], [6, 60]],
    [[21], [70, 12, 5, 78, 9, 7], [65, 65], [3, 2]],
]
"""Tokens of the samples of each step, for each of up to four ranks; in one step, the first has none."""

FAULTS = ["forward on 0", "forward on 1", "backward on 1", "later on 0", "later on 1"]
"""Where memory runs out in a part with a sample that another rank has drawn, or in the step after the first of them."""

TYPES = ["dicts", "tuples", "objects", "slices"]
CANNOT_BE_SENT = ["lambda on all", "lambda on 1", "unreadable on 0", "unreadable on 1"]
NO_FILLER = "lambda, and a rank without"
NORMS = ["BatchNorm1d", "Centred"]
SETTINGS = ["off", "no limit", "no limit on 1"]


def drawn(size: int, what: str = "") -> list[list[list[Text]]]:
    """Return the samples of each step for each of so many ranks, whose first token tells the rank that drew it.

    If they cannot be sent, no rank goes without.
    """
    generator = torch.Generator().manual_seed(0)

    def text(rank: int, tokens: int) -> Text:
        return torch.cat([torch.tensor([rank]), torch.randint(20, (tokens,), generator=generator)])

    least = [5] if what in CANNOT_BE_SENT else []
    return [[[text(rank, n) for n in own or least] for rank, own in enumerate(step[:size])] for step in LENGTHS]


class Pair(NamedTuple):
    text: Text
    number: int


@dataclass
class Held:
    text: Text
    more: Any = None


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
    if what == "slices":
        return torch.cat([torch.zeros(10**6, dtype=torch.long), text])[10**6 :]
    makers: dict[str, Callable[[], Any]] = {
        "dicts": lambda: {"text": text, "more": [1, {"b": text[:1]}]}, "tuples": lambda: Pair(text, 1),
        "objects": lambda: Held(text),
    }  # fmt: skip
    return makers[what]() if what in makers else text


def text_of(sample: Any) -> Text:
    if isinstance(sample, torch.Tensor):
        return sample
    text: Text = sample["text"] if isinstance(sample, dict) else sample.text
    return text


class Faulty:
    """A loss that runs out of memory on one rank, once, in a part with a sample of another, or in the step after it."""

    def __init__(self, what: str) -> None:
        self.place, _, rank = what.partition(" on ")
        fails = self.place in ("forward", "backward", "later") and int(rank) == RANK
        self.faults = iter([True] if fails else [])  # which stays where it is when a step puts back what it changes
        self.seen_at: int | None = None  # step of the first part with a sample of another
        self.step = 0

    def __call__(self, model: Any, batch: Any) -> Any:
        total, number = loss(model, batch)
        if not total.requires_grad or _snapshot.rehearsing:
            return total, number
        can_split = len(batch["tokens"]) > 1  # which a filler cannot
        if self.seen_at is None and can_split and (batch["tokens"][:, 0] != RANK).any():
            self.seen_at = self.step
        is_due = self.seen_at is not None and self.step == self.seen_at + (self.place == "later")
        if can_split and is_due and next(self.faults, False):
            if self.place == "backward":
                total.register_hook(two_ranks.run_out)
            else:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return total, number


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
    norms: dict[str, nn.Module] = {"BatchNorm1d": nn.BatchNorm1d(16), "Centred": Centred()}
    norm = norms.get(what.removesuffix(" off"))
    model, failing = make_model(norm=norm), Faulty(what)
    prepared = wrapped(kind, model)
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=0.01)
    step: AdaptiveStep[Any] = AdaptiveStep(
        prepared, optimizer, failing, lambda samples: collate([*map(text_of, samples)]),
        length=lambda sample: length(text_of(sample)), max_grad_norm=CLIP, balance_ranks=not what.endswith("off"),
    )  # fmt: skip
    if not (what == "no limit" or (what == "no limit on 1" and RANK == 1)):
        step.max_tokens = 10**6 if norm is not None else MAX_TOKENS
    losses, moved, messages = list[float](), list[int](), list[str]()
    with told(messages), mock.patch.object(dist, "isend", side_effect=dist.isend) as isend:
        for batch in drawn(SIZE, what):
            losses.append(step([as_sample(text, what) for text in batch[RANK]]).item())
            sharing = step._work._sharing
            share = None if sharing is None else sharing.last
            moved.append(0 if share is None else share.num_moved)
            failing.step += 1
    return {
        "losses": losses, "weights": weights_of(prepared), "moved": moved, "recoveries": step.num_recoveries,
        "sent": sum(call.args[0].numel() for call in isend.call_args_list), "forwards": model.forwards,
        "told": [message for message in messages if "stay" in message],
    }  # fmt: skip


def runs(size: int) -> list[str]:
    """Return the names of the runs on so many ranks."""
    whats = ["shared", "forward on 1", "later on 1", "lambda on 1", "unreadable on 0"]
    if size > 2:
        return [f"{kind}, {what}" for kind in KINDS for what in whats]
    of_norms = [f"{norm}{off}" for norm in NORMS for off in ("", " off")]
    of_ddp = [*whats, *FAULTS, *CANNOT_BE_SENT, *SETTINGS, *TYPES, NO_FILLER, *of_norms]
    of_shards = [*whats, *FAULTS, "no limit on 1"]
    return [
        f"{kind}, {what}" for kind, of in zip(KINDS, (of_ddp, of_shards), strict=True) for what in dict.fromkeys(of)
    ]


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
