"""Data of random tokens, of lengths that ranks have something to share out of, or too short for all chunks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

IGNORED = -100


def uneven_samples(tokenizer: Any = None, samples: int = 64, **ignored: Any) -> list[dict[str, Any]]:
    """Log-normal lengths, 8 to 96 tokens to a sample; the first quarter is a prompt, without a loss."""
    chance = random.Random(0)
    lengths = [min(max(round(chance.lognormvariate(3, 1)), 8), 96) for _ in range(samples)]
    return of_lengths(lengths, [length // 4 for length in lengths], chance)


def short_samples(tokenizer: Any = None, samples: int = 64, **ignored: Any) -> list[dict[str, Any]]:
    """1 to 64 tokens to a sample: an output layer in chunks gets fewer of them than there should be."""
    chance = random.Random(0)
    lengths = [1, 64, *(chance.randint(1, 64) if i % 2 else chance.randint(1, 12) for i in range(samples - 2))]
    return of_lengths(lengths, [0] * samples, chance)


def of_lengths(lengths: Sequence[int], prompts: Sequence[int], chance: random.Random) -> list[dict[str, Any]]:
    found = []
    for length, prompt in zip(lengths, prompts, strict=True):
        tokens = [chance.randrange(1, 700) for _ in range(length)]
        mask = [position < prompt for position in range(length)]
        found.append({"tokens": tokens, "labels": [IGNORED] * prompt + tokens[prompt:], "mask": mask})
    return found
