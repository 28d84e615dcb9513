"""TRL's distillation, in which a student learns to predict what it has generated as a teacher would.

Its loss is a sum over all tokens of a step, divided by their number. So the losses and gradients of rows add up, once
each row meets the hidden states of both models, which TRL computes by one method.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from adaptive_batching._transformers.generated import (
    CompletionsWork,
    GeneratedRun,
    RowsPart,
    returning,
    uncounted,
    without_other_ranks,
)
from adaptive_batching._transformers.generated_rows import (
    PreparedBatch,
    Rows,
    TokenValues,
    method_of_trl,
    owner_of_method,
)
from adaptive_batching._transformers.handed_out import replaced

HIDDEN = "_get_last_hidden_state"
"""The method by which TRL computes the hidden states that predict completions."""

_OF_ONE_CLASS = (HIDDEN, "compute_loss", "_compute_loss", "_generate_and_score_completions")
_OF_COMPLETIONS = ("completion_ids", "completion_mask", "tool_mask")  # [b, c]

Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The scalars that TRL's loss returns: the loss, the sum of the student's entropies, and the number of tokens."""


def distils(trainer_class: type) -> bool:
    """Return True for a class of trainers whose loss is computed from what :data:`HIDDEN` returns, and nothing else."""
    owners = {owner_of_method(trainer_class, name) for name in _OF_ONE_CLASS}
    return len(owners) == 1 and object not in owners


class _Has(nn.Module):
    """A model as far as TRL asks for its backbone, which may be a function."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.__dict__["base_model"] = backbone


class HiddenRows(Rows):
    """Runs some rows through the backbone of a student or a teacher: their values are hidden states, [rows, c, h]."""

    what = "hidden states"
    num_others = 0

    def __init__(self, trainer: Any) -> None:
        self.packed = False
        hidden_of = method_of_trl(trainer, HIDDEN)

        def method(backbone: Any, ids: torch.Tensor, mask: torch.Tensor, width: int, **_: Any) -> tuple[torch.Tensor]:
            return (hidden_of(_Has(backbone), ids, mask, width),)

        self._method = method

    def run(
        self, model: nn.Module, batch: PreparedBatch, rows: Sequence[int], **more: Any
    ) -> tuple[TokenValues, tuple[Any, ...]]:
        """Return the hidden states of ``rows``, with zeros where a completion has no token; see :meth:`Rows.run`."""
        [hidden], rest = super().run(model, batch, rows, **more)
        assert hidden is not None
        is_padding = batch.inputs["completion_mask"][rows] == 0
        return [hidden.masked_fill(is_padding[..., None], 0)], rest


class DistilledRun(GeneratedRun):
    """The adaptive part of a run of ``DistillationTrainer``."""

    rows_of, forward_work = HiddenRows, CompletionsWork

    @property
    def models(self) -> list[nn.Module]:
        """The backbones of the student and of its teacher."""
        unwrapped = map(self._trainer.accelerator.unwrap_model, (self._model, self._trainer.teacher_model))
        return [*map(_backbone_of, unwrapped)]

    def rows_depend(self, batch: PreparedBatch) -> bool:
        return False

    def forward_backward(self, part: RowsPart) -> Sums:
        """Run rows of a prepared batch, and leave their share of its gradient; return their share of its sums."""
        batch: PreparedBatch = part.samples[0].batch
        with self.timer.around(part) if torch.is_grad_enabled() else contextlib.nullcontext():
            return self._run(batch, [row.index for row in part.samples])

    def try_rows(self, batch: PreparedBatch, rows: Sequence[int]) -> None:
        self._run(batch, rows)

    def _run(self, batch: PreparedBatch, rows: Sequence[int]) -> Sums:
        trainer, size, found = self._trainer, len(batch.ids), list[Sums]()
        given = {
            key: value[rows] if isinstance(value, torch.Tensor) and value.shape[:1] == (size,) else value
            for key, value in batch.inputs.items()
        }
        width = max(int(given["completion_mask"].sum(1).max()), 1)
        given |= {key: given[key][:, :width] for key in _OF_COMPLETIONS if key in given}
        compute = trainer._compute_loss

        def hidden_of(model: Any, *args: Any, **kwargs: Any) -> Any:
            (hidden,), _ = self.rows.run(_backbone_of(model), batch, rows)
            assert hidden is not None
            return hidden[:, :width]

        def noted(*args: Any) -> Sums:
            found.append(compute(*args))
            return found[0]

        with (
            uncounted(trainer),
            without_other_ranks(trainer),
            replaced(trainer, _compute_loss=noted, _forward_redirection=_call, **{HIDDEN: hidden_of}),
            self.rows.around(nn.ModuleList(self.models), batch, rows),
        ):
            loss = self._stock_loss(given)
            if loss.requires_grad:
                self.backward(loss)
        loss, entropy, number = found[0]
        return loss.detach(), entropy, number

    def _loss_of_all(self, batch: PreparedBatch, done: Sequence[tuple[RowsPart, Any]]) -> torch.Tensor:
        results = [result for part, result in done if part.samples[0].batch is batch]
        sums = tuple(torch.stack(each).sum() for each in zip(*results, strict=True))
        with replaced(self._trainer, _compute_loss=returning(sums), _forward_redirection=_call):
            return self._stock_loss(batch.inputs)

    def evaluated(self, model: nn.Module, inputs: Any, stock: Any) -> torch.Tensor:
        """Return the loss of a batch that is evaluated: the mean over its tokens, by which its parts are weighed."""
        self._call(model)
        self._forward_work.limit.bound = self._work.limit.max_tokens
        results = [sums for _, sums in self._forward_runner.step([PreparedBatch(inputs)])]
        losses, entropies, counts = map(torch.stack, zip(*results, strict=True))
        loss = (losses * counts).sum() / counts.sum().clamp(min=1)
        mean = returning((loss, entropies.sum(), counts.sum()))
        with replaced(self._trainer, _compute_loss=mean, _forward_redirection=_call):
            return self._stock_loss(inputs)

    def _stock_loss(self, inputs: Any) -> torch.Tensor:
        """Return TRL's loss, below what is mixed in here."""
        return cast(torch.Tensor, method_of_trl(self._trainer, "compute_loss")(self._model, inputs))


def _backbone_of(model: Any) -> Any:
    peft = getattr(model, "peft_config", None) is not None and hasattr(model, "get_base_model")
    return (model.get_base_model() if peft else model).base_model


def _call(wrapper: Any, module: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method without the forward of what wraps its module: DDP would communicate in it."""
    return method(*args, **kwargs)
