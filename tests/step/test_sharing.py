"""How ranks agree on the share of a step that each computes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from adaptive_batching._step.sharing import Sharing

LENGTHS = [100] * 12


class OtherRank:
    """In place of two ranks, of which the second has drawn the same lengths and says what is given of it."""

    rank = 0

    def __init__(self, **told: Any) -> None:
        self.told = told

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, tuple) and len(value) == 4:
            names = ("lengths", "weight", "limit", "pace")
            return [value, tuple(self.told.get(name, own) for name, own in zip(names, value, strict=True))]
        return [value, value]

    def any(self, value: bool) -> bool:
        return value

    def exchange(self, outgoing: Any, senders: Any) -> list[bytes]:
        return [pickle.dumps({(1, index): None for index in range(len(LENGTHS))})]


def shared_with(
    seconds: float | None = None, waits: bool = False, model: nn.Module | None = None, **told: Any
) -> Sharing:
    sharing = Sharing(OtherRank(**told), model or nn.Embedding(9, 64), waits=waits)  # type: ignore[arg-type]
    for _ in range(20):
        if seconds is not None:
            sharing.observe([50, 50], seconds, pads=False)
    sharing.parts([None] * len(LENGTHS), LENGTHS, 1.0, None, pads=False)
    return sharing


def samples_here(sharing: Sharing) -> int:
    assert sharing.last is not None
    return sum(map(len, sharing.last.parts[0]))


@pytest.mark.parametrize(
    ("seconds", "waits", "pace", "expected"),
    [
        (1.0, False, 1 / 113, 12),
        (0.5, False, 1 / 113, 18),
        (0.5, True, 1 / 113, 12),  # the pace of ranks that wait for each other says nothing
        (None, False, 1 / 113, 12),
        (1.0, False, None, 12),
    ],
)
def test_a_rank_that_is_measured_to_be_faster_computes_more(
    seconds: float | None, waits: bool, pace: float | None, expected: int
) -> None:
    assert samples_here(shared_with(seconds=seconds, waits=waits, pace=pace)) == expected


def test_ranks_share_out_by_what_attention_costs_in_a_model_of_this_width() -> None:
    """The other has a sample of as many tokens as six of this rank."""
    lengths = [600, *[100] * 6]
    assert samples_here(shared_with(model=nn.Embedding(9, 6400), lengths=lengths)) == 12
    assert samples_here(shared_with(model=nn.Embedding(9, 16), lengths=lengths)) > 12


@pytest.mark.parametrize("told", [{"weight": 2.0}, {"weight": None}], ids=str)
def test_samples_that_weigh_otherwise_on_another_rank_stay(
    told: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    sharing = shared_with(**told, lengths=[10])
    assert sharing.last is None
    assert sharing.parts([None], [9], 1.0, None, pads=False) is None
    assert caplog.text.count("samples are not balanced over ranks") == 1, "said once"


class Attention(nn.Module):
    def __init__(self, attention_dropout: float) -> None:
        super().__init__()
        self.attention_dropout = attention_dropout


@pytest.mark.parametrize("made", [nn.Dropout, Attention])
def test_where_samples_move_it_is_said_once_that_dropout_draws_otherwise(
    made: Callable[[float], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    few = [10] * 3
    for model, lengths in ((made(0.0), few), (made(0.1).eval(), few), (made(0.1), LENGTHS)):
        shared_with(model=nn.Sequential(model), lengths=lengths)
        assert "dropout" not in caplog.text
    sharing = shared_with(model=nn.Sequential(made(0.1)), lengths=few)
    sharing.parts([None] * len(LENGTHS), LENGTHS, 1.0, None, pads=False)
    assert caplog.text.count("where dropout draws other numbers") == 1


def test_a_step_that_is_not_shared_out_has_no_balance() -> None:
    """As one whose samples weigh otherwise on another rank."""
    sharing = shared_with()
    assert len(sharing.balance) == 3
    assert sharing.parts([None] * len(LENGTHS), LENGTHS, None, None, pads=False) is None
    assert len(sharing.balance) == 0


def test_the_least_limit_of_all_ranks_counts() -> None:
    sharing = shared_with(limit=300)
    assert sharing.last is not None
    assert all(len(part) <= 3 for turns in sharing.last.parts for part in turns)
