"""Tell torch.compile which sizes to expect, so that it compiles for training and not for the probe.

A layer is compiled for the sizes of its first batch. At the first batch of another size it is compiled again, now for
any size, which is a little slower. The probe and the exploration run sizes that training does not; nothing of that is
left behind.

Packed data on CUDA run torchtune's flex attention, which is compiled whatever the config says, and for each size again.
Beyond ``recompile_limit`` sizes it would run uncompiled and build the whole matrix of scores.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo.config  # torch._dynamo alone does not say that it has it
from torchtune.utils import _import_guard

from adaptive_batching._torchtune.stock.data import is_packed
from adaptive_batching._torchtune.stock.host import Host

# Sizes of a forward that are compiled as they come; each takes some seconds. Then follow round ones alone.
MAX_COMPILED_SIZES = 6
# Compiled sizes to allow for before torch gives up: more than there are up to thousands of packs, and what else has a
# layer compiled again, such as a validation without gradients.
_RECOMPILE_LIMIT = 64


def compiles_each_size(dataset: Any) -> bool:
    """True if each number of samples in a forward is compiled by itself, as under flex attention."""
    return is_packed(dataset) and bool(_import_guard._SUPPORTS_FLEX_ATTENTION)


def limits_restored() -> contextlib.AbstractContextManager[Any]:
    """Put back, when the context ends, how many sizes torch compiles: :func:`prepare` raises it."""
    restored: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(
        recompile_limit=torch._dynamo.config.recompile_limit
    )
    return restored


def prepare(host: Host, *, sizes_vary: bool) -> None:
    """Tell the compiler if the samples in a forward change with steps or growth, and forget what it has compiled.

    Packs have one length and few sizes of forwards, so that each is best compiled for itself all the same.
    """
    dataset = host.loader.dataset
    if compiles_each_size(dataset):
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, _RECOMPILE_LIMIT)
    if host.is_compiled:
        # as torchtune does
        dynamic = True if sizes_vary and not is_packed(dataset) else None
        again = partial(torch.compile, backend=_backend(), dynamic=dynamic)
        for module in host.model.modules():
            if module._compiled_call_impl is not None:
                module.compile(**again.keywords)
        host.objective.recompile(lambda loss: _with_compiled_part(loss, again))
    forget(host)


def forget(host: Host) -> None:
    """Drop compiled code, so that what runs next is compiled for its own sizes. Compiled files on disk stay."""
    if host.is_compiled or compiles_each_size(host.loader.dataset):
        torch.compiler.reset()


def _backend() -> str:
    return os.environ.get("TORCH_COMPILE_BACKEND", "inductor")


def _with_compiled_part(loss: Any, compile_part: Callable[[Any], Any]) -> Any:
    """Return ``loss`` with what torchtune compiles of it compiled by ``compile_part``."""
    if hasattr(loss, "_orig_mod"):
        return compile_part(loss._orig_mod)
    if hasattr(loss, "compute_cross_entropy"):  # a loss in chunks is compiled in part
        loss.compute_cross_entropy = compile_part(type(loss).compute_cross_entropy.__get__(loss))
    return loss
