"""A small model and samples of many lengths, with torch alone."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY = 50
LONGEST = 31
Sample = dict[str, torch.Tensor]


class Model(nn.Module):
    """Predicts the next token from the mean of those before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.hidden = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [b, s] -> [b, s, VOCABULARY]
        summed = self.embedding(tokens).cumsum(1)
        mean = summed / torch.arange(1, tokens.shape[1] + 1, device=tokens.device)[:, None]
        logits: torch.Tensor = self.out(self.hidden(mean).relu())
        return logits


def make_model(width: int = 16) -> Model:
    torch.manual_seed(0)
    return Model(width)


def make_data(num_samples: int = 70) -> list[Sample]:
    """Samples of ``tokens`` and ``labels``, [s] each, of up to ``LONGEST`` tokens; the token 0 is padding."""
    generator = torch.Generator().manual_seed(0)
    lengths = [LONGEST, *torch.randint(2, LONGEST, (num_samples - 1,), generator=generator).tolist()]
    texts = [torch.randint(1, VOCABULARY, (n + 1,), generator=generator) for n in lengths]
    return [{"tokens": text[:-1], "labels": text[1:]} for text in texts]
