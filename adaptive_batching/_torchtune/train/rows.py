"""Rows of samples end to end in a recipe: found out before training that they are computed as samples are."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import torch

from adaptive_batching._device import unchanged_random_state
from adaptive_batching._state import rehearsal
from adaptive_batching._step.judge import perturbed
from adaptive_batching._torchtune.stock.data import Sample, is_packed
from adaptive_batching._torchtune.stock.end_to_end import RowSeams, dtype_of, why_not_in_rows
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.objective import Batch
from adaptive_batching._torchtune.train.recipe_work import to_device
from adaptive_batching._values import first_line

log = logging.getLogger(__name__)

_TO_LOOK_AT = 32  # samples, among which two short ones are looked for
_ROUNDING, _ROUNDING_OF_HALF = 1e-4, 0.1  # of a loss; that of preferences is a small difference of large sums


def lay_end_to_end(host: Host) -> Host:
    """Return ``host`` with models that take samples end to end in one row, or say why samples are padded."""
    with unchanged_random_state(host.device):  # from which data may draw
        first = host.loader.dataset[0]
    if is_packed(host.loader.dataset) or not host.objective.is_text(first):
        return host  # packs are rows, and what images take is not known
    if not host.objective.lays:
        why: str | None = f"{host.name} collates by a function of its own"
    elif host.tensor_parallel:
        why = "layers are divided among devices"
    else:
        why = why_not_in_rows(host.models) or _why_not_its_loss(host)
    if host.ranks.any(why is not None):
        why = why or "they change the result on another rank"
        log.info("samples of similar length are padded, as they cannot be packed without padding: %s", why)
        return host
    return replace(host, rows=RowSeams(host.models))


def _why_not_its_loss(host: Host) -> str | None:
    """Return why the loss of a row is not that of its samples, in words; None if it is."""
    objective, name = copy.copy(host.objective), type(host.objective).__name__
    with unchanged_random_state(host.device):
        some = [host.loader.dataset[index] for index in range(min(_TO_LOOK_AT, len(host.loader.dataset)))]
    learned = (sample for sample in some if objective.counts([sample]).terms)
    samples: list[Sample] = sorted(learned, key=objective.size_in_row)[:2]
    if len(samples) < 2:
        return None  # an audit in training would see it

    def loss(batch: Batch, terms: int) -> float:
        to_device(batch, host.device)
        return float(objective.loss(host.model, batch, float(terms))[1].loss)

    with (
        rehearsal(host.state, host.device),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        perturbed(host.model.parameters()),  # a policy that equals its reference tells nothing
    ):
        for model in host.models:
            model.eval()
        objective.begin_step(0, len(samples))
        terms = [objective.counts([sample]).terms for sample in samples]
        alone = sum(loss(objective.collate([one]), number) for one, number in zip(samples, terms, strict=True))
        with RowSeams(host.models).open():
            try:
                row = loss(objective.lay(samples), sum(terms))
            except Exception as error:  # of an objective that nobody here has seen
                return f"{name} fails on a row ({type(error).__name__}: {first_line(error)})"
    is_half = torch.finfo(dtype_of(host.model)).bits < 32
    if abs(row - alone) > (_ROUNDING_OF_HALF if is_half else _ROUNDING) * abs(alone):
        return f"{name} has a loss of {row:.6g} for a row of two samples that have {alone:.6g}"
    return None
