"""Samples for models whose tokenizer is not there: what they say is of no matter on a device that computes nothing."""

from __future__ import annotations

import random
from typing import Any

from torch.utils.data import Dataset


class Tokenizer:
    """As much of a tokenizer as a recipe asks for."""

    pad_id = 0

    def __init__(self, max_seq_len: int, **ignored: Any) -> None:
        self.max_seq_len = max_seq_len


class Samples(Dataset[dict[str, Any]]):
    """Samples of as many tokens; if they vary, so many are one in twenty, and the others have far fewer."""

    def __init__(
        self, tokenizer: Any = None, samples: int = 32768, tokens: int = 16, varies: bool = False, **ignored: Any
    ) -> None:
        chance = random.Random(0)
        self._lengths = [
            chance.randint(tokens // 8, tokens // 2) if varies and index % 20 else tokens for index in range(samples)
        ]

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = [1] * self._lengths[index]
        return {"tokens": tokens, "labels": list(tokens), "mask": [False] * len(tokens)}


class Preferences(Samples):
    """Pairs of samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = super().__getitem__(index)["tokens"]
        kinds = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
        return {kind: list(tokens) for kind in kinds}
