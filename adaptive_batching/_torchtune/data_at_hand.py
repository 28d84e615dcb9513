"""The lengths of a config's samples, where its tokenizer and its data lie on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import datasets  # type: ignore[import-untyped]
import huggingface_hub
from omegaconf import DictConfig, ListConfig
from torchtune import config
from torchtune.datasets import ConcatDataset
from tqdm import tqdm

from adaptive_batching._torchtune.data import Sample, is_packed
from adaptive_batching._torchtune.preferences import KINDS


class NotAtHandError(RuntimeError):
    """Raised if the samples of a config cannot be read here; the message says why."""


@dataclass(frozen=True)
class DataAtHand:
    lengths: Sequence[int]
    """Tokens of each sample, in the order of the data."""

    packed: bool

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)


def read_data(cfg: DictConfig) -> DataAtHand:
    """Build tokenizer and data set of a config as the recipe does, but without a network, and measure all samples."""
    try:
        with _offline():
            tokenizer = config.instantiate(cfg.tokenizer)
            dataset = _build(cfg.dataset, tokenizer)
            samples = tqdm(range(len(dataset)), desc="Measuring samples", dynamic_ncols=True, leave=False)
            lengths = [_length(dataset[index]) for index in samples]
    except Exception as error:  # each format of tokenizers and data raises its own
        line = (str(error).strip().splitlines() or [""])[0]
        raise NotAtHandError(f"{type(error).__name__}: {line[:160]}") from error
    if not lengths:
        raise NotAtHandError("the data set has no samples")
    return DataAtHand(lengths, is_packed(dataset))


def _length(sample: Sample) -> int:
    """Return the tokens of a sample; of a pair, those of its longer answer."""
    return max(len(sample[key]) for key in ("tokens", *(f"{kind}_input_ids" for kind in KINDS)) if key in sample)


def _build(cfg: DictConfig | ListConfig, tokenizer: Any) -> Any:
    if isinstance(cfg, ListConfig):
        return ConcatDataset(datasets=[config.instantiate(each, tokenizer) for each in cfg])
    return config.instantiate(cfg, tokenizer)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Have data sets of a hub come from the cache alone: where there is no network, each would be waited for."""
    with contextlib.ExitStack() as stack:
        for module in (datasets.config, huggingface_hub.constants):
            for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, True))
        progress = datasets.utils.logging.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            yield
        finally:
            if progress:
                datasets.enable_progress_bars()
