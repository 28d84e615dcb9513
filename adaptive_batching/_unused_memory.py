"""Memory that nothing uses any more: garbage, and what allocators keep of it until they are told to release it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

import torch

from adaptive_batching._out_of_memory import forget_failed_backward


@contextlib.contextmanager
def little_to_collect() -> Iterator[None]:
    """Leave what torch has made so far out of collections: each trial step and recovery makes one, of half a second."""
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def release_cached_memory(device: torch.device) -> None:
    """Release memory that allocators cache but nothing uses: on ``device``, and pinned memory on the host.

    Whatever cleans up after a failed forward or backward calls this, and so lets go of what autograd has kept of it.
    """
    forget_failed_backward(device)
    gc.collect()
    if device.type == "cpu":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps it otherwise
        return
    torch.get_device_module(device).empty_cache()
    if device.type in ("cuda", "xpu"):  # others have no allocator of pinned memory that could be told so
        of_torch = getattr(torch._C, "_host_emptyCache", lambda: None)  # before torch.accelerator had it
        # It never shrinks by itself, however large the step that made it grow.
        getattr(torch.accelerator, "empty_host_cache", of_torch)()


def release_workspaces(device: torch.device) -> None:
    """Release what cuBLAS works in: in an early segment, it keeps the allocator from giving that back."""
    release = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if device.type == "cuda" and release is not None:
        release()
