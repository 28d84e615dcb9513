"""The random numbers of a rollout: those of stock, in whatever parts it runs."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from torchtune.generation import _generation, get_causal_mask_from_padding_mask

from adaptive_batching._torchtune.ppo.rollouts import RolloutRandomNumbers
from adaptive_batching._torchtune.ppo.stock_ppo import StockPPO

TOKENS, VOCABULARY = 3, 11


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def drawn(rows: int, rng: torch.Generator) -> torch.Tensor:
    return torch.empty((rows, VOCABULARY)).exponential_(1, generator=rng)


def of_stock(num_rows: int, chunk: int, rng: torch.Generator) -> torch.Tensor:
    """The numbers of each row, [rows, tokens, vocabulary], drawn chunk by chunk."""
    sizes = [min(chunk, num_rows - start) for start in range(0, num_rows, chunk)]
    return torch.cat([torch.stack([drawn(rows, rng) for _ in range(TOKENS)], dim=1) for rows in sizes])


def of_parts(num_rows: int, chunk: int, ends: list[int], rng: torch.Generator) -> torch.Tensor:
    """The numbers that a rollout in parts samples with."""
    draws, parts, used = RolloutRandomNumbers(rng, num_rows, chunk, TOKENS, VOCABULARY), [], list[torch.Tensor]()
    with mock.patch.object(_generation, "generate_next_token", lambda *, q: used.append(q)):
        for start, end in zip([0, *ends], ends, strict=False):
            for _ in range(2):  # the first time it runs out of memory
                used.clear()
                with draws.for_rows(start, end):
                    for _ in range(TOKENS):
                        _generation.generate_next_token(q=drawn(end - start, rng))
            parts.append(torch.stack(used, dim=1))
    draws.finish()
    return torch.cat(parts)


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_rows_get_the_numbers_of_stock_however_they_are_cut(num_rows: int, chunk: int, data: st.DataObject) -> None:
    inner = data.draw(st.sets(st.integers(1, num_rows - 1)) if num_rows > 1 else st.just(set()))
    ours, theirs = generator(), generator()
    expected = of_stock(num_rows, chunk, theirs)
    assert torch.equal(of_parts(num_rows, chunk, [*sorted(inner), num_rows], ours), expected)
    assert torch.equal(ours.get_state(), theirs.get_state()), "and so do the rollouts that follow"


def test_attention_masks_are_those_of_torchtune() -> None:
    tokens = torch.tensor([[0, 0, 3, 4, 0], [1, 2, 3, 4, 5], [0, 0, 0, 0, 0]])  # [b, L], with 0 for padding
    masks = StockPPO.masks(SimpleNamespace(pad_id=0), tokens)  # type: ignore[arg-type]
    assert torch.equal(masks, get_causal_mask_from_padding_mask(tokens != 0))
