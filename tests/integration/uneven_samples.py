"""Text of very unequal lengths, so that ranks have something to share out."""

from __future__ import annotations

import random
from typing import Any

from torch.utils.data import Dataset

LONGEST = 96


class UnevenSamples(Dataset[dict[str, Any]]):
    """Random tokens of log-normal lengths, 8 to 96 to a sample; the first quarter is a prompt, without a loss."""

    def __init__(self, tokenizer: Any = None, samples: int = 64, **ignored: Any) -> None:
        chance = random.Random(0)
        lengths = [min(max(round(chance.lognormvariate(3, 1)), 8), LONGEST) for _ in range(samples)]
        self._samples = [[chance.randrange(1, 700) for _ in range(length)] for length in lengths]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self._samples[index]
        is_prompt = [position < len(tokens) // 4 for position in range(len(tokens))]
        labels = [-100 if ignored else token for token, ignored in zip(tokens, is_prompt, strict=True)]
        return {"tokens": list(tokens), "labels": labels, "mask": is_prompt}
