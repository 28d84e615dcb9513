"""Models of transformers on samples that lie end to end in one row, [1, tokens]: each attends to itself alone.

The row is made of what the user's collate function returns, so that tokens, labels and all else are those of the padded
batch. Attention goes through transformers' registry, under a name that configs have while a row runs, forward and
backward. The model is not told where the samples lie; the attention looks it up: wrappers and models drop arguments
that they do not know, and checkpointed layers run again in a backward pass, on CUDA in a thread of its own. Which
models compute a row as they do its samples is measured, not listed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig

from adaptive_batching._attention import SampleBounds, attend_within_samples, sample_by_sample
from adaptive_batching._step.split import in_last_place

NAME = "samples_end_to_end"
"""Of the attention, in configs, while a row runs."""

IGNORED = -100
"""Label of a token that is no target."""

_BY_THE_FILE = ("softcap", "s_aux", "position_bias")  # arguments that the function of a model's own file takes alone


class NoRowError(Exception):
    """Raised where samples cannot lie end to end; its text says why."""


# A row


@dataclass(frozen=True)
class Row:
    """Samples end to end, as keyword arguments of a model."""

    inputs: dict[str, Any]
    bounds: SampleBounds

    counted: Mapping[str, Any]
    """The batch that it was made of, with the same targets, to count them."""

    no_target: Mapping[str, int] = field(default_factory=dict)
    """By the key of targets, the number that is none; ``IGNORED`` for others."""

    def cut_again(self, shortest: int, targets: Sequence[str]) -> Row:
        """Return the row with its last sample cut into several, as :func:`in_last_place` says."""
        *others, last = self.bounds.lengths
        bounds = SampleBounds([*others, *in_last_place(last, shortest)])
        inputs = {**self.inputs, "position_ids": bounds.positions()}
        return Row(without_first(inputs, bounds, targets, self.no_target), bounds, self.counted, self.no_target)


_OF_LABELS = {"labels": IGNORED}


def row_of(
    batch: Mapping[str, Any], targets: Sequence[str] = (), no_target: Mapping[str, int] = MappingProxyType(_OF_LABELS)
) -> Row:
    """Return what a collate function has returned as a row, without its padding.

    A batch of one row without an attention mask is one already: samples begin where ``position_ids`` start over.

    Args:
        batch: An ``attention_mask``, [b, s], on the host, and others of as many tokens, [b, s, ...].
        targets: Keys of what belongs to the prediction from the token before: for the first token of a sample, that is
            none of its own.
        no_target: By the key of what is learnt wherever it is a target, be that in padding, the number that is none.

    Raises:
        NoRowError: If it is no such batch, or a target would be lost with the padding.
    """
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is None and isinstance(positions, torch.Tensor) and positions.dim() == 2 and len(positions) == 1:
        begins = positions[0].diff(prepend=positions[0, :1] - 2).ne(1).nonzero().flatten()
        bounds = SampleBounds(torch.cat([begins, torch.tensor([positions.shape[1]])]).diff().tolist())
        return Row(dict(batch), bounds, batch, no_target)  # without targets where samples begin
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise NoRowError("its batches have no attention_mask of a number for each token")
    keep = mask.bool()  # [b, s]
    lengths, first = keep.sum(1), keep.int().argmax(1)
    place = torch.arange(mask.shape[1])[None]
    in_one_piece = (place >= first[:, None]) & (place < (first + lengths)[:, None])
    if not torch.equal(keep.to(mask.dtype), mask) or not torch.equal(keep, in_one_piece) or not lengths.all():
        raise NoRowError("its attention_mask has other numbers than 1 for the tokens of a sample and 0 for padding")
    for key in no_target:
        value: Any = batch.get(key)
        if has_entries(mask.shape, value) and value[~keep].ne(no_target_of(value, key, no_target)).any():
            raise NoRowError(f"{key!r} of its batches has targets in padding, which a row would leave out")
    # What has no entry for each token stays as it is, such as indices of samples: a model that takes it shows.
    inputs = {key: value[keep][None] if has_entries(mask.shape, value) else value for key, value in batch.items()}
    bounds = SampleBounds(lengths.tolist())
    inputs.setdefault("position_ids", bounds.positions())
    counted = dict(batch)
    if first.any():  # with padding on the left, the first token would be predicted from padding
        rows = torch.arange(len(mask))
        for key in targets:
            counted[key] = counted[key].clone()
            counted[key][rows, first] = no_target_of(counted[key], key, no_target)
    return Row(without_first(inputs, bounds, targets, no_target), bounds, counted, no_target)


def has_entries(shape: tuple[int, ...], value: Any) -> bool:
    """Return True for a tensor with an entry for each token of ``shape``, [b, s] or [1, tokens]."""
    return isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == tuple(shape)


def without_first(
    inputs: dict[str, Any], bounds: SampleBounds, targets: Sequence[str], no_target: Mapping[str, int]
) -> dict[str, Any]:
    changed = {}
    for key in targets:
        changed[key] = inputs[key].clone()
        changed[key][:, bounds.starts()] = no_target_of(inputs[key], key, no_target)
    return {**inputs, **changed}


def no_target_of(values: torch.Tensor, key: str, no_target: Mapping[str, int]) -> int:
    return 0 if values.is_floating_point() or values.dtype == torch.bool else no_target.get(key, IGNORED)


# Attention

_running: SampleBounds | None = None  # of the row that runs; one at a time in a process, whatever the thread


class RowAttention:
    """Has the attention of ``model`` stay within the samples of a row, while that runs."""

    def __init__(self, model: nn.Module) -> None:
        configs = [getattr(module, "config", None) for module in model.modules()]
        self._configs: list[PretrainedConfig] = []
        while configs:
            config = configs.pop()
            if isinstance(config, PretrainedConfig) and all(config is not one for one in self._configs):
                self._configs.append(config)
                configs += [getattr(config, name, None) for name in config.sub_configs]

    @contextlib.contextmanager
    def within(self, bounds: SampleBounds, attention: Callable[..., Any] | None = None) -> Iterator[None]:
        """Run forward and backward of a row inside; ``attention`` to watch what attention is given."""
        global _running
        before = [config._attn_implementation_internal for config in self._configs]
        around, _running = _running, bounds
        AttentionInterface.register(NAME, attention or attend)
        try:
            for config in self._configs:
                config._attn_implementation_internal = NAME
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = name
            AttentionInterface._global_mapping.pop(NAME, None)
            _running = around


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: Any = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention within the samples of the row that runs, [1, tokens, heads, head size]."""
    assert _running is not None
    bounds, causal, window = _running, attends_causally(module, is_causal), window_of(sliding_window)
    if any(others.get(name) is not None for name in _BY_THE_FILE):
        return _attend_by_the_file(module, (query, key, value), causal, window, scaling, dropout, others), None
    output = attend_within_samples(query, key, value, bounds, causal=causal, scale=scaling, window=window,
                                   dropout=dropout)  # fmt: skip
    return output.transpose(1, 2).contiguous(), None


def attends_causally(module: nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def window_of(sliding_window: Any) -> int | None:
    return sliding_window if isinstance(sliding_window, int) and sliding_window > 0 else None


def _attend_by_the_file(
    module: nn.Module,
    row: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    causal: bool,
    window: int | None,
    scaling: float | None,
    dropout: float,
    others: Mapping[str, Any],
) -> torch.Tensor:
    """Attend sample by sample with the function of the model's own file, which knows what others lack."""
    assert _running is not None
    files = (sys.modules[each.__module__] for each in type(module).__mro__)
    attention = next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))
    outputs = []
    seen_in_longest = _running.band(row[0], window or _running.longest, causal=causal)
    for query, key, value in sample_by_sample(_running, *row):
        seen = seen_in_longest[: query.shape[2], : query.shape[2]]
        mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, torch.finfo(query.dtype).min)
        given = {**others, "scaling": scaling, "dropout": dropout, "sliding_window": window}
        outputs.append(attention(module, query, key, value, mask[None, None], **given)[0].flatten(0, 1))
    return torch.cat(outputs)[None]
