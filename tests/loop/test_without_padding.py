"""The example of the docstring, whose samples lie end to end, trains as one sample at a time does."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from adaptive_batching import AdaptiveStep, attention
from adaptive_batching.attention import SampleBounds, attend_within_samples

HEADS, WIDTH, VOCABULARY = 4, 32, 50


class Decoder(nn.Module):
    """Attends as the docstring says if it is given bounds, and as torch does if not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.qkv, self.mixed, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def forward(self, tokens: torch.Tensor, bounds: SampleBounds | None = None) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1])[None] if bounds is None else bounds.positions()
        hidden = self.tokens(tokens) + self.positions(positions)  # [b, s, width]
        query, key, value = self.qkv(hidden).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()
        if bounds is None:
            out = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            names: dict[str, Any] = {"attend_within_samples": attend_within_samples}
            names.update(query=query, key=key, value=value, bounds=bounds)
            exec(shown()[1], names)
            out = names["out"]
        return self.out(hidden + self.mixed(out.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def shown() -> tuple[str, str]:
    """Return the code of the docstring: what goes with a loop, and what is in a model."""
    paragraphs = [textwrap.dedent(text) for text in (attention.__doc__ or "").split("\n\n") if text.startswith("    ")]
    return "\n".join(paragraphs[:-1]), paragraphs[-1]


def make_data() -> list[dict[str, torch.Tensor]]:
    chance = torch.Generator().manual_seed(1)
    rows = [torch.randint(VOCABULARY, (length + 1,), generator=chance) for length in (7, 15, 1, 9, 3, 12)]
    return [{"tokens": row[:-1], "labels": row[1:]} for row in rows]


@pytest.mark.parametrize("fails", [False, True])
def test_the_example_without_padding_has_the_gradient_of_one_sample_at_a_time(fails: bool) -> None:
    names: dict[str, Any] = {"torch": torch, "cross_entropy": cross_entropy, "SampleBounds": SampleBounds}
    exec(shown()[0], names)
    collate: Callable[..., Any] = names["collate"]
    model, data = Decoder(), make_data()
    step = AdaptiveStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), names["loss"], collate,
        length=lambda sample: len(sample["tokens"]),
    )  # fmt: skip
    left = [1] if fails else []

    def run_out(module: nn.Module, args: Any) -> None:
        if args[0].numel() > 40 and left:
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(run_out)
    loss = step.gradients(data)
    assert not left and step.num_recoveries == fails

    expected, total = Decoder(), sum(len(sample["labels"]) for sample in data)
    losses = []
    for sample in data:
        logits = expected(sample["tokens"][None])
        losses.append(cross_entropy(logits[0], sample["labels"], reduction="sum") / total)
        losses[-1].backward()  # type: ignore[no-untyped-call]
    assert float(loss) == pytest.approx(float(torch.stack(losses).sum()), rel=1e-6)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-8)
