"""Tell torch.compile which sizes to expect, so that it compiles for training and not for the probe.

A layer is compiled for the sizes of its first batch. At the first batch of another size it is compiled again, now for
any size, which is a little slower. The probe and the exploration run sizes that training does not; nothing of that is
left behind.

Packed data on CUDA run torchtune's flex attention, which is compiled whatever the config says, and for each size again.
Beyond ``recompile_limit`` sizes it would run uncompiled and build the whole matrix of scores.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch._dynamo.config  # torch._dynamo alone does not say that it has it
from torch import nn
from torchtune.utils import _import_guard

from adaptive_batching.torchtune.data import is_packed

log = logging.getLogger(__name__)

# Sizes of a forward that are compiled as they come; each takes some seconds. Then follow round ones alone.
MAX_COMPILED_SIZES = 6
# Compiled sizes to allow for before torch gives up: more than there are up to thousands of packs, and what else has a
# layer compiled again, such as a validation without gradients.
_RECOMPILE_LIMIT = 64


def compiles_each_size(dataset: Any) -> bool:
    """True if each number of samples in a forward is compiled by itself, as under flex attention."""
    return is_packed(dataset) and bool(_import_guard._SUPPORTS_FLEX_ATTENTION)


def is_compiled(recipe: Any) -> bool:
    """True if any part of a step of ``recipe`` is compiled."""
    return bool(recipe._compile) or compiles_each_size(recipe._dataloader.dataset)


def prepare(recipe: Any) -> None:
    """Tell the compiler what sizes to expect, given the settings as they are now, and forget what it has compiled."""
    if compiles_each_size(recipe._dataloader.dataset):
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, _RECOMPILE_LIMIT)
    if recipe._compile:
        recipe._loss_fn = _compiled_again(recipe._model, recipe._loss_fn, sizes_vary=_sizes_vary(recipe))
    forget(recipe)


def forget(recipe: Any) -> None:
    """Drop compiled code, so that what runs next is compiled for its own sizes. Compiled files on disk stay."""
    if is_compiled(recipe):
        torch.compiler.reset()


def _sizes_vary(recipe: Any) -> bool:
    """True if the number of samples in a forward changes from step to step or with growth.

    Packs have one length, and few sizes of forwards: each is best compiled for itself.
    """
    settings = recipe.settings
    grows = settings.batch_increase_function is not None
    varies: bool = settings.cuts_by_length or settings.explores or grows
    return varies and not is_packed(recipe._dataloader.dataset)


def _compiled_again(model: nn.Module, loss: Any, *, sizes_vary: bool) -> Any:
    """Compile what torchtune has compiled, for any size from the start or for the sizes of the first batch."""
    options: dict[str, Any] = {"backend": os.environ.get("TORCH_COMPILE_BACKEND", "inductor")}  # as torchtune does
    options["dynamic"] = True if sizes_vary else None
    for module in model.modules():
        if module._compiled_call_impl is not None:
            module.compile(**options)
    if hasattr(loss, "_orig_mod"):
        return torch.compile(loss._orig_mod, **options)
    if hasattr(loss, "compute_cross_entropy"):  # a loss in chunks is compiled in part
        loss.compute_cross_entropy = torch.compile(type(loss).compute_cross_entropy.__get__(loss), **options)
    return loss
