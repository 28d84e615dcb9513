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
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from adaptive_batching._attention import SampleBounds, attend_within_samples, sample_by_sample
from adaptive_batching._step.split import in_last_place

NAME = "samples_end_to_end"
"""Of the attention, in configs, while a row runs."""

IGNORED = -100
"""Label of a token that is no target."""

_BY_THE_FILE = ("softcap", "s_aux", "position_bias")  # arguments that the function of a model's own file takes alone
_LONG = 2**17  # tokens of a sample for which a mask is compared
_FEW_TOKENS = (6, 9, 4)  # of pieces that are run to see whether a row is honoured
_LARGEST_TABLE = 2048  # positions for which a model has weights or buffers, up to which a row of more is tried
_SPARE = 8  # that such a table may have besides
# Differences of a token between two rows: of what goes into a module, if it is the same, and of what comes out, if the
# module carries something over from another sample. Between the two is rounding, of experts that get other numbers.
_SAME, _CARRIED = 1e-5, 0.05


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
        return Row(_without_first(inputs, bounds, targets, self.no_target), bounds, self.counted, self.no_target)


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
        if _is_of(mask.shape, value) and value[~keep].ne(_none(value, key, no_target)).any():
            raise NoRowError(f"{key!r} of its batches has targets in padding, which a row would leave out")
    # What has no entry for each token stays as it is, such as indices of samples: a model that takes it shows.
    inputs = {key: value[keep][None] if _is_of(mask.shape, value) else value for key, value in batch.items()}
    bounds = SampleBounds(lengths.tolist())
    inputs.setdefault("position_ids", bounds.positions())
    counted = dict(batch)
    if first.any():  # with padding on the left, the first token would be predicted from padding
        rows = torch.arange(len(mask))
        for key in targets:
            counted[key] = counted[key].clone()
            counted[key][rows, first] = _none(counted[key], key, no_target)
    return Row(_without_first(inputs, bounds, targets, no_target), bounds, counted, no_target)


def _is_of(shape: tuple[int, ...], value: Any) -> bool:
    """Return True for a tensor with an entry for each token of ``shape``, [b, s] or [1, tokens]."""
    return isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == tuple(shape)


def _without_first(
    inputs: dict[str, Any], bounds: SampleBounds, targets: Sequence[str], no_target: Mapping[str, int]
) -> dict[str, Any]:
    changed = {}
    for key in targets:
        changed[key] = inputs[key].clone()
        changed[key][:, bounds.starts()] = _none(inputs[key], key, no_target)
    return {**inputs, **changed}


def _none(values: torch.Tensor, key: str, no_target: Mapping[str, int]) -> int:
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
    def within(self, bounds: SampleBounds, attend: Callable[..., Any] | None = None) -> Iterator[None]:
        """Run forward and backward of a row inside; ``attend`` to watch what attention is given."""
        global _running
        before = [config._attn_implementation_internal for config in self._configs]
        around, _running = _running, bounds
        AttentionInterface.register(NAME, attend or _attend)
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
def _attend(
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
    bounds, causal, window = _running, _is_causal(module, is_causal), _window(sliding_window)
    if any(others.get(name) is not None for name in _BY_THE_FILE):
        return _attend_by_the_file(module, (query, key, value), causal, window, scaling, dropout, others), None
    output = attend_within_samples(query, key, value, bounds, causal=causal, scale=scaling, window=window,
                                   dropout=dropout)  # fmt: skip
    return output.transpose(1, 2).contiguous(), None


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _window(sliding_window: Any) -> int | None:
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


# Which models honour it


class Watch:
    """Sees which layers attend within samples, and that their masks are no others than causal order and a window."""

    def __init__(self) -> None:
        self._modules: set[int] = set()
        self.mask: str | None = None
        """Whose mask is another, in words; None if none is."""

    @contextlib.contextmanager
    def on(self, attention: RowAttention, bounds: SampleBounds) -> Iterator[None]:
        """Watch a row that runs inside, with masks as models ask for them, by index."""
        AttentionMaskInterface.register(NAME, _Mask)
        try:
            with attention.within(bounds, self._attend):
                yield
        finally:
            AttentionMaskInterface._global_mapping.pop(NAME, None)

    def _attend(
        self, module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **others: Any
    ) -> Any:
        self._modules.add(id(module))
        if isinstance(attention_mask, _Mask):
            causal, window = _is_causal(module, others.get("is_causal")), _window(others.get("sliding_window"))
            if not attention_mask.is_as(causal, window):
                self.mask = f"the mask of {type(module).__name__} is more than causal order and a window"
        elif attention_mask is not None:
            self.mask = f"{type(module).__name__} has a mask of its own"
        return _attend(module, query, key, value, None, *args, **others)

    def explains(self, error: Exception) -> bool:
        """Return True if a model has failed on a mask that is another; layers that had not run yet are no reason."""
        return self.mask is not None or _Mask.__name__ in str(error)

    def why_not(self, model: nn.Module) -> str | None:
        """Return why rows would go wrong, in words; None if nothing speaks against them."""
        if self.mask is not None:
            return self.mask
        layers = _of_text(model, "num_hidden_layers") or 1
        if len(self._modules) < layers:
            return f"{len(self._modules)} of {layers} layers attend by transformers' AttentionInterface"
        return None


class _Mask:
    """A mask as a model asks for it: which tokens see which, by their index."""

    def __init__(self, *, mask_function: Callable[..., torch.Tensor], **others: Any) -> None:
        self._sees = mask_function

    def is_as(self, causal: bool, window: int | None) -> bool:
        """Return True if it is that of attention that is ``causal`` or not, with a ``window`` or without."""
        key = torch.arange(_LONG)[None, None, None]
        none = torch.zeros(1, 1, 1, 1, dtype=torch.long)
        for number in (0, 1, _LONG // 2, _LONG - 1):
            query = none + number
            expected = torch.ones_like(key, dtype=torch.bool)
            if causal:
                expected &= key <= query
            if window is not None:
                expected &= (key > query - window) & (key < query + window)
            if not torch.equal(self._sees(none, none, query, key).expand(key.shape), expected):
                return False
        return True


class Carried:
    """Sees what each module makes of the tokens after a row's first sample, in rows that differ in that alone.

    State that runs on may change a gradient by little more than rounding does, and the tokens next to it by half.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._rows: list[list[tuple[str, list[torch.Tensor], list[torch.Tensor]]]] = []

    @contextlib.contextmanager
    def on(self, attention: RowAttention, bounds: SampleBounds) -> Iterator[None]:
        """Watch a row that runs inside."""
        calls: list[tuple[str, list[torch.Tensor], list[torch.Tensor]]] = []
        entered: list[list[torch.Tensor]] = []  # what has gone into the modules that are running, the innermost last
        names = {module: name for name, module in self._model.named_modules()}

        def after(values: Any) -> list[torch.Tensor]:
            found = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
            rows = [value[0] if value.shape[:2] == (1, bounds.tokens) else value for value in found]
            rows = [row for row in rows if row.is_floating_point() and row.shape[:1] == (bounds.tokens,)]
            start = bounds.lengths[0]
            return [
                row[start:].detach().to("cpu", torch.float32, copy=True).flatten(1) for row in rows if row.dim() > 1
            ]

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            entered.append(after((args, kwargs)))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            calls.append((f"{names[module]} ({type(module).__name__})", entered.pop(), after(output)))

        self._rows.append(calls)
        with contextlib.ExitStack() as stack, attention.within(bounds):
            for module in names:
                stack.enter_context(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(leave, always_call=True))
            yield

    def module(self) -> str | None:
        """Name the first module that has carried something over from the first sample; None if none has."""
        first, second = self._rows
        for (name, went_in, came_out), (_, went_in_too, came_out_too) in zip(first, second, strict=True):
            ins, outs = _most(went_in, went_in_too), _most(came_out, came_out_too)
            if ins is not None and outs is not None and ins < _SAME and outs > _CARRIED:
                return name
        return None


def _most(rows: list[torch.Tensor], others: list[torch.Tensor]) -> float | None:
    """Return the largest difference of a token, relative to it; None if there are none, or of other shapes."""
    if not rows or [row.shape for row in rows] != [other.shape for other in others]:
        return None
    off = [
        ((row - other).norm(dim=1) / (other.norm(dim=1) + 1e-20)).max() for row, other in zip(rows, others, strict=True)
    ]
    return float(torch.stack(off).max())


def _of_text(model: nn.Module, name: str) -> int | None:
    """Return a number from the config of what reads text in ``model``; None if it has none."""
    configs = (getattr(module, "config", None) for module in model.modules())
    config = next((config for config in configs if isinstance(config, PretrainedConfig)), None)
    value = None if config is None else getattr(config.get_text_config(), name, None)
    return value if isinstance(value, int) else None


@dataclass(frozen=True)
class Piece:
    """A few tokens of a sample."""

    tokens: dict[str, torch.Tensor]  # [tokens, ...]
    others: dict[str, Any]  # as in a batch of this sample

    def alone(self) -> dict[str, Any]:
        """Return it as a batch."""
        return {**{key: value[None] for key, value in self.tokens.items()}, **self.others}

    def changed(self, **tokens: torch.Tensor) -> Piece:
        return Piece({**self.tokens, **tokens}, self.others)


def pieces_of(row: Row, key: str) -> list[Piece]:
    """Return a few tokens of each of up to three samples of a row that have targets in ``key``, of unlike lengths."""
    pieces: list[Piece] = []
    bounds, of_tokens = row.bounds, {}
    for name, value in row.inputs.items():
        if name != "position_ids" and _is_of((1, bounds.tokens), value):
            of_tokens[name] = value[0]
    if key not in of_tokens:
        raise NoRowError(f"{key!r} of its batches has no entry for each token")
    others = {name: value for name, value in row.inputs.items() if name not in (*of_tokens, "position_ids")}
    for number, (start, length) in enumerate(zip(bounds.starts(), bounds.lengths, strict=True)):
        values = of_tokens[key][start : start + length]
        places = values.ne(_none(values, key, row.no_target)).reshape(length, -1).any(1).nonzero().flatten().tolist()
        if places and len(pieces) < len(_FEW_TOKENS):
            end = start + places[-1] + 1
            begin = max(end - _FEW_TOKENS[len(pieces)], start)
            tokens = {name: value[begin:end] for name, value in of_tokens.items()}
            tokens["attention_mask"] = torch.ones(end - begin, dtype=torch.long)
            of_sample = {
                name: value[number : number + 1] if _is_by_sample(value, len(bounds.lengths)) else value
                for name, value in others.items()
            }
            pieces.append(Piece(tokens, of_sample))
    return pieces * 2 if len(pieces) == 1 else pieces


def _is_by_sample(value: Any, num_samples: int) -> bool:
    has_length = isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.dim() > 0)
    return has_length and len(value) == num_samples


def joined(pieces: Sequence[Piece], targets: Sequence[str], no_target: Mapping[str, int]) -> Row:
    """Return pieces as a row."""
    bounds = SampleBounds([len(piece.tokens["attention_mask"]) for piece in pieces])
    inputs: dict[str, Any] = {key: torch.cat([piece.tokens[key] for piece in pieces])[None] for key in pieces[0].tokens}
    for key, value in pieces[0].others.items():
        inputs[key] = value
        if _is_by_sample(value, 1):
            values = [piece.others[key] for piece in pieces]
            inputs[key] = (
                torch.cat(values) if isinstance(value, torch.Tensor) else [each for of in values for each in of]
            )
    inputs["position_ids"] = bounds.positions()
    return Row(_without_first(inputs, bounds, targets, no_target), bounds, inputs, no_target)


def with_another_first(
    pieces: Sequence[Piece], model: nn.Module, key: str, no_target: Mapping[str, int]
) -> tuple[list[Piece], list[Piece]]:
    """Return pieces twice, the first without targets and once with other tokens.

    For a model with a table of few positions they are repeated, so that there are more in the row than in the table.
    """
    first, *rest = pieces
    values, ids = first.tokens[key], first.tokens["input_ids"]
    known = torch.unique(torch.cat([piece.tokens["input_ids"] for piece in pieces]))
    first = first.changed(**{key: torch.full_like(values, _none(values, key, no_target))})
    other = first.changed(input_ids=known[(torch.searchsorted(known, ids) + 1) % len(known)])
    positions = _of_text(model, "max_position_embeddings") or 0
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    has_table = positions <= _LARGEST_TABLE and sizes & {*range(positions, positions + _SPARE + 1)}
    times = positions // sum(len(piece.tokens[key]) for piece in rest) + 1 if has_table else 1
    return [first, *rest * times], [other, *rest * times]
