"""From micro-batches to a gradient, and from a gradient to an optimizer step: what stock's loops do, in parts."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtune import training, utils

from adaptive_batching._attention import SampleBounds
from adaptive_batching._device import without_waiting
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.objective import Batch, Sums


def to_device(batch: Batch, device: torch.device) -> None:
    """Move a batch in place, without waiting for the device."""
    for key, value in batch.items():
        if isinstance(value, dict):
            to_device(value, device)
        elif isinstance(value, torch.Tensor):
            batch[key] = without_waiting(value, device)
        elif not isinstance(value, SampleBounds):  # a mask of blocks; anything else is an error
            moved = {key: value}
            utils.batch_to_device(moved, device)
            batch[key] = moved[key]


def forward_backward(host: Host, batch: Batch, weight: float | None = None) -> Sums:
    """Run one micro-batch, which may still be on the host, and return its sums.

    ``weight`` is the share of a part of a batch; see :meth:`Objective.loss`. With optimizers in the backward pass of
    several ranks, the sums are those of all ranks.
    """
    to_device(batch, host.device)
    with host.taking_rows():
        loss, sums = host.objective.loss(host.model, batch, weight)
        if host.steps_in_backward and host.ranks.size > 1:
            sums = sum_over_ranks(sums.map(torch.clone), host.ranks)  # copies: backward needs the loss's own values
            divisor = host.objective.divisor(sums)
            if divisor is not None:  # there is no other moment to divide; FSDP takes the mean over ranks
                loss = loss * (host.ranks.size / divisor)
        loss.backward()  # type: ignore[no-untyped-call]
    return sums


def held_back(host: Host, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which optimizers of the backward pass wait, unless a step's last micro-batch runs."""
    return (
        contextlib.nullcontext() if is_last or host.backward_optimizers is None else host.backward_optimizers.closed()
    )


def sum_over_ranks(sums: Sums, ranks: Ranks) -> Sums:
    """Return the sums of all ranks, added up in place, as stock does."""

    def summed(value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value)
        return value

    return sums if ranks.size == 1 else sums.map(summed)


def apply_gradients(host: Host, sums: Sums) -> torch.Tensor | None:
    """Take the optimizer step on the gathered gradients, with the sums of all ranks, and drop them.

    Returned is the norm of the mean gradient before clipping, or None where the config does not clip.
    """
    if host.steps_in_backward:
        return None  # done already, parameter by parameter
    grad_norm = None
    divisor = host.objective.divisor(sums)
    if divisor is not None:
        training.scale_grads(host.model, host.ranks.size / divisor)  # FSDP has taken the mean over ranks
    if host.clip_norm is not None:
        grad_norm = torch.nn.utils.clip_grad_norm_(host.model.parameters(), max_norm=host.clip_norm)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
    for optimizer in host.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return grad_norm
