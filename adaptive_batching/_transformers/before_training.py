"""The checks of a Trainer's step before training: how its samples lie, and whether gradients of parts add up."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from adaptive_batching._loop.samples import collated
from adaptive_batching._ranks.fsdp import end_forward
from adaptive_batching._step.judge import GradientsDifferError
from adaptive_batching._transformers.check_of_rows import check_rows
from adaptive_batching._transformers.handed_out import Sample
from adaptive_batching._transformers.loss_kind import beside_each_other, kinds_of
from adaptive_batching._transformers.row_of_samples import NoRowError
from adaptive_batching._transformers.sharded import head_of, short_with_targets
from adaptive_batching._transformers.step_in_parts import StepInParts
from adaptive_batching._values import ByLength, ConfigError, Fixed, first_line, percent

log = logging.getLogger(__name__)


def get_ready(step: StepInParts, samples: Sequence[Sample]) -> None:
    """Find out if ``samples`` are padded, what a sharded model communicates in a forward, and if gradients add up.

    Raises:
        ConfigError: If there are other collectives than FSDP's, or gradients of parts do not add up.
        DoesNotFitError: If memory runs out.
    """
    trainer = step.trainer
    step.forward_backward = partial(trainer.forward_backward, trainer.model)
    step.pads = not _is_one_row(collated(samples[:2], step.collate), len(samples[:2]))
    step.filler_samples = [short_with_targets(trainer, step.kind, samples)]
    step.label = step.kind.label_of(samples, collated(samples, step.collate))
    end_forward(step.models)
    record = partial(step.parallel.record, partial(step.run_alike, step.run_filler), trainer.args.device)
    try:
        record()
    except ConfigError:
        step.gathered_first = head_of(trainer.model)
        if not step.gathered_first:
            raise
        record()
    if step.may_be_rows:
        _lay_end_to_end(step, samples)
    # Of batches that are not split, the means are weighted as well, where a step has several.
    weights = isinstance(step.size, (Fixed, ByLength)) or (
        trainer.args.gradient_accumulation_steps > 1 and not step.kind.takes_number
    )
    if weights and len(samples) > 1 and step.batch_dependent_module() is None:
        by_length = sorted(samples, key=lambda sample: step.tokens([sample]))
        shorter, longer = by_length[: len(samples) // 2], by_length[len(samples) // 2 :]
        one, other = longer[:1], shorter[:1]
        pads_first = _is_padded_first(collated([*one, *other], step.collate))
        if pads_first:  # padding then makes its first token a target, unless that is of a prompt
            other.append(max(shorter, key=partial(_share_of_targets, step)))
        try:
            _compare_as_rows_if_it_may_be(step, one, other)
        except ConfigError as error:
            if not pads_first:
                raise
            raise ConfigError(
                f"{error}. Padding comes first here, which makes a target of the first token of all but the "
                "longest sample: pad on the right (tokenizer.padding_side='right')"
            ) from error
    if step.in_rows:
        log.info("samples are packed without padding, and attention stays within each")


def _compare_as_rows_if_it_may_be(step: StepInParts, one: list[Sample], other: list[Sample]) -> None:
    """Compare rows with the padded batch, and where they differ, what is padded in their place.

    Raises:
        ConfigError: If gradients of padded parts differ as well.
    """
    if step.in_rows:
        try:
            step.runner.compare(one, other)
            return
        except GradientsDifferError as error:
            batch = [*one, *other]
            step.in_rows, step.targets = False, ()
            step.pads = not _is_one_row(collated(batch, step.collate), len(batch))
            _say_that_samples_are_padded(step, f"the gradient of rows is {percent(error.error)} off that of a batch")
    _compare(step, one, other)


def _compare(step: StepInParts, one: list[Sample], other: list[Sample]) -> None:
    """Compare gradients of parts with that of their union; where they differ, say by how much with other weights.

    Raises:
        ConfigError: If they differ.
    """
    found = step.kind
    try:
        step.runner.compare(one, other)
    except GradientsDifferError as error:
        if found.takes_number:
            raise
        errors = {found: error.error}
        try:
            for kind in kinds_of(step.trainer, collated([*one, *other], step.collate), [found.ignored]):
                if kind.takes_number or kind.of == found.of:
                    continue
                step.kind = replace(kind, factor=found.factor)
                try:
                    step.runner.compare(one, other)
                except GradientsDifferError as otherwise:  # where they do not, that is chance: losses did not agree
                    errors[kind] = otherwise.error
        finally:
            step.kind = found
        raise ConfigError(f"{error}{beside_each_other(errors)}") from error


def _share_of_targets(step: StepInParts, sample: Sample) -> float:
    return float(step.kind.count(collated([sample], step.collate), 1)) / max(step.tokens([sample]), 1)


def _lay_end_to_end(step: StepInParts, samples: Sequence[Sample]) -> None:
    """Have samples laid end to end if the model computes the same; else leave a line that says why not."""
    why = ""
    batch = collated(samples[:1], step.collate)
    shifts = tuple(key for key in dict.fromkeys((step.kind.key, "labels")) if key in batch)
    for targets in (shifts, ()) if step.kind.of.startswith("shifted") else ((), shifts):
        try:
            if step.length(samples[0]) is None:
                raise NoRowError("the tokens of a sample are not known")
            if step.noise:
                raise NoRowError("neftune_noise_alpha scales noise by the length of a row")
            off = check_rows(step, step.trainer.model, samples, targets, step.parallel.ranks)
        except Exception as error:  # of a model that nobody here has seen, alike on all ranks
            why = str(error) if isinstance(error, NoRowError) else f"{type(error).__name__}: {first_line(error)}"
            end_forward(step.models)
            break
        if off is None:
            step.in_rows, step.pads, step.targets = True, False, targets
            return
        why = why or off
    _say_that_samples_are_padded(step, why)


def _say_that_samples_are_padded(step: StepInParts, why: str) -> None:
    model = step.trainer.model
    name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    how = "with padding, samples of similar length in a forward pass" if step.pads else "as they are collated"
    log.info("samples of %s run %s: %s", name, how, why)


def _is_padded_first(batch: Mapping[str, Any]) -> bool:
    mask = batch.get("attention_mask")
    return isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask[:, 0].all())


def _is_one_row(batch: Mapping[str, Any], num_samples: int) -> bool:
    """Return True if a collate function has laid the samples of a batch end to end."""
    ids = batch.get("input_ids")
    return isinstance(ids, torch.Tensor) and ids.dim() == 2 and len(ids) == 1 < num_samples
