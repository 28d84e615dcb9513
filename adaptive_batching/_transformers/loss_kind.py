"""How the losses of parts make up that of their batch, found by running a few samples."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adaptive_batching._device import unchanged_random_state
from adaptive_batching._loop.samples import Loss, collated
from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._transformers.handed_out import Sample, alone, counters_of, put_back_counters, unchanged_buffers
from adaptive_batching._values import ConfigError, first_line

IGNORED = -100
"""Label of a token that is no target."""

_NUMBER = 8.0  # that stands for num_items_in_batch: any would do


@dataclass(frozen=True)
class LossKind:
    """How the loss of a batch is made up: a sum over ``num_items_in_batch``, or a mean over targets or samples."""

    takes_number: bool
    """True if the loss is divided by ``num_items_in_batch``, so that losses of parts add up as they are."""

    of: str
    """``samples``, ``targets``, or ``shifted targets``, of which the first label of each row is none."""

    def count(self, batch: Mapping[str, Any], num_samples: int) -> int | torch.Tensor:
        """Return the number of losses in a batch."""
        if self.of == "samples":
            return num_samples
        labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
        if self.of == "shifted targets" and "shift_labels" not in batch:
            labels = labels[..., 1:]
        return labels.ne(IGNORED).sum()  # type: ignore[no-any-return]


def kinds_of(trainer: Any, batch: Mapping[str, Any]) -> list[LossKind]:
    """Return what the loss of a batch can be, the most likely first."""
    has_labels = isinstance(batch.get("labels"), torch.Tensor)
    shifts = getattr(trainer, "_loss_shifts_labels", False)
    targets = ["shifted targets", "targets"] if shifts else ["targets", "shifted targets"]
    if not has_labels:
        return [LossKind(False, "samples")]
    if batch["labels"].dim() < 2:
        targets = targets[shifts:][:1]
    takes_number = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    summed = [LossKind(True, targets[0])] if takes_number else []
    return [*summed, *(LossKind(False, each) for each in (*targets, "samples"))]


def find_loss_kind(trainer: Any, samples: Sequence[Sample]) -> LossKind:
    """Return how the losses of two samples make up that of both.

    Raises:
        ConfigError: If the loss of both is no sum and no mean of theirs, as with terms that compute over the batch.
    """
    batches = [(collated([sample], trainer.data_collator), sample) for sample in samples]
    kinds = kinds_of(trainer, batches[0][0])
    # Two samples with different numbers of targets tell a mean over targets from one over samples.
    numbers = [int(kinds[0].count(batch, 1)) for batch, _ in batches]
    known = sorted((number, index) for index, number in enumerate(numbers) if number > 0) or [(0, 0)]
    first = known[0]
    second = next((each for each in known if each[0] != first[0]), known[min(1, len(known) - 1)])
    pair = [samples[first[1]], samples[second[1]]]
    with _measuring(trainer):
        errors = {kind: _error(trainer, kind, pair) for kind in kinds}
    least, (enough, clear) = min(errors.values()), _precision(trainer.model)
    if not math.isfinite(least):
        raise ConfigError(
            f"the loss of {type(trainer).__name__} with {type(trainer.model).__name__} is not finite before training; "
            f"look at the weights that it begins with"
        )
    if least > enough:
        raise ConfigError(
            f"the loss of {type(trainer).__name__} with {type(trainer.model).__name__} is neither a sum over "
            f"num_items_in_batch nor a mean over targets or samples, so that parts of a batch do not add up to it; "
            f"leave out terms that compute over the batch, such as one that balances experts, or train without adaptive"
        )
    return next(kind for kind in kinds if errors[kind] <= 3 * least + clear)


def losses_of(trainer: Any, kind: LossKind) -> Loss:
    """Return the loss of a (batch, number of its samples), as a sum and a number."""

    def losses(model: nn.Module, batch: tuple[Any, int]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, num_samples = batch
        number = torch.as_tensor(kind.count(inputs, num_samples))
        one = torch.ones((), device=trainer.args.device) if kind.takes_number else None
        with alone(trainer), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, dict(inputs), num_items_in_batch=one)
        if kind.takes_number:
            return loss, number
        return torch.where(number.to(loss.device) > 0, loss * number.to(loss.device), 0 * loss.nan_to_num()), number

    return losses


def _error(trainer: Any, kind: LossKind, pair: Sequence[Sample]) -> float:
    """Return how far the loss of two samples is from what it would be if it were of a kind, as a part of it."""

    def of(*samples: Sample, parts: int) -> tuple[float, int]:
        batch = trainer._prepare_inputs(collated(samples, trainer.data_collator))
        number = int(kind.count(batch, len(samples)))
        given = torch.tensor(_NUMBER, device=trainer.args.device) if kind.takes_number else None
        trainer.current_gradient_accumulation_steps = parts  # by which some losses divide what is a mean in a sum
        with torch.no_grad(), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=given)
        return float(loss), number

    each = [of(sample, parts=2) for sample in pair]
    try:
        both, number = of(*pair, parts=1)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{type(trainer.model).__name__} runs one sample, and not two in a forward ({first_line(error)}); a step "
            "cannot be split or probed with it, so train without adaptive"
        ) from error
    if kind.takes_number:
        expected = sum(loss for loss, _ in each)
    else:
        expected = sum(loss * of_it for loss, of_it in each) / max(number, 1)
    return abs(both - expected) / max(abs(both), 1e-30)


def _precision(model: nn.Module) -> tuple[float, float]:
    """Return the error within which two losses are the same, and by how much the better of two has to be so."""
    is_single = all(parameter.dtype in (torch.float32, torch.float64) for parameter in model.parameters())
    return (1e-3, 1e-5) if is_single else (2e-2, 4e-3)


@contextlib.contextmanager
def _measuring(trainer: Any) -> Iterator[None]:
    """Run forwards without dropout inside, and leave nothing of them behind."""
    modes = [(module, module.training) for module in trainer.model.modules()]
    saved = counters_of(trainer)
    trainer.model.eval()
    try:
        with unchanged_random_state(trainer.args.device), unchanged_buffers(trainer.model), alone(trainer):
            yield
    finally:
        for module, training in modes:
            module.training = training
        put_back_counters(trainer, saved)
