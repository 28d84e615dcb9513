"""Rows of a batch of prompts and completions, as TRL prepares it: what runs in parts where a trainer generates."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from adaptive_batching._attention import SampleBounds
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._transformers.check_of_rows import MaskWatch
from adaptive_batching._transformers.row_of_samples import IGNORED, RowAttention
from adaptive_batching._values import ConfigError, first_line, percent

METHOD = "_get_per_token_logps_and_entropies"
"""The method by which TRL computes all that its loss takes from a model."""

# How far log-probabilities may be off by rounding, relative to them.
_ROUNDING = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
_ROUNDING_OF_SINGLE = 1e-4

TokenValues = list[torch.Tensor | None]
"""Log-probabilities and entropies of some rows, each [rows, completion tokens]; None for what was not asked for."""


class PreparedBatch:
    """A batch that TRL has prepared for one forward and backward, and the values of those rows that have run.

    Args:
        inputs: As ``_prepare_inputs`` returns it. Prompts, [b, p], are padded on the left, and completions, [b, c], on
            the right.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.inputs = inputs
        self.ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        self.mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        self.width = inputs["completion_ids"].shape[1]
        tokens, completions = self.mask.sum(1).tolist(), inputs["completion_mask"].sum(1).tolist()
        rows = [PreparedRow(self, at, length) for at, length in enumerate(tokens) if completions[at]]
        # Nothing is learned from a completion that is masked as a whole. One runs, so that there are gradients.
        self.rows = rows or [PreparedRow(self, 0, max(tokens[0], 1))]
        """Its rows, but those that nothing is learned from."""

        self.entropy_mask: torch.Tensor | None = None  # of tokens with a high entropy, on all ranks
        self._found: TokenValues = []  # of all rows, without a graph
        self._rest: tuple[Any, ...] = ()

    def note(self, rows: Sequence[int], values: TokenValues, rest: tuple[Any, ...]) -> None:
        """Keep the ``values`` of some rows, without their graph, and the ``rest`` of what the method has returned."""
        if not self._found:
            self._found, self._rest = [self._stand_in(each, place) for place, each in enumerate(values)], rest
        at = torch.tensor(rows, device=self.ids.device)
        for found, each in zip(self._found, values, strict=True):
            if found is not None and each is not None:
                found[at] = each.detach().to(found.dtype)

    def _stand_in(self, like: torch.Tensor | None, place: int) -> torch.Tensor | None:
        """Return values for rows that have not run: log-probabilities at which no ratio is large, and no entropy."""
        if like is None:
            return None
        old: torch.Tensor | None = self.inputs.get("old_per_token_logps") if place == 0 else None
        if old is None:
            return like.new_zeros(len(self.ids), self.width)
        return old.detach().to(like.dtype, copy=True)

    def with_graph(self, rows: Sequence[int], values: TokenValues) -> tuple[Any, ...]:
        """Return what the method would return of the whole batch, where ``rows`` alone have a graph."""
        at = torch.tensor(rows, device=self.ids.device)
        full = [
            None if found is None or each is None else found.index_copy(0, at, each.to(found.dtype))
            for found, each in zip(self._found, values, strict=True)
        ]
        return (*full, *self._rest)

    @property
    def found(self) -> tuple[Any, ...]:
        """The method's result for the whole batch, without a graph."""
        return (*self._found, *self._rest)


@dataclass(frozen=True)
class PreparedRow:
    """A prompt and its completion."""

    batch: PreparedBatch
    index: int
    tokens: int


class Rows:
    """Runs some rows of a padded batch through a model by TRL's own method, without their padding."""

    what = "log-probabilities"

    def __init__(self, trainer: Any) -> None:
        self.packed = False
        """True if rows lie end to end, and attention stays within each; else they are padded to the longest of them."""

        self._method = method_of_trl(trainer, METHOD)
        self.num_others = int("compute_aux_loss" in inspect.signature(self._method).parameters)
        """Values that the method returns besides log-probabilities and entropies."""

    @contextlib.contextmanager
    def around(self, model: nn.Module, batch: PreparedBatch, rows: Sequence[int]) -> Iterator[None]:
        """Have attention stay within ``rows`` inside, forward and backward, where they are packed."""
        if not self._packs(batch, rows):
            yield
            return
        with RowAttention(model).within(_bounds(batch, rows)):
            yield

    def _packs(self, batch: PreparedBatch, rows: Sequence[int]) -> bool:
        # Without a prompt, the first token of a completion would be predicted from another row.
        return self.packed and bool(batch.mask[rows, : -batch.width].any(1).all())

    def run(
        self, model: nn.Module, batch: PreparedBatch, rows: Sequence[int], **more: Any
    ) -> tuple[TokenValues, tuple[Any, ...]]:
        """Return the values of ``rows``, [rows, c], and the rest of what the method returns.

        Args:
            model: The policy or its reference.
            batch: Has the rows.
            rows: By index.
            more: Other arguments of the method.

        Raises:
            ConfigError: If one has entries for rows or images.
        """
        more = {name: value for name, value in more.items() if value is not None}
        if given := [name for name, value in more.items() if isinstance(value, (torch.Tensor, list))]:
            raise ConfigError(
                f"a batch has {given[0]}, as with images, which cannot be divided among its rows; train on text alone, "
                "or without adaptive"
            )
        run = self._run_packed if self._packs(batch, rows) else self._run_padded
        return run(model, batch.ids[rows], batch.mask[rows].bool(), batch.width, more)

    def _run_packed(
        self, model: nn.Module, ids: torch.Tensor, seen: torch.Tensor, width: int, more: Mapping[str, Any]
    ) -> tuple[TokenValues, tuple[Any, ...]]:
        completions, row = seen[:, -width:], ids[seen][None]
        labels = ids.masked_fill(~seen, IGNORED)
        labels[:, :-width] = IGNORED
        labels = labels[seen][None]
        # As in the padded batch, of which a model counts the columns.
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)[seen][None]

        def in_a_row(**inputs: Any) -> Any:
            if "labels" in inputs:
                inputs["labels"] = labels
            return model(**inputs, position_ids=positions)

        values = self._method(in_a_row, row, torch.ones_like(row), row.shape[1] - 1, **more)
        is_target = labels[0, 1:] != IGNORED
        token_values = [None if each is None else _spread(each[0][is_target], completions) for each in values[:2]]
        return token_values, tuple(values[2:])

    def _run_padded(
        self, model: nn.Module, ids: torch.Tensor, seen: torch.Tensor, width: int, more: Mapping[str, Any]
    ) -> tuple[TokenValues, tuple[Any, ...]]:
        prompt = ids.shape[1] - width
        columns = seen.any(0).nonzero().flatten().tolist() or [prompt]
        first, last = min(columns[0], prompt - 1), max(columns[-1], prompt) + 1
        ids, seen = ids[:, first:last], seen[:, first:last]
        # Without positions, a model counts padding on the left, which is cut off here.
        positions = torch.arange(first, last, device=ids.device).expand_as(ids)
        called = partial(model, position_ids=positions) if first else model
        values = self._method(called, ids, seen.long(), last - prompt, **more)
        missing = width - (last - prompt)
        token_values = [None if each is None else _widened(each, missing) for each in values[:2]]
        return token_values, tuple(values[2:])

    def pack_if_alike(self, model: nn.Module, batch: PreparedBatch, half: Sequence[torch.dtype]) -> str | None:
        """Have rows packed if that gives the values of padded ones; return why not, in words, else None.

        The rows of ``batch`` run both ways, without dropout.

        Args:
            model: The policy.
            batch: A few short rows.
            half: The precision that is rounded to besides that of the model: of autocast, say.
        """
        rows, watch = [row.index for row in batch.rows], MaskWatch()
        training = [module for module in model.modules() if module.training]
        self.packed = False
        try:
            model.eval()
            with torch.no_grad():
                (padded, *_), _ = self.run(model, batch, rows, compute_entropy=True)
                self.packed = True
                with watch.on(RowAttention(model), _bounds(batch, rows)):
                    (packed, *_), _ = self.run(model, batch, rows, compute_entropy=True)
        except Exception as error:  # of a model that nobody here has seen
            self.packed = False
            if is_out_of_memory(error):
                raise
            return watch.why_not(model) if watch.explains(error) else f"{type(error).__name__}: {first_line(error)}"
        finally:
            for module in training:
                module.training = True
        assert padded is not None and packed is not None
        off = float((padded - packed).float().norm() / padded.float().norm().clamp(min=1e-30))
        dtypes = {padded.dtype, *(parameter.dtype for parameter in model.parameters()), *half}
        why = watch.why_not(model)
        if why is None and not off <= max(_ROUNDING.get(dtype, _ROUNDING_OF_SINGLE) for dtype in dtypes):
            why = f"{self.what} of packed completions are {percent(off)} off those of padded ones"
        self.packed = why is None
        return why


def method_of_trl(trainer: Any, name: str) -> Any:
    """Return the method of a trainer as TRL has it, below what is mixed in here."""
    return MethodType(vars(owner_of_method(type(trainer), name))[name], trainer)


def owner_of_method(trainer_class: type, name: str) -> type:
    """Return the class that has a method, below what is mixed in here; ``object`` if none has."""
    owners = [class_ for class_ in trainer_class.__mro__ if name in vars(class_)]
    ours = "adaptive_batching"
    return next((class_ for class_ in owners if class_.__module__.partition(".")[0] != ours), object)


def _spread(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return values, [n, ...], at the n ``places`` that are true, [b, c]: zeros elsewhere, [b, c, ...]."""
    more = values.shape[1:]
    return values.new_zeros(*places.shape, *more).masked_scatter(places.view(*places.shape, *[1] * len(more)), values)


def _widened(values: torch.Tensor, missing: int) -> torch.Tensor:
    """Return values, [b, c, ...], with zeros in so many places after the last of c."""
    return nn.functional.pad(values, (*(0, 0) * (values.dim() - 2), 0, missing))


def _bounds(batch: PreparedBatch, rows: Sequence[int]) -> SampleBounds:
    return SampleBounds(batch.mask[rows].sum(1).tolist())


def sample_batch(vocabulary: int, prompts: Sequence[int], completions: Sequence[int], device: Any) -> PreparedBatch:
    """Return a batch of prompts and completions of so many tokens, which are drawn alike each time."""
    generator = torch.Generator().manual_seed(0)
    shape = len(prompts), max(prompts), max(completions)
    ids = torch.randint(vocabulary, (shape[0], shape[1] + shape[2]), generator=generator)
    of_prompt = torch.arange(shape[1]) >= shape[1] - torch.tensor(prompts)[:, None]
    of_completion = torch.arange(shape[2]) < torch.tensor(completions)[:, None]
    return PreparedBatch({
        "prompt_ids": ids[:, : shape[1]].to(device), "prompt_mask": of_prompt.long().to(device),
        "completion_ids": ids[:, shape[1] :].to(device), "completion_mask": of_completion.long().to(device),
    })  # fmt: skip
