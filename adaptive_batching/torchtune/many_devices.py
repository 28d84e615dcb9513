"""What the recipes for many devices have of their own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import training

from adaptive_batching.config import ConfigError
from adaptive_batching.memory import is_out_of_memory
from adaptive_batching.micro_batches.cut import length_in_chunks
from adaptive_batching.probe.find import DoesNotFitError
from adaptive_batching.random_state import unchanged_random_state
from adaptive_batching.ranks.agree import GroupError
from adaptive_batching.ranks.fsdp import MicroBatchCollectives, can_drain, is_sharded
from adaptive_batching.torchtune.data import is_packed
from adaptive_batching.torchtune.gradients import forward_backward, gathered_chunks, in_backward
from adaptive_batching.torchtune.recovery import remedy
from adaptive_batching.torchtune.stock import replaced_in_torchtune

log = logging.getLogger(__name__)

_SHORT = 8

_NO_STATS: dict[str, Callable[..., Any]] = {
    "get_memory_stats": lambda *args, **kwargs: {},
    "log_memory_stats": lambda *args, **kwargs: None,
}


class ManyDevices:
    """Mixed into a stock distributed recipe, between :class:`AdaptiveBatching` and the recipe."""

    # Set by the stock recipe
    _device: torch.device
    _model: Any
    _loss_fn: Any
    activations_handling_ctx: contextlib.AbstractContextManager[None]
    ignore_labels_cache: torch.Tensor

    profiles_steps = True

    def __init__(self, cfg: DictConfig) -> None:
        if not training.is_distributed():
            raise ConfigError("this recipe runs on several devices; launch it with tune run --nproc_per_node <number>")
        # Where the host gathers beside the device, stock asks for gloo twice if both are the cpu.
        on_cpu = {"get_distributed_backend": lambda *args, **kwargs: "gloo"} if cfg.device == "cpu" else {}
        with replaced_in_torchtune(**on_cpu):
            super().__init__(cfg=cfg)  # type: ignore[call-arg]

    def _setup_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        # Stock reads and logs the memory of an accelerator when the model is set up, and there is none.
        with replaced_in_torchtune(**_NO_STATS if self._device.type == "cpu" else {}):
            return super()._setup_model(*args, **kwargs)  # type: ignore[misc, no-any-return]

    def _loss_step(self, batch: dict[str, Any]) -> torch.Tensor:
        """The mean loss over the targets of ``batch``, operation by operation what stock's loop computes."""
        labels = batch.pop("labels")  # [b, s]
        with self.activations_handling_ctx:
            logits = self._model(**batch)  # [b, s, vocabulary], or a list of chunks of s
        labels = torch.hstack((labels[..., 1:], self.ignore_labels_cache[: labels.shape[0]]))
        if not isinstance(logits, list):
            labels = labels.reshape(-1)
            logits = logits.reshape(-1, logits.size(-1))
        loss: torch.Tensor = self._loss_fn(logits, labels)
        return loss


def record_collectives(recipe: Any) -> MicroBatchCollectives | None:
    """Make running out of memory survivable on every rank, where that is possible and wanted; say so where it is not.

    The sequence of collectives is recorded in a forward and backward of a few tokens, which leaves nothing behind.

    Raises:
        ConfigError: If a probe is asked for that could not survive running out of memory.
        DoesNotFitError: If not even that forward and backward fit.
    """
    settings = recipe.settings
    if in_backward(recipe):
        why = "optimizer_in_bwd=True has updated parameters before a rank knows that another ran out of memory"
    elif getattr(recipe, "tensor_parallel_dim", 1) > 1:
        why = "tensor_parallel_dim above 1 has collectives within each layer, which cannot be issued again"
    elif not is_sharded(recipe._model):
        why = "the model is not sharded by FSDP2"
    elif not can_drain():
        why = f"torch {torch.__version__} cannot reset FSDP2 after an error (2.13 can)"
    else:
        why = ""
    if why and settings.probes:
        raise ConfigError(
            f"the largest batch cannot be probed on several devices: {why}. Set use_maximum_batch_size=False, and "
            f"adaptive_batching.max_batch_size to grow"
        )
    if why and recipe.noise_scale_every is not None:
        raise ConfigError(
            f"the gradient noise scale cannot be measured on several devices: {why}. Leave noise_scale_every unset, "
            f"and take an increase function that does not need it"
        )
    if why:
        recipe.why_no_recovery = why
        if settings.recover_from_oom:
            log.warning("recovery from running out of memory is off: %s", why)
        return None
    if not settings.recover_from_oom and not settings.probes and recipe.noise_scale_every is None:
        return None
    if not settings.enabled and (failure := recipe.ranks.connect()):
        # What asks for more than stock does cannot go on without; this can.
        recipe.why_no_recovery = str(GroupError(failure))
        if recipe.ranks.is_first:
            log.warning("recovery from running out of memory is off: %s", recipe.why_no_recovery)
        return None
    collectives = MicroBatchCollectives(recipe._model)
    tokens = torch.arange(1, _length_to_record(recipe) + 1, device=recipe._device)[None]  # [1, s]; any text will do
    try:
        with unchanged_random_state(recipe._device), torch.compiler.set_stance("force_eager"):
            collectives.start()
            forward_backward(recipe, {"tokens": tokens, "labels": tokens})
            collectives.finish()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFitError(
            f"out of memory in a first forward and backward, of {tokens.numel()} tokens; nothing larger will fit. Use "
            f"more devices, or {remedy(recipe)}"
        ) from error
    for parameter in recipe._model.parameters():
        parameter.grad = None
    return collectives


def _length_to_record(recipe: Any) -> int:
    """Tokens of a short sample whose forward issues the collectives that those of training do."""
    chunks = gathered_chunks(recipe._model)
    dataset = recipe._dataloader.dataset
    if chunks > 1 and is_packed(dataset):  # packs cannot be padded, and need not be: they have one length
        length = len(dataset[0]["tokens"])
        fewer = -(-length // -(-length // chunks))
        if fewer < chunks:
            return fewer  # tokens, each a chunk
    return length_in_chunks(_SHORT, chunks)
