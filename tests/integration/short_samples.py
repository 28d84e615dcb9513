"""Text so short that an output layer in chunks gets fewer of them than there should be."""

from __future__ import annotations

import random
from typing import Any

from torch.utils.data import Dataset


class ShortSamples(Dataset[dict[str, Any]]):
    """Random tokens, 1 to 64 to a sample."""

    def __init__(self, tokenizer: Any = None, samples: int = 64, **ignored: Any) -> None:
        chance = random.Random(0)
        lengths = [1, 64, *(chance.randint(1, 64) if i % 2 else chance.randint(1, 12) for i in range(samples - 2))]
        self._samples = [[chance.randrange(1, 700) for _ in range(length)] for length in lengths]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self._samples[index]
        return {"tokens": list(tokens), "labels": list(tokens), "mask": [False] * len(tokens)}
