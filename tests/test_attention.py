"""Attention within samples that lie end to end, against each sample by itself."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from adaptive_batching._attention import SampleBounds, attend_within_samples

LENGTHS = (7, 1, 12, 5)


def inputs(heads_of_key: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), 8) for heads in (4, heads_of_key, heads_of_key)]
    return [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in shapes]


def scores_seen(length: int, window: int | None, *, causal: bool) -> torch.Tensor:
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


@pytest.mark.parametrize(("causal", "window", "heads_of_key"), itertools.product([True, False], [None, 3, 40], [4, 2]))
def test_each_sample_attends_to_itself_alone(causal: bool, window: int | None, heads_of_key: int) -> None:
    row, alone = inputs(heads_of_key), inputs(heads_of_key)
    output = attend_within_samples(*row, SampleBounds(LENGTHS), causal=causal, window=window, scale=0.3)
    expected = []
    for q, k, v in zip(*(tensor.split(LENGTHS, 2) for tensor in alone), strict=True):
        mask = scores_seen(q.shape[2], window, causal=causal)
        expected.append(scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True))
    assert torch.allclose(output, torch.cat(expected, 2), rtol=1e-12)
    weights = torch.randn_like(output)
    (output * weights).sum().backward()
    (torch.cat(expected, 2) * weights).sum().backward()
    for one, other in zip(row, alone, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=1e-10)


def test_positions_start_over_in_each_sample() -> None:
    bounds = SampleBounds([3, 1, 2])
    assert bounds.positions().tolist() == [[0, 1, 2, 0, 0, 1]]
    assert bounds.starts() == [0, 3, 4]
    assert bounds.offsets(torch.empty(0)).tolist() == [0, 3, 4, 6]


def test_a_row_of_other_tokens_than_the_samples_have_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 24 tokens"):
        attend_within_samples(*inputs(4), SampleBounds([20, 4]))
    with pytest.raises(ValueError, match="at least one token each"):
        SampleBounds([3, 0])


def test_autocast_casts_as_it_does_for_the_attention_of_torch() -> None:
    """Where positions are in float32, queries and keys are, and values are not."""
    bounds = SampleBounds([5, 3])
    query, key, value = torch.randn(3, 1, 2, 8, 16).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        output = attend_within_samples(query, key, value.bfloat16(), bounds)
        first = scaled_dot_product_attention(query[:, :, :5], key[:, :, :5], value[:, :, :5].bfloat16(), is_causal=True)
    assert output.dtype == first.dtype == torch.bfloat16
    assert torch.equal(output[:, :, :5], first)
