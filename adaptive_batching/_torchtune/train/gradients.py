"""From micro-batches to a gradient, and from a gradient to an optimizer step: what stock's loops do, in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtune import training, utils

from adaptive_batching._device import without_waiting
from adaptive_batching._memory import num_allocation_retries, release_cached_memory
from adaptive_batching._ranks.agree import Ranks
from adaptive_batching._step.run import Outcome, run_micro_batches
from adaptive_batching._torchtune.stock.compiling import compiles_each_size
from adaptive_batching._torchtune.stock.host import Host
from adaptive_batching._torchtune.stock.objective import Batch, Sums
from adaptive_batching._torchtune.train.splitting import MicroBatch


def to_device(batch: Batch, device: torch.device) -> None:
    """Move a batch in place, without waiting for the device."""
    for key, value in batch.items():
        if isinstance(value, dict):
            to_device(value, device)
        elif isinstance(value, torch.Tensor):
            batch[key] = without_waiting(value, device)
        else:  # a mask of blocks; anything else is an error
            moved = {key: value}
            utils.batch_to_device(moved, device)
            batch[key] = moved[key]


def discard(host: Host) -> None:
    """Drop what forwards and backwards have left behind, gradients included, and really release its memory.

    Not to be called in an ``except`` block: the traceback holds tensors.
    """
    for parameter in host.model.parameters():
        parameter.grad = None
    host.objective.forget()
    release_cached_memory(host.device)


def forward_backward(host: Host, batch: Batch, weight: float | None = None) -> Sums:
    """Run one micro-batch, which may still be on the host, and return its sums.

    ``weight`` is the share of a part of a batch; see :meth:`Objective.loss`. With optimizers in the backward pass of
    several ranks, the sums are those of all ranks.
    """
    to_device(batch, host.device)
    loss, sums = host.objective.loss(host.model, batch, weight)
    if host.steps_in_backward and host.ranks.size > 1:
        sums = sum_over_ranks(sums.map(torch.clone), host.ranks)  # copies: backward needs the loss's own values
        divisor = host.objective.divisor(sums)
        if divisor is not None:  # there is no other moment to divide; FSDP takes the mean over ranks
            loss = loss * (host.ranks.size / divisor)
    loss.backward()  # type: ignore[no-untyped-call]
    return sums


def gather_gradients(
    host: Host,
    micro_batches: Sequence[MicroBatch],
    around: Callable[[MicroBatch], contextlib.AbstractContextManager[Any]] = lambda _: contextlib.nullcontext(),
    *,
    counts_retries: bool = True,
) -> Outcome[Sums]:
    """Run forward and backward of each micro-batch of this rank, up to the first that runs out of memory on some rank.

    Nothing in between waits for the device: it computes while the next micro-batch is collated. Only the masks of flex
    attention are made on the device itself, which has to be waited for; so packs are collated before any of them runs.

    Each runs in a context of ``around``. With ``counts_retries`` it is noticed when the allocator frees its cache to
    find room, which takes time to ask for.
    """
    collated: list[Batch] = []

    def run(micro_batch: MicroBatch, *, is_last: bool) -> Sums:
        if not collated:
            ahead = micro_batches if compiles_each_size(host.loader.dataset) else [micro_batch]
            collated.extend(host.objective.collate(each.samples) for each in ahead)
        batch = collated.pop(0)
        with around(micro_batch), held_back(host, is_last=is_last):
            sums = forward_backward(host, batch, micro_batch.weight)
        if is_last and len(micro_batches) > 1 and host.backward_optimizers is not None:
            host.backward_optimizers.flush()
        if micro_batch.num_tokens is None:
            return sums
        return replace(sums, tokens=torch.full_like(sums.tokens, micro_batch.num_tokens))

    runs = [partial(run, each, is_last=number == len(micro_batches)) for number, each in enumerate(micro_batches, 1)]
    count_retries = (lambda: num_allocation_retries(host.device)) if counts_retries else (lambda: 0)
    return run_micro_batches(runs, host.ranks, host.collectives, partial(discard, host), count_retries)


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


def apply_gradients(host: Host, sums: Sums, before_clipping: Callable[[], None] = lambda: None) -> torch.Tensor | None:
    """Take the optimizer step on the gathered gradients, with the sums of all ranks, and drop them.

    ``before_clipping`` is called when the mean gradient is complete. Returned is its norm before clipping, or None
    where the config does not clip.
    """
    if host.steps_in_backward:
        return None  # done already, parameter by parameter
    grad_norm = None
    divisor = host.objective.divisor(sums)
    if divisor is not None:
        training.scale_grads(host.model, host.ranks.size / divisor)  # FSDP has taken the mean over ranks
    before_clipping()
    if host.clip_norm is not None:
        grad_norm = torch.nn.utils.clip_grad_norm_(host.model.parameters(), max_norm=host.clip_norm)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
    for optimizer in host.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return grad_norm
