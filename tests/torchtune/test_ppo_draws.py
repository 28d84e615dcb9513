"""The random numbers of a rollout: those of stock, in whatever parts it runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchtune.generation import _generation, get_causal_mask_from_padding_mask

from adaptive_batching._torchtune.ppo.rollout import Draws
from adaptive_batching._torchtune.ppo.stock_ppo import StockPPO

TOKENS, VOCABULARY = 3, 11


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def of_stock(num_rows: int, chunk: int, rng: torch.Generator) -> torch.Tensor:
    """The numbers of each row, [rows, tokens, vocabulary], drawn chunk by chunk."""
    chunks = []
    for start in range(0, num_rows, chunk):
        rows = min(chunk, num_rows - start)
        drawn = [torch.empty((rows, VOCABULARY)).exponential_(1, generator=rng) for _ in range(TOKENS)]
        chunks.append(torch.stack(drawn, dim=1))
    return torch.cat(chunks)


def of_parts(num_rows: int, chunk: int, ends: list[int], rng: torch.Generator) -> torch.Tensor:
    """The numbers that a rollout in parts samples with."""
    draws, parts, used = Draws(rng, num_rows, chunk, TOKENS, VOCABULARY), [], []

    def sample(*, q: torch.Tensor) -> None:
        used.append(q)

    original, _generation.generate_next_token = _generation.generate_next_token, sample
    try:
        for start, end in zip([0, *ends], ends, strict=False):
            for _ in range(2):  # the first time it runs out of memory
                used.clear()
                with draws.of(start, end):
                    for _ in range(TOKENS):
                        drawn = torch.empty((end - start, VOCABULARY)).exponential_(1, generator=rng)
                        _generation.generate_next_token(q=drawn)
            parts.append(torch.stack(used, dim=1))
    finally:
        _generation.generate_next_token = original
    draws.finish()
    return torch.cat(parts)


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_rows_get_the_numbers_of_stock_however_they_are_cut(num_rows: int, chunk: int, data: st.DataObject) -> None:
    inner = data.draw(st.sets(st.integers(1, num_rows - 1)) if num_rows > 1 else st.just(set()))
    ours, theirs = generator(), generator()
    expected = of_stock(num_rows, chunk, theirs)
    assert torch.equal(of_parts(num_rows, chunk, [*sorted(inner), num_rows], ours), expected)
    assert torch.equal(ours.get_state(), theirs.get_state()), "and so do the rollouts that follow"


@pytest.mark.parametrize("row", range(5))
def test_a_chunk_ends_with_the_batch_at_the_latest(row: int) -> None:
    draws = Draws(generator(), 5, 3, TOKENS, VOCABULARY)
    assert draws.end_of_chunk(row) == (3 if row < 3 else 5)


def test_attention_masks_are_those_of_torchtune() -> None:
    tokens = torch.tensor([[0, 0, 3, 4, 0], [1, 2, 3, 4, 5], [0, 0, 0, 0, 0]])  # [b, L], with 0 for padding
    masks = StockPPO.masks(SimpleNamespace(pad_id=0), tokens)  # type: ignore[arg-type]
    assert torch.equal(masks, get_causal_mask_from_padding_mask(tokens != 0))
