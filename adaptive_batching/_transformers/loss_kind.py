"""How the losses of parts make up that of their batch, found by running a few samples."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from adaptive_batching._loop.samples import collated
from adaptive_batching._memory.out_of_memory import forget_frames, is_out_of_memory
from adaptive_batching._memory.unused_memory import release_cached_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._ranks.agree import ALONE, Ranks, num_collectives
from adaptive_batching._ranks.fsdp import is_sharded
from adaptive_batching._state import draws_put_back, rehearsal
from adaptive_batching._step.judge import WithoutChance, error_of_sum, find_batch_norm
from adaptive_batching._step.runner import Outcome
from adaptive_batching._transformers.declared import state_of
from adaptive_batching._transformers.handed_out import (
    Sample,
    count_numbers,
    replaced,
    rows_of,
    unlogged,
    without_gathering,
)
from adaptive_batching._transformers.losses_of_groups import (
    Losses,
    in_groups,
    losses_of_groups,
    without_gradients,
)
from adaptive_batching._transformers.older_versions import declared_as_scaled, shifts_labels
from adaptive_batching._transformers.row_of_samples import IGNORED
from adaptive_batching._values import DRY_RUN, ConfigError, first_line, percent

log = logging.getLogger(__name__)

_TRIES = (7, None), (4, None), (3, None), (2, None), (4, 16)
"""Samples that run together, and tokens of each, None for all: fewer where memory runs out."""

_UNLIKELY = (-1, 255)  # labels that are no targets where somebody's own loss leaves them out
_NUMBER = 8.0  # that stands for num_items_in_batch: any would do
_FEW = 64  # numbers of a tensor that tells samples apart, in whose length and number of targets they are alike


@dataclass(frozen=True)
class LossKind:
    """How the loss of a batch is made up: a sum over ``num_items_in_batch``, or a mean."""

    takes_number: bool
    """True if the loss is divided by ``num_items_in_batch``, so that losses of parts add up as they are."""

    of: str
    """What a mean is taken over: ``samples``, ``targets``, ``shifted targets``, of which the first of each row is none,
    or the ``sum`` of weights; ``batches`` where each is a loss as a whole, which no part of it makes up."""

    key: str = "labels"
    """The part of the batch that has the targets or weights."""

    ignored: int = IGNORED
    """The label of what is no target."""

    rows: int = 0
    """Rows per sample, used to count samples when the collator may drop some; 0 if rows per sample vary."""

    factor: float = 1.0
    """What Trainer multiplies a mean by if it passes ``num_items_in_batch``: the number of ranks, as a rule."""

    def count(self, batch: Mapping[str, Any], num_samples: int) -> int | torch.Tensor:
        """Return the number of losses in a batch, or the sum of their weights."""
        if self.of == "batches":
            return 1
        if self.of == "samples":
            return rows_of(batch) // self.rows if self.rows else num_samples
        if self.key not in batch and not (self.key == "labels" and "shift_labels" in batch):
            raise ConfigError(
                f"a batch has no {self.key!r}, and the loss is {self}: those before training had it, and this one has "
                f"{', '.join(map(repr, batch))}; have data_collator add {self.key!r} to every batch"
            )
        is_shifted = self.key == "labels" and "shift_labels" in batch
        values = batch["shift_labels" if is_shifted else self.key]
        if self.of.startswith("shifted") and not is_shifted:
            values = values[..., 1:]
        number: torch.Tensor = values.sum() if self.of.endswith("sum") else values.ne(self.ignored).sum()
        return number

    @property
    def no_target(self) -> dict[str, int]:
        """By the key of what a batch may have for targets, the number that is none."""
        of_labels = dict.fromkeys(("labels", "shift_labels"), self.ignored)
        return {**of_labels, self.key: 0 if self.of.endswith("sum") else self.ignored}

    def label_of(self, samples: Sequence[Sample], batch: Mapping[str, Any]) -> str | None:
        """Return the field of samples that is the only target of each, as in ``batch``; None if that is not so."""
        if self.takes_number or self.of != "targets" or batch[self.key].dim() != 1:
            return None
        labels = batch[self.key].tolist()
        for key in samples[0] if isinstance(samples[0], Mapping) else ():
            with contextlib.suppress(TypeError):  # of what is no whole number
                if [operator.index(sample[key]) for sample in samples] == labels:
                    return str(key)
        return None

    def __str__(self) -> str:
        if self.takes_number:
            return "a sum over num_items_in_batch"
        return f"a mean over {self.of if self.of in ('samples', 'batches') else f'the {self.of} in {self.key!r}'}"


def kinds_of(trainer: Any, batch: Mapping[str, Any], ignored: Iterable[int] = (IGNORED,)) -> list[LossKind]:
    """Return what the loss of a batch can be, the most likely first; ``ignored`` are labels that may be no targets."""
    shifts = shifts_labels(trainer)
    kinds, of_weights = [], []
    for key in sorted(batch, key=lambda key: (key != "labels", key)):
        value = batch[key]
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or key == "shift_labels":
            continue
        wholes = [""] if value.dim() < 2 else ["shifted ", ""] if shifts else ["", "shifted "]
        no_targets = ignored if _has_labels(key, value) else (IGNORED,)
        has_targets = key == "labels" or any(value.eq(label).any() for label in no_targets)
        if not value.is_floating_point() and has_targets:
            kinds += [LossKind(False, f"{whole}targets", key, label) for label in no_targets for whole in wholes]
        elif "weight" in key or "mask" in key:
            of_weights += [LossKind(False, f"{whole}sum", key) for whole in wholes]
    if _gives_number(trainer) and (of_labels := [kind for kind in kinds if kind.key == "labels"]):
        kinds.insert(0, replace(of_labels[0], takes_number=True))
    return [*kinds, LossKind(False, "samples"), *of_weights]


def _has_labels(key: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and ("label" in key or "target" in key)


def beside_each_other(errors: Mapping[LossKind, float]) -> str:
    """Say how far parts are off their batch by each weight that was tried, and that two means do this.

    Empty if there are no tokens to weight by.
    """
    of_tokens = {kind: error for kind, error in errors.items() if kind.of not in ("samples", "batches")}
    of_samples = [error for kind, error in errors.items() if kind.of == "samples"]
    if not of_tokens or not of_samples:
        return ""
    kind = min(of_tokens, key=lambda kind: of_tokens[kind])
    return (
        f". Weighted by the {kind.of} in {kind.key!r} they are {percent(of_tokens[kind])} off, and weighted by samples "
        f"{percent(of_samples[0])}, as happens where a loss adds a mean over tokens to a mean over samples: then set "
        "the weight of one of the two to 0"
    )


def find_loss_kind(
    trainer: Any, samples: Sequence[Sample], ranks: Ranks = ALONE, *, splits: bool = True
) -> tuple[LossKind, str | None]:
    """Return how the losses of parts make up that of their batch, and what module computes over the batch, if one does.

    A few of ``samples`` run as training runs them, in four groups as unlike as possible and all together, with the
    weights as they are and with slightly others. Everything is put back. A run that ``splits`` no batch can have a loss
    that computes over it, as a contrastive one does: that is then named as the module.

    Raises:
        ConfigError: If the loss of all is no sum and no mean of theirs, as with terms that compute over the batch.
    """
    if DRY_RUN in os.environ:  # where all values are zero
        return kinds_of(trainer, collated(samples[:1], trainer.data_collator))[0], None
    if ranks.size > 1 and is_sharded(trainer.model):  # a rank that tries again would leave the others waiting
        return _find_loss_kind(trainer, samples, ranks, most=4, splits=splits)
    for most, longest in _TRIES if ranks.size == 1 else _TRIES[1:]:
        found, failure = None, None
        try:
            found = _find_loss_kind(trainer, samples, ranks, most, longest, splits=splits)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error
        if not ranks.any(failure is not None):
            assert found is not None
            return found
        if failure is not None:
            forget_frames(failure)
        release_cached_memory(trainer.args.device)
    raise DoesNotFitError.even_of_few("gradient_checkpointing=True, bf16=True, LoRA") from failure


def add_up_together(trainer: Any, kind: LossKind, samples: Sequence[Sample], ranks: Ranks = ALONE) -> bool:
    """Return True if the losses of samples, each from another batch, make up that of all of them together.

    They do not if a collate function or a model goes by the first sample of a batch, where batches are of one kind
    each.
    """
    if DRY_RUN in os.environ:
        return True
    try:
        drawn = draws_put_back(trainer.data_collator)
        with (
            drawn,
            unlogged(trainer),
            rehearsal(state_of(trainer), trainer.args.device) as start_over,
            without_gathering(trainer),
        ):
            tried = _Trials(trainer, samples, start_over, one_by_one_as=replace(kind, factor=1.0, rows=0))
            adds_up = tried.kind()[0] is not None
    except Exception as error:  # of a collate function that takes no samples of different kinds
        if is_out_of_memory(error):
            release_cached_memory(trainer.args.device)
        adds_up = False
    return ranks.all(adds_up)


def _find_loss_kind(
    trainer: Any, samples: Sequence[Sample], ranks: Ranks, most: int, longest: int | None = None, *, splits: bool
) -> tuple[LossKind, str | None]:
    name = f"{type(trainer).__name__} with {type(trainer.model).__name__}"
    # Unlogged first, as what a rehearsal puts back each time includes the attributes of a trainer.
    drawn = draws_put_back(trainer.data_collator)
    with (
        drawn,
        unlogged(trainer),
        rehearsal(state_of(trainer), trainer.args.device) as start_over,
        without_gathering(trainer),
    ):
        tried = _Trials(trainer, samples, start_over, most, longest)
        if ranks.size > 1 and not is_sharded(trainer.model):  # whose collectives are looked at when they are recorded
            tried.check_that_ranks_are_alone(name, ranks)
        kind, losses = tried.kind()
        total, _ = losses.of_union
        if not math.isfinite(total):
            raise ConfigError(
                f"the loss of {name} is not finite before training ({total}), on samples that have targets; look at "
                "the weights that it begins with, and for a mean over nothing, as of a class that a batch lacks"
            )
        module = tried.batch_norm
        # It may draw in training alone. All ranks of a sharded model run as often.
        is_drawn = module is None and kind is None and bool(losses.draws)
        if ranks.any(is_drawn) if is_sharded(trainer.model) else is_drawn:
            tried.evaluate()
            kind, losses = tried.kind()
        if kind is None and not splits:
            kind, module = LossKind(False, "batches"), module or f"the loss of {name}"
        if kind is None:
            error = percent(min(tried.errors(losses).values()))
            if not losses.draws and (padding := tried.cause_in_padding(losses.rounding)):
                raise ConfigError(f"parts of a batch do not add up to it ({error} off): {padding}")
            names = ", ".join(sorted(losses.draws))
            chance = f"random numbers that the loss draws in evaluation as well (by {names}), and " if names else ""
            raise ConfigError(
                f"the loss of {name} is neither a sum over num_items_in_batch nor a mean over targets or samples, so "
                f"that parts of a batch do not add up to it (they are {error} off); leave out {chance}what uses the "
                "whole batch (samples that are compared with each other, a router's auxiliary loss, or a collate "
                "function that goes by the first sample), or train without adaptive"
                + beside_each_other(tried.errors(losses))
            )
        rows = tried.rows_of_sample() if kind.of == "samples" else 0
        kind = replace(kind, factor=tried.factor(kind, name), rows=rows)
    log.info("the loss of %s is %s", name, kind)
    batches = trainer.args.gradient_accumulation_steps
    if batches > 1 and not kind.takes_number and _adds_means_up(trainer, has_labels=tried.has_labels):
        log.warning(
            "with gradient_accumulation_steps=%d, Trainer adds up the means of %d batches, because %s takes "
            "num_items_in_batch and its loss does not use it: its gradients are %d times as large as here, where they "
            "are those of the mean over all samples; adapt the learning rate",
            batches, batches, type(trainer.model).__name__, batches,
        )  # fmt: skip
    return kind, module


_Ran = tuple[float, list[float]]
"""The loss of a batch, and the number of losses of each kind that it has."""


class _Trials:
    """Forwards of groups of samples, each from the state that ``start_over`` brings back.

    Of texts no more than ``longest`` tokens run, where they have targets; None for all.
    """

    def __init__(
        self,
        trainer: Any,
        samples: Sequence[Sample],
        start_over: Callable[[], None],
        most: int = 7,
        longest: int | None = None,
        one_by_one_as: LossKind | None = None,
    ) -> None:
        self._trainer, self._start_over = trainer, start_over
        self._length, self._window = 0, slice(0)
        self._of_a_step = list(samples[: trainer.args.per_device_train_batch_size])
        self.batch_norm = find_batch_norm(trainer.model.train())  # which may refuse a batch of one
        self._mode = trainer.model.train if self.batch_norm is None else trainer.model.eval
        self._begin()
        if one_by_one_as is not None:
            self._kinds, self._groups = [one_by_one_as], [[sample] for sample in samples]
            return
        batches = [collated([sample], trainer.data_collator) for sample in samples]
        self.has_labels = "labels" in batches[0]
        """True if Trainer counts the targets of a batch, which it does of these alone."""

        in_all = set.intersection(*({*batch} for batch in batches))  # batches of unlike data may have unlike keys
        first = {key: value for key, value in batches[0].items() if key in in_all}
        self._kinds = kinds_of(trainer, first, self._ignored(samples[:1], batches))
        if longest is not None:
            samples = self._of_one_length(samples, longest)
            batches = [self._collated([sample]) for sample in samples]
        self._groups = self._unlike_groups(samples, batches, most)

    def evaluate(self) -> None:
        """Run the model as in evaluation from now on."""
        self._mode = self._trainer.model.eval

    def kind(self) -> tuple[LossKind | None, Losses[_Ran]]:
        """Return the first kind that fits all losses, if one does, and the losses."""
        summed, means = ([kind for kind in self._kinds if kind.takes_number is takes] for takes in (True, False))
        for kinds, number in (summed, _NUMBER), (means, None):
            if not kinds:
                continue
            losses = losses_of_groups(
                self._groups, partial(self._run, number=number), list(self._trainer.model.parameters()),
                self._begin,
            )  # fmt: skip
            errors = {kind: losses.error(partial(self._as_sums, kind)) for kind in kinds}
            # Where losses are nearly alike, another kind is nearly right.
            right = min(min(errors.values()) * 3 + losses.rounding / 10, losses.rounding)
            for kind, error in errors.items():
                if error <= right:
                    return kind, losses
        return None, losses

    def errors(self, losses: Losses[_Ran]) -> dict[LossKind, float]:
        return {kind: losses.error(partial(self._as_sums, kind)) for kind in self._kinds if not kind.takes_number}

    def cause_in_padding(self, rounding: float) -> str | None:
        """Say that padding changes the loss of a sample, and what to do about it; None if it does not."""
        trainer = self._trainer
        samples = [sample for group in self._groups for sample in group]
        by_size = sorted(samples, key=lambda sample: count_numbers(collated([sample], trainer.data_collator)))
        short, long = by_size[0], by_size[-1]
        padded = collated([short, long], trainer.data_collator)
        first = {key: value[:1] if _is_of_two(value) else value for key, value in padded.items()}
        losses = []
        for batch in (collated([short], trainer.data_collator), first):
            self._begin()
            try:
                with WithoutChance():
                    losses.append(without_gradients(self._loss_of_batch, batch))
            except Exception:  # of a batch that cannot be taken apart like this
                return None
        if (off := error_of_sum(losses[:1], losses[1])) <= rounding:
            return None
        mask = first.get("attention_mask")
        is_left = isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask[0, 0]
        instead = "pad on the right (tokenizer.padding_side='right')" if is_left else (
            "mask it, pad all samples to one length (padding='max_length')"
        )  # fmt: skip
        return (
            f"the loss of {type(trainer).__name__} with {type(trainer.model).__name__} computes over padding, which "
            f"changes that of a sample by {percent(off)}, as group norm does, a softmax over all positions (question "
            f"answering), or a mean over them; {instead}, or train without adaptive"
        )

    def _loss_of_batch(self, batch: Any) -> float:
        trainer = self._trainer
        trainer.current_gradient_accumulation_steps = 1
        with trainer.compute_loss_context_manager():
            return float(trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch)))

    def factor(self, kind: LossKind, name: str) -> float:
        """Return what Trainer multiplies a mean by if it passes ``num_items_in_batch``: 1, or the number of ranks.

        Raises:
            ConfigError: If it is no whole number. Then one term is divided by a number of targets that another is a
                mean over, or is not divided at all, and weights of parts would scale both.
        """
        if kind.takes_number or not _gives_number(self._trainer):
            return 1.0
        losses, group = [], self._groups[-1]
        self._begin()
        batch = self._trainer._prepare_inputs(self._collated(group))
        own = self._trainer._get_num_items_in_batch([batch], self._trainer.args.device)
        for number in (own, None):
            self._begin()
            with WithoutChance():
                losses.append(without_gradients(partial(self._run, number=number), group)[0])
        ratio = losses[0] / losses[1] if losses[1] else 1.0
        if abs(ratio - round(ratio)) < 0.02 * ratio:
            return float(round(ratio))
        raise ConfigError(
            f"the loss of {name} is {ratio:.3g} times as large where Trainer passes num_items_in_batch, by which one "
            "term is divided and another is not; compute all terms without num_items_in_batch, or train without "
            "adaptive (transformers below 5.16 also counts the first label of each row, which is no target: upgrade it)"
        )

    def check_that_ranks_are_alone(self, name: str, ranks: Ranks) -> None:
        """Raise ConfigError if the loss needs other ranks, which run their parts at other times.

        What a loss gathers from them for its logs does no harm: it gets something else back, which shows.
        """
        device, losses, failure = self._trainer.args.device, list[float](), None
        before = num_collectives(device)
        returned = dict.fromkeys(("gather", "gather_for_metrics", "reduce"), _something_else)
        try:
            for own in ({}, returned):
                self._begin()
                with WithoutChance(), replaced(self._trainer.accelerator, **own):
                    losses.append(without_gradients(partial(self._run, number=None), self._groups[0])[0])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error
        # All try again, with fewer samples.
        Outcome([], failed=ranks.any(failure is not None), error=failure).raise_if_failed()
        issued, depends = num_collectives(device) - before, losses[0] != losses[1]
        if ranks.any(issued > 0 or depends):
            what = "depends on what it gathers or sums over ranks" if depends else "communicates in each forward pass"
            raise ConfigError(
                f"the loss of {name} {what}, and ranks run their parts of a batch at other times; leave out of the "
                "loss what gathers or sums over ranks, or train without adaptive"
            )

    def _begin(self) -> None:
        self._start_over()
        self._mode()

    def _run(self, samples: list[Sample], number: Any) -> _Ran:
        try:
            return self._forward(samples, number)
        except Exception as error:
            if is_out_of_memory(error) or "does not require grad" in str(error):
                raise
            if len(samples) > 1:
                runs, fails = "one sample", "two"
            elif self._runs_a_step(number):
                runs, fails = f"{len(self._of_a_step)} samples", "one"
            else:  # the script's own
                raise
            raise ConfigError(
                f"{type(self._trainer.model).__name__} runs {runs}, but not {fails}, in a forward pass "
                f"({first_line(error)}); a step cannot be split or probed with it, so train without adaptive"
            ) from error

    def _runs_a_step(self, number: Any) -> bool:
        """Return True if as many samples as the script asks for, where that is not one, run in a forward."""
        self._begin()
        try:
            without_gradients(partial(self._forward, number=number), self._of_a_step)
        except Exception:
            return False
        return len(self._of_a_step) > 1

    def _forward(self, samples: list[Sample], number: Any) -> _Ran:
        trainer = self._trainer
        batch = trainer._prepare_inputs(self._collated(samples))
        numbers = [float(kind.count(batch, len(samples))) for kind in self._kinds]
        given = None if number is None else torch.as_tensor(number, device=trainer.args.device)
        # By this some losses divide what is a mean in a sum.
        is_part = number is not None and any(samples is group for group in self._groups)
        trainer.current_gradient_accumulation_steps = len(self._groups) if is_part else 1
        with trainer.compute_loss_context_manager():
            return float(trainer.compute_loss(trainer.model, batch, num_items_in_batch=given)), numbers

    def _collated(self, samples: Sequence[Sample]) -> Any:
        batch = collated(samples, self._trainer.data_collator)
        for key, value in batch.items() if self._length else ():
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == self._length:
                batch[key] = value[:, self._window]
        return batch

    def _of_one_length(self, samples: Sequence[Sample], longest: int) -> list[Sample]:
        """Return those samples that have the most common length, and have a window of their tokens run.

        It is the one in which they have the most targets.
        """
        by_length: dict[int, list[tuple[Sample, torch.Tensor]]] = {}
        for sample in samples:
            batch = collated([sample], self._trainer.data_collator)
            ids = batch.get("input_ids")
            if isinstance(ids, torch.Tensor) and ids.dim() == 2:
                of_tokens = (batch.get(self._kinds[0].key), batch.get("attention_mask"), ids)
                whose = next(value for value in of_tokens if value is not None and value.shape == ids.shape)
                by_length.setdefault(ids.shape[1], []).append((sample, whose[0] > 0))
        if not by_length:
            return list(samples)
        self._length, alike = max(by_length.items(), key=lambda each: len(each[1]))
        longest = min(longest, self._length)
        in_windows = torch.stack([counts for _, counts in alike]).sum(0).unfold(0, longest, 1).sum(1)
        start = int(in_windows.argmax())
        self._window = slice(start, start + longest)
        return [sample for sample, _ in alike]

    def _as_sums(self, kind: LossKind, ran: _Ran) -> list[float]:
        loss, number = ran[0], ran[1][self._kinds.index(kind)]
        if kind.takes_number:
            return [loss]
        return [loss * number if number else 0.0, number]  # the mean of nothing is NaN

    def _ignored(self, sample: Sequence[Sample], batches: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the labels that may be no targets: those that the loss tells torch to ignore, and unlikely ones."""
        self._kinds = []
        ignoring = _Ignoring()
        with ignoring, torch.compiler.set_stance("force_eager"), contextlib.suppress(Exception):  # which comes again
            without_gradients(partial(self._forward, number=None), [*sample])
        labels = [value for batch in batches for key, value in batch.items() if _has_labels(key, value)]
        present = [label for label in _UNLIKELY if any(value.eq(label).any() for value in labels)]
        return [*dict.fromkeys([*ignoring.labels, IGNORED, *present])]

    def rows_of_sample(self) -> int:
        """Return the rows of a batch for each sample; 0 if that differs."""
        batches = [(collated(group, self._trainer.data_collator), len(group)) for group in self._groups]
        rows = {rows_of(batch) / number for batch, number in batches}
        return int(min(rows)) if len(rows) == 1 and len({number for _, number in batches}) > 1 else 0

    def _unlike_groups(
        self, samples: Sequence[Sample], batches: Sequence[Mapping[str, Any]], most: int
    ) -> list[list[Sample]]:
        """Return groups of short samples with targets, unlike in length, number of targets and labels if possible."""
        groups_seen = []
        for sample, batch in zip(samples, batches, strict=True):
            tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
            numbers = tuple(float(kind.count(batch, 1)) for kind in self._kinds)
            labels = tensors.get(self._kinds[0].key, torch.empty(0))
            shown = str(labels.tolist()) if labels.numel() <= _FEW else ""
            groups_seen.append((sum(value.numel() for value in tensors.values()), numbers, shown, sample))
        with_targets = [seen for seen in groups_seen if seen[1][0] > 0]
        if not with_targets:
            raise ConfigError(
                f"no sample of train_dataset of {len(samples)} has targets: all of its labels are "
                f"{self._kinds[0].ignored}, and there "
                "is nothing to learn from; look at what makes the labels: a prompt may be cut off before its answer"
            )
        if len({seen[1] for seen in with_targets}) == 1 < len(with_targets):
            log.info(
                "%d samples of train_dataset have the same number of targets, so that a mean over these looks like one "
                "over samples; the loss is looked at again while it trains", len(with_targets),
            )  # fmt: skip
        by_size = sorted(with_targets, key=lambda seen: seen[0])
        return [[seen[3] for seen in group] for group in in_groups(by_size, lambda seen: seen[:3], most=most)]


class _Ignoring(TorchFunctionMode):
    """Notes which labels functions of torch are told to ignore inside."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.cross_entropy, F.nll_loss):
            place = 4  # input, target, weight, size_average, ignore_index
            self.labels.append((kwargs or {}).get("ignore_index", args[place] if len(args) > place else IGNORED))
        return func(*args, **(kwargs or {}))


def _is_of_two(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == 2


def _adds_means_up(trainer: Any, *, has_labels: bool) -> bool:
    """Return True if Trainer does not divide the losses of accumulated batches by their number."""
    scaled = declared_as_scaled(trainer)  # of its class: the trainer has got one from us
    if scaled is not None:
        return bool(scaled)
    return trainer.compute_loss_func is not None or (has_labels and _gives_number(trainer))


def _gives_number(trainer: Any) -> bool:
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def _something_else(value: Any, *args: Any, **kwargs: Any) -> Any:
    def changed(value: Any) -> Any:
        return value * 2 + 1 if isinstance(value, torch.Tensor) and value.dtype != torch.bool else value

    return tree_map(changed, value)
