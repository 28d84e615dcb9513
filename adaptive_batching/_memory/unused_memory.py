"""Memory that nothing uses any more: garbage, and what autograd and allocators keep until they are told to let go."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator

import torch

from adaptive_batching._memory.host_limits import process_limits
from adaptive_batching._memory.out_of_memory import is_out_of_memory

_keeps_freed_memory = False  # on the host, again, after it had been told to keep little


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

    Whatever cleans up after a failed forward or backward calls this, and so lets go of what autograd has kept of it. If
    the host was to keep freed memory again, it keeps little from then on.
    """
    forget_failed_backward(device)
    gc.collect()
    if device.type == "cpu":
        if _keeps_freed_memory:
            keep_little_on_the_host()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps it otherwise
        return
    torch.get_device_module(device).empty_cache()
    if device.type in ("cuda", "xpu"):  # others have no allocator of pinned memory that could be told so
        of_torch = getattr(torch._C, "_host_emptyCache", lambda: None)  # before torch.accelerator had it
        # It never shrinks by itself, however large the step that made it grow.
        getattr(torch.accelerator, "empty_host_cache", of_torch)()


def forget_failed_backward(device: torch.device) -> None:
    """Drop the graph of a backward pass that has failed: autograd keeps it, and no Python object refers to it.

    The tasks that were still to run stay in the queue of the calling thread, each with its node and thus with saved
    tensors, until that thread's next backward pass. Those on an accelerator are dropped by a thread of the device, when
    it comes to them. A backward pass of nothing waits for both: tasks of a pass that is over come first in a queue
    (``CompareNodeTaskTime`` in torch/csrc/autograd/engine.cpp). It allocates nothing and starts no kernel.
    """
    # The device's thread first: until it has let go of the pass, this thread's tasks do not count as left over.
    for place in dict.fromkeys((device, torch.device("cpu"))):
        with torch.inference_mode(False), torch.enable_grad():
            nothing = torch.empty(0, device=place, requires_grad=True)
            try:
                torch.autograd.backward(nothing.view_as(nothing), torch.empty_like(nothing))
            except RuntimeError as error:
                if not is_out_of_memory(error):  # as where it is the first pass, and its threads cannot start
                    raise


def release_workspaces(device: torch.device) -> None:
    """Release what cuBLAS works in: in an early segment, it keeps the allocator from giving that back."""
    release = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if device.type == "cuda" and release is not None:
        release()


def keep_little_on_the_host() -> None:
    """Make host libraries return freed memory if this process's memory is limited, at the price of speed.

    glibc keeps freed memory and fragments it: after the first failed allocation, little fits any more. oneDNN, which
    computes in bfloat16, caches code and memory for up to 1,024 shapes, so that many sizes or lengths would fill any
    limit; it reads its setting on first use.
    """
    global _keeps_freed_memory
    if process_limits():
        for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(variable, "1")
        _tell_glibc(mmap_threshold=2**16, trim_threshold=2**16)
        _keeps_freed_memory = False


def keep_freed_memory_on_the_host() -> None:
    """Let glibc keep freed memory again, as much as it does by itself: for steps that leave room below the limit.

    Pages that are returned have to be cleared when they are asked for again: four tenths of an epoch, with all of
    ``benchmarks/trainer_vs_peers.py`` told to keep little.
    """
    global _keeps_freed_memory
    if process_limits():
        _tell_glibc(mmap_threshold=2**25, trim_threshold=2**26)  # up to which it adapts them
        _keeps_freed_memory = True


def _tell_glibc(*, mmap_threshold: int, trim_threshold: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((-3, mmap_threshold), (-1, trim_threshold), (-8, 1)):  # the last is M_ARENA_MAX
            mallopt(parameter, value)
