"""NEFTune's noise in parts of a batch: its scale is that of the batch, whatever the part is padded to.

NEFTune divides its noise by the root of the length to which samples are padded, which is that of the longest in a
batch. So a sample shares a forward with others of its batch alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn


class NeftuneNoise:
    """The noise that embeddings of ``model`` add, if it has any."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[Any] = [module for module in model.modules() if hasattr(module, "neftune_noise_alpha")]

    def __bool__(self) -> bool:
        """Return True if noise is added."""
        return bool(self._modules)

    def factors(self, lengths: Sequence[float], batches: Sequence[int], *, pads: bool) -> list[float]:
        """Return what the noise of each part is multiplied by, so that it is that of whole batches.

        Args:
            lengths: Tokens that each part is padded to, or has end to end.
            batches: The batch that each part is of.
            pads: False if samples are laid end to end: the length of a batch is then that of all its samples.
        """
        of_batch = [[lengths[at] for at, other in enumerate(batches) if other == batch] for batch in batches]
        join = max if pads else math.fsum
        return [math.sqrt(length / join(others)) for length, others in zip(lengths, of_batch, strict=True)]

    @contextlib.contextmanager
    def times(self, factor: float) -> Iterator[None]:
        """Multiply the noise by ``factor`` inside."""
        before = [module.neftune_noise_alpha for module in self._modules]
        for module, alpha in zip(self._modules, before, strict=True):
            module.neftune_noise_alpha = factor * alpha
        try:
            yield
        finally:
            for module, alpha in zip(self._modules, before, strict=True):
                module.neftune_noise_alpha = alpha
