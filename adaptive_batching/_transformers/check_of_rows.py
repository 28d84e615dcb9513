"""Does a model compute a packed row as it does its samples? Checks gradients, masks, and state that is carried over.

The judge compares rows of whole samples with their padded batch afterwards. Here a few tokens run, all of them targets,
as the first of a sample seldom is. Masks may differ for long samples alone, and what one sample changes in the next may
be little more than rounding in half precision: these are looked at as well.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from adaptive_batching._attention import SampleBounds
from adaptive_batching._loop.samples import collated
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._state import rehearsal
from adaptive_batching._step.judge import gradient_error
from adaptive_batching._transformers.handed_out import Sample, has_decoder
from adaptive_batching._transformers.row_of_samples import (
    NAME,
    NoRowError,
    Row,
    RowAttention,
    attend,
    attends_causally,
    has_entries,
    no_target_of,
    window_of,
    without_first,
)
from adaptive_batching._values import DRY_RUN, first_line, percent

_LONG = 2**17  # tokens of a sample for which a mask is compared
_FEW_TOKENS = (6, 9, 4)  # of pieces that are run to see whether a row is honoured
_LARGEST_TABLE = 2048  # positions for which a model has weights or buffers, up to which a row of more is tried
_SPARE = 8  # that such a table may have besides
# Differences of a token between two rows: of what goes into a module, if it is the same, and of what comes out, if the
# module carries something over from another sample. Between the two is rounding, of experts that get other numbers.
_SAME, _CARRIED = 1e-5, 0.05


def check_rows(
    step: Any, model: nn.Module, samples: Sequence[Sample], targets: Sequence[str], ranks: Ranks
) -> str | None:
    """Return how far the gradient of a row is from that of its samples, in words; None for rounding.

    A few tokens of some samples run by themselves and in a row, and in two rows that differ in the first sample, which
    has no targets: all of it as parts of training run, and nothing of it stays.

    Args:
        step: The ``StepInParts`` that runs them.
        model: What is trained.
        samples: As from the data.
        targets: Keys of what belongs to the prediction from the token before.
        ranks: That train together.

    Raises:
        NoRowError: If samples cannot lie end to end; its text says why.
    """
    kind, attention = step.kind, RowAttention(model)
    if has_decoder(model):
        raise NoRowError("it has an encoder and a decoder")
    if kind.of == "samples":
        raise NoRowError(f"its loss is {kind}, and a row has tokens")
    row = step.row_of_batch(collated(samples, step.collate), ())
    targets = tuple(key for key in targets if key in row.inputs and "shift_labels" not in row.inputs)
    pieces = pieces_of(row, kind.key)
    if not pieces:
        raise NoRowError("no sample has targets")
    batches, watch, parameters = [piece.batch() for piece in pieces], MaskWatch(), step.parameters()
    numbers = [kind.count(batch, 1) for batch in batches]
    total = sum(numbers)

    def in_row(pieces: Sequence[Piece], number: Any, around: Callable[..., Any]) -> Callable[[], torch.Tensor]:
        made = joined(pieces, targets, kind.no_target)

        def run() -> torch.Tensor:
            with around(attention, made.bounds):
                loss: torch.Tensor = step.run_inputs(dict(made.inputs), number, total, 1)
            return loss

        return run

    def error(*runs: Sequence[Callable[[], torch.Tensor]]) -> tuple[float, float]:
        one, other = (lambda run=run: not step.run(run).failed for run in runs)
        with rehearsal(step.state, parameters[0].device, parameters) as start_over:
            compared = gradient_error(parameters, one, other, start_over, ranks)
        if compared is None:
            raise NoRowError("memory ran out, or a gradient is not finite")
        return ranks.largest(compared[0]), ranks.largest(compared[1])

    def watched() -> torch.Tensor:
        try:
            return of_watched()
        except Exception as raised:
            if is_out_of_memory(raised) or not watch.explains(raised):
                raise
            raise NoRowError(watch.why_not(model) or first_line(raised)) from raised

    of_watched = in_row(pieces, total, watch.on)
    alone = [
        partial(step.run_inputs, batch, number, total, len(batches))
        for batch, number in zip(batches, numbers, strict=True)
    ]
    off, rounding = error([watched], [watched] if DRY_RUN in os.environ else alone)  # in one, all values are zero
    if ranks.any((why := watch.why_not(model)) is not None):
        raise NoRowError(why or "a row changes the gradient on another rank")
    if off > rounding:
        return f"the gradient of a row is {percent(off)} off that of its samples"
    rows = with_another_first(pieces, model, kind.key, kind.no_target)
    number = sum(kind.count(piece.batch(), 1) for piece in rows[0])
    carried = Carried(model)
    leak, rounding = error(*([in_row(row, number, carried.on)] for row in rows))
    if ranks.any((name := carried.module()) is not None):
        raise NoRowError(f"{name or 'a module'} carries a sample over into the next")
    if leak > rounding / 4:  # of experts, which get other numbers of tokens; elsewhere the two are equal
        return f"a sample changes the gradient of those after it by {percent(leak)}"
    return None


class MaskWatch:
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
            causal, window = attends_causally(module, others.get("is_causal")), window_of(others.get("sliding_window"))
            if not attention_mask.is_as(causal, window):
                self.mask = f"the mask of {type(module).__name__} is more than causal order and a window"
        elif attention_mask is not None:
            self.mask = f"{type(module).__name__} has a mask of its own"
        return attend(module, query, key, value, None, *args, **others)

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

    def batch(self) -> dict[str, Any]:
        """Return it as a batch."""
        return {**{key: value[None] for key, value in self.tokens.items()}, **self.others}

    def changed(self, **tokens: torch.Tensor) -> Piece:
        return Piece({**self.tokens, **tokens}, self.others)


def pieces_of(row: Row, key: str) -> list[Piece]:
    """Return a few tokens of each of up to three samples of a row that have targets in ``key``, of unlike lengths."""
    pieces: list[Piece] = []
    bounds, of_tokens = row.bounds, {}
    for name, value in row.inputs.items():
        if name != "position_ids" and has_entries((1, bounds.tokens), value):
            of_tokens[name] = value[0]
    if key not in of_tokens:
        raise NoRowError(f"{key!r} of its batches has no entry for each token")
    others = {name: value for name, value in row.inputs.items() if name not in (*of_tokens, "position_ids")}
    for number, (start, length) in enumerate(zip(bounds.starts(), bounds.lengths, strict=True)):
        values = of_tokens[key][start : start + length]
        places = (
            values.ne(no_target_of(values, key, row.no_target)).reshape(length, -1).any(1).nonzero().flatten().tolist()
        )
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
    return Row(without_first(inputs, bounds, targets, no_target), bounds, inputs, no_target)


def with_another_first(
    pieces: Sequence[Piece], model: nn.Module, key: str, no_target: Mapping[str, int]
) -> tuple[list[Piece], list[Piece]]:
    """Return pieces twice, the first without targets and once with other tokens.

    For a model with a table of few positions they are repeated, so that there are more in the row than in the table.
    """
    first, *rest = pieces
    values, ids = first.tokens[key], first.tokens["input_ids"]
    known = torch.unique(torch.cat([piece.tokens["input_ids"] for piece in pieces]))
    first = first.changed(**{key: torch.full_like(values, no_target_of(values, key, no_target))})
    other = first.changed(input_ids=known[(torch.searchsorted(known, ids) + 1) % len(known)])
    positions = _of_text(model, "max_position_embeddings") or 0
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    has_table = positions <= _LARGEST_TABLE and sizes & {*range(positions, positions + _SPARE + 1)}
    times = positions // sum(len(piece.tokens[key]) for piece in rest) + 1 if has_table else 1
    return [first, *rest * times], [other, *rest * times]
