"""From micro-batches to a gradient, and from a gradient to an optimizer step: what stock's loops do, in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchtune import training, utils
from torchtune.training import OffloadActivations

from adaptive_batching.memory import num_allocation_retries, release_cached_memory
from adaptive_batching.micro_batches.run import Outcome, run_micro_batches
from adaptive_batching.ranks.fsdp import is_sharded
from adaptive_batching.torchtune.compiling import compiles_each_size
from adaptive_batching.torchtune.cutting import MicroBatch

_PINS_MEMORY = ("cuda", "xpu")

Sums = tuple[torch.Tensor, torch.Tensor]
"""The loss summed over tokens, and their number; both scalars."""


def in_backward(recipe: Any) -> bool:
    """Whether each parameter is stepped in the backward pass; the LoRA recipes do not know the option."""
    return bool(getattr(recipe, "_optimizer_in_bwd", False))


def lr_holder(recipe: Any) -> Any:
    """What torchtune reads the learning rate from."""
    return recipe._optim_ckpt_wrapper if in_backward(recipe) else recipe._optimizer


def optimizers_of(recipe: Any) -> list[Optimizer]:
    """The recipe's optimizer, or those of its parameters."""
    return list(recipe._optim_ckpt_wrapper.optim_map.values()) if in_backward(recipe) else [recipe._optimizer]


def to_device(batch: dict[str, Any], device: torch.device) -> None:
    """Move a batch in place, without waiting for the device.

    A copy from ordinary memory would wait until all that the device has been given is done, so that the next
    micro-batch could not be collated meanwhile.
    """
    pins = device.type in _PINS_MEMORY  # elsewhere a copy that is not waited for could outlive its source
    if pins:
        _pin(batch)
    for key, value in batch.items():
        if isinstance(value, dict):
            to_device(value, device)
        elif isinstance(value, torch.Tensor):
            batch[key] = value.to(device, non_blocking=pins)
        else:  # a mask of blocks; whatever else is an error
            moved = {key: value}
            utils.batch_to_device(moved, device)
            batch[key] = moved[key]


def _pin(batch: dict[str, Any]) -> None:
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            batch[key] = value.pin_memory()


def gathered_chunks(model: nn.Module) -> int:
    """Chunks of tokens for each of which a forward of ``model`` gathers its output layer; 0 if that does not happen.

    It does where that layer is sharded on its own (``custom_sharded_layers``) and the loss takes its logits in chunks.
    """
    decoder: Any = getattr(model, "decoder", model)  # of a multimodal model
    output = getattr(decoder, "output", None)
    on_its_own = isinstance(output, nn.Module) and is_sharded(output)
    return int(getattr(decoder, "num_output_chunks", 0)) if on_its_own else 0


def discard(recipe: Any) -> None:
    """Drop what forwards and backwards have left behind, gradients included, and really release its memory.

    Not to be called in an ``except`` block: the traceback holds tensors.
    """
    for parameter in recipe._model.parameters():
        parameter.grad = None
    reset_offloading(recipe)
    release_cached_memory(recipe._device)


def reset_offloading(recipe: Any) -> None:
    """Forget the activations of a forward that did not end; torchtune's context keeps track of them by itself."""
    context = recipe.activations_handling_ctx
    if not isinstance(context, OffloadActivations):
        return
    # Its hooks refer to it, so that it lives on until the garbage is collected; what it holds need not.
    for name in ("tracker", "fwd_stash", "bwd_tensor_stash", "bwd_ev_stash"):
        getattr(context, name, {}).clear()
    recipe.activations_handling_ctx = OffloadActivations()


def forward_backward(recipe: Any, batch: dict[str, Any], weight: float | None = None) -> Sums:
    """Run one micro-batch.

    Args:
        recipe: The recipe; its ``_loss_step`` gives a mean over tokens.
        batch: The collated samples.
        weight: What the mean loss is multiplied by; None: the number of labels.

    Returns:
        The weighted loss, and the number of labels. With optimizers in the backward pass, those of all ranks.
    """
    to_device(batch, recipe._device)
    num_tokens = (batch["labels"] != recipe._loss_fn.ignore_index).sum()
    # The loss is a mean over tokens. Times their number it can be summed over micro-batches, and the gradient divided
    # by all tokens of the step.
    loss = recipe._loss_step(batch) * (num_tokens if weight is None else weight)
    total = loss.detach()
    if in_backward(recipe) and recipe.ranks.size > 1:
        total = sum_over_ranks(recipe, total.clone())
        num_tokens = sum_over_ranks(recipe, num_tokens.clone())  # the loss's own is kept for its backward
        loss = loss * (recipe.ranks.size / num_tokens)  # as there is no other moment to divide; FSDP takes the mean
    loss.backward()
    return total, num_tokens


def gather_gradients(
    recipe: Any,
    micro_batches: Sequence[MicroBatch],
    around: Callable[[MicroBatch], contextlib.AbstractContextManager[Any]] = lambda _: contextlib.nullcontext(),
) -> Outcome[Sums]:
    """Run forward and backward of each micro-batch, up to the first that runs out of memory on some rank.

    Nothing in between waits for the device: it computes while the next micro-batch is collated. Only the masks of flex
    attention are made on the device itself, which has to be waited for; so packs are collated before any of them runs.

    Args:
        recipe: The recipe.
        micro_batches: Those of this rank.
        around: Gives the context that each of them runs in.
    """

    collated: list[dict[str, Any]] = []

    def run(micro_batch: MicroBatch, *, is_last: bool) -> Sums:
        if not collated:
            ahead = micro_batches if compiles_each_size(recipe._dataloader.dataset) else [micro_batch]
            collated.extend(recipe.collate(each.samples) for each in ahead)
        batch = collated.pop(0)
        with around(micro_batch), contextlib.nullcontext() if is_last else recipe.gate.closed():
            loss, num_tokens = forward_backward(recipe, batch, micro_batch.weight)
        if is_last and len(micro_batches) > 1:
            recipe.gate.flush()
        return loss, num_tokens if micro_batch.num_labels is None else torch.full_like(
            num_tokens, micro_batch.num_labels
        )

    return run_micro_batches(
        [partial(run, each, is_last=number == len(micro_batches)) for number, each in enumerate(micro_batches, 1)],
        recipe.ranks,
        recipe.collectives,
        partial(discard, recipe),
        # Counting takes time; a run that is as stock is left alone, however slow.
        (lambda: num_allocation_retries(recipe._device)) if recipe.settings.enabled else (lambda: 0),
    )


def sum_over_ranks(recipe: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of ``tensor``, in place, over the ranks of the recipe, as stock takes it."""
    if recipe.ranks.size > 1:
        dist.all_reduce(tensor)
    return tensor


def apply_gradients(
    recipe: Any, num_tokens: torch.Tensor, before_clipping: Callable[[], None] = lambda: None
) -> torch.Tensor | None:
    """Take the optimizer step on the gradients gathered over ``num_tokens`` tokens of all ranks; none are left behind.

    Args:
        recipe: The recipe.
        num_tokens: What the sum of gradients is divided by.
        before_clipping: Called when the mean gradient is complete.

    Returns:
        The norm of the gradient before clipping, or None where the config does not clip.
    """
    if in_backward(recipe):
        return None  # done already, parameter by parameter
    grad_norm = None
    training.scale_grads(recipe._model, recipe.ranks.size / num_tokens)  # FSDP has taken the mean over ranks
    before_clipping()
    if recipe._clip_grad_norm is not None:
        grad_norm = torch.nn.utils.clip_grad_norm_(recipe._model.parameters(), max_norm=float(recipe._clip_grad_norm))
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
    recipe._optimizer.step()
    recipe._optimizer.zero_grad(set_to_none=True)
    return grad_norm
