"""Device memory: how it is measured and limited, and what counts as running out of it."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from adaptive_batching._host_memory import CpuMeter, keep_little_on_the_host, release_host_memory

_OUT_OF_MEMORY_MESSAGES = (
    "out of memory",  # CUDA, HIP, XPU and MPS backends, including asynchronous CUDA errors
    "can't allocate memory",  # torch's CPU allocator
    "std::bad_alloc",
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT and their HIP counterparts
    "_DEVICE_ALLOCATION_FAILED",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "_HOST_ALLOCATION_FAILED",
    "_OUT_OF_DEVICE_MEMORY",  # Level Zero and SYCL, as in UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY
    "_OUT_OF_HOST_MEMORY",
)
# All that C++ says of a thread that has no memory for its stack, as where a limit is set on a process. With a build for
# CUDA the first backward pass starts some.
_NO_THREAD_MESSAGE = os.strerror(errno.EAGAIN)
# What oneDNN raises when memory is short. For an unsupported primitive it mentions a primitive descriptor instead.
_ONEDNN_MESSAGE = re.compile(r"could not create a primitive(?! descriptor)|could not create a memory object")
# Creating a cuBLAS handle fails like this when memory is short, but also for other reasons, such as a broken driver.
_NOT_INITIALIZED_MESSAGES = ("CUBLAS_STATUS_NOT_INITIALIZED", "HIPBLAS_STATUS_NOT_INITIALIZED")
# As docs/memory.md has them, with their sources.
_MOST_OF_A_CONTEXT, _MOST_OF_COLLECTIVES = 700 * 2**20, 1600 * 2**20
# If less than this is free on the device, a library that cannot be initialized is assumed to lack memory: a cuBLAS
# handle and its workspace take tens of MiB.
_LITTLE_MEMORY = 256 * 2**20


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` means that the device or the host ran out of memory. No other code decides this.

    An error from a collective never counts, whatever its cause: the communicator is broken, so nothing can run again.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    message = str(error)
    if not isinstance(error, RuntimeError) or _is_of_a_collective(error, message):
        return False
    if message == _NO_THREAD_MESSAGE:
        return True
    if any(name in message for name in _NOT_INITIALIZED_MESSAGES):
        return _accelerator_is_nearly_full()
    return any(name in message for name in _OUT_OF_MEMORY_MESSAGES) or _ONEDNN_MESSAGE.search(message) is not None


def _is_of_a_collective(error: BaseException, message: str) -> bool:
    is_distributed = dist.is_available() and isinstance(error, dist.DistError)
    return is_distributed or "CCL" in message  # NCCL, RCCL, oneCCL


def _accelerator_is_nearly_full() -> bool:
    try:
        free, _ = torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError):  # no device, or one that cannot be queried in its current state
        return False
    return bool(free < _LITTLE_MEMORY)


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of ``error``, its causes and its contexts: their frames keep the tensors of a step alive."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            waiting += [link.__cause__, link.__context__]


_ALLOCATOR_VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)


def allocator_advice(device: torch.device) -> str | None:
    """Return a setting of CUDA's caching allocator that would let more fit, or None if it is set or does not apply.

    By default the allocator splits segments of fixed size, and the unused gaps between blocks count as taken.
    """
    chosen = " ".join(os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES)
    if device.type != "cuda" or "expandable_segments" in chosen or "backend:cudaMallocAsync" in chosen:
        return None
    if torch.version.hip is not None and int(torch.version.hip.split(".")[0]) < 7:
        return None  # it has no such segments
    return "PYTORCH_ALLOC_CONF=expandable_segments:True"


def num_allocation_retries(device: torch.device) -> int:
    """Return how often the device's allocator has emptied its cache and retried; 0 if it does not count retries."""
    if device.type == "cpu":
        return 0
    module = torch.get_device_module(device)
    return int(module.memory_stats(device).get("num_alloc_retries", 0)) if hasattr(module, "memory_stats") else 0


@contextlib.contextmanager
def little_to_collect() -> Iterator[None]:
    """Leave what exists now out of garbage collections: each would go through all that torch has made.

    Every trial step and every recovery collects garbage, in half a second with all that, in no time without.
    """
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
    """Release memory that allocators cache but nothing uses: on ``device``, and pinned memory on the host."""
    if device.type == "cpu":
        release_host_memory()
        return
    gc.collect()
    torch.get_device_module(device).empty_cache()
    if device.type not in ("cuda", "xpu"):
        return  # others have no allocator of pinned memory that could be told so
    # It never shrinks by itself, however large the step that made it grow.
    empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None) or getattr(
        torch._C, "_host_emptyCache", None
    )
    if empty_host_cache is not None:
        empty_host_cache()


def release_workspaces(device: torch.device) -> None:
    """Release what cuBLAS works in: in an early segment, it keeps the allocator from giving that back."""
    release = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if device.type == "cuda" and release is not None:
        release()


class Segments(Enum):
    """How CUDA's caching allocator reserves memory: see :mod:`adaptive_batching._trace.allocator`."""

    FIXED = "fixed"
    EXPANDABLE = "expandable"


# Settings that change when memory is reserved, or how fast, or on the host, but not how much of the device.
_HARMLESS_SETTINGS = re.compile(r"pinned_\w+:\w+|release_lock_on_\w+:\w+|backend:native|max_split_size_mb:-1")


def segments_by_settings(settings: str) -> Segments | None:
    """Return what settings, as in ``PYTORCH_ALLOC_CONF``, make of the allocator; None if one has unknown effects."""
    found = Segments.FIXED
    for setting in filter(None, settings.replace(" ", "").split(",")):
        key, _, value = setting.partition(":")
        if key == "expandable_segments" and value in ("True", "False"):
            found = Segments.EXPANDABLE if value == "True" else Segments.FIXED
        elif not _HARMLESS_SETTINGS.fullmatch(setting):
            return None
    return found


def cuda_segments() -> Segments | None:
    """Return how this process's allocator on CUDA reserves memory; None if that does not follow from known rules."""
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ or torch.cuda.get_allocator_backend() != "native":
        return None
    # A setting can be changed while the process runs, so that torch knows better than the environment.
    current = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    chosen = [current()] if current else [os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES]
    found = segments_by_settings(",".join(filter(None, chosen)))
    is_expanding = torch.version.hip is None and sys.platform == "linux"  # elsewhere the setting may do nothing
    return found if found is not Segments.EXPANDABLE or is_expanding else None


class MemoryMeter(Protocol):
    """Read and limit the memory of one device from this process. All amounts are in bytes."""

    device: torch.device

    fails_safely: bool
    """False if a failed allocation can end the process, as in libraries on the host."""

    is_predictable: bool
    """False if freed memory may be kept, so that a step takes more than it has in use."""

    keeps_freed_memory: bool
    """True for an allocator of the device that keeps it in blocks, so that it matters what has been where."""

    @property
    def device_name(self) -> str: ...

    @property
    def total_bytes(self) -> int:
        """Memory of the device, or this process's share of it if that is smaller."""

    def used_bytes(self) -> int:
        """Return the memory that this process has in use now."""

    def free_bytes(self) -> int:
        """Return how much more this process could take now; memory held by other processes is not free."""

    def outside_bytes(self) -> int:
        """Return what this process takes of the device outside of what :meth:`limit` counts, at most."""

    def reset_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        """Return the most that counted against the limit at once since :meth:`reset_peak`, including what already did.

        For a caching allocator this is reserved memory: the memory in use and the unused gaps between blocks.
        """

    def peak_allocated_bytes(self) -> int:
        """Return the most that was in use at once since :meth:`reset_peak`; at most :meth:`peak_bytes`."""

    def num_retries(self) -> int:
        """Return how often the allocator has emptied its cache to find room since the process started."""

    def num_freed_bytes(self) -> int:
        """Return the bytes that the allocator has given back to the device since the process started."""

    def allocator_settings(self) -> dict[str, str]:
        """Return the settings in the environment that change how much the allocator reserves."""

    def segments(self) -> Segments | None:
        """Return by which rules the allocator reserves memory; None if they are not known, or it keeps none."""

    def release(self) -> None: ...

    def synchronize(self) -> None:
        """Wait for the device, so that a delayed error is raised here."""

    def limit(self, num_bytes: int) -> contextlib.AbstractContextManager[None]:
        """Make this process run out of memory inside the context if it would use more than ``num_bytes``."""


def memory_meter(device: torch.device | str) -> MemoryMeter:
    """Return the meter for ``device``.

    Raises:
        NotImplementedError: If the peak of a step cannot be measured on this device.
    """
    device = torch.device(device)
    if device.type == "cpu":
        if not Path("/proc/self/clear_refs").exists():
            raise NotImplementedError(
                f"device='cpu': peak memory can be measured on Linux only, not on {sys.platform}; "
                f"set use_maximum_batch_size: False, or give adaptive_batching.max_batch_size to grow without a probe"
            )
        keep_little_on_the_host()
        return CpuMeter()
    module = torch.get_device_module(device)
    if not all(hasattr(module, name) for name in ("max_memory_reserved", "reset_peak_memory_stats", "empty_cache")):
        raise NotImplementedError(
            f"device='{device}' reports no peak memory; set use_maximum_batch_size: False, or give "
            f"adaptive_batching.max_batch_size to grow without a probe"
        )
    return AcceleratorMeter(device)


class AcceleratorMeter:
    """Memory of CUDA, ROCm, XPU and other accelerators whose caching allocator keeps statistics."""

    fails_safely = True
    is_predictable = False
    keeps_freed_memory = True

    def __init__(self, device: torch.device) -> None:
        self._api: Any = torch.get_device_module(device)
        index = device.index if device.index is not None else self._api.current_device()
        self.device = torch.device(device.type, index)
        self._enforces = hasattr(self._api, "set_per_process_memory_fraction")

    @property
    def device_name(self) -> str:
        return str(self._api.get_device_name(self.device))

    @property
    def total_bytes(self) -> int:
        return int(self._api.mem_get_info(self.device)[1] * self._fraction())

    def used_bytes(self) -> int:
        return int(self._api.memory_allocated(self.device))

    def free_bytes(self) -> int:
        reserved = self._api.memory_reserved(self.device)
        unused = reserved - self._api.memory_allocated(self.device)
        return int(min(self._api.mem_get_info(self.device)[0], self.total_bytes - reserved) + unused)

    def outside_bytes(self) -> int:
        """Return what the context, its kernels and buffers of collectives take, which the allocator does not know of.

        Where others are on the device, theirs cannot be told apart: then it is what these take at most.
        """
        free, total = self._api.mem_get_info(self.device)
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        most = _MOST_OF_A_CONTEXT + (_MOST_OF_COLLECTIVES if several else 0)
        return int(min(total - free - self._api.memory_reserved(self.device), most))

    def reset_peak(self) -> None:
        self._api.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        return int(self._api.max_memory_reserved(self.device))

    def peak_allocated_bytes(self) -> int:
        return int(self._api.max_memory_allocated(self.device))

    def num_retries(self) -> int:
        return num_allocation_retries(self.device)

    def num_freed_bytes(self) -> int:
        statistics = self._api.memory_stats(self.device) if hasattr(self._api, "memory_stats") else {}
        return int(statistics.get("reserved_bytes.all.freed", 0))

    def allocator_settings(self) -> dict[str, str]:
        return {name: os.environ[name] for name in _ALLOCATOR_VARIABLES if name in os.environ}

    def segments(self) -> Segments | None:
        return cuda_segments() if self.device.type == "cuda" else None

    def release(self) -> None:
        release_cached_memory(self.device)

    def synchronize(self) -> None:
        self._api.synchronize(self.device)

    @contextlib.contextmanager
    def limit(self, num_bytes: int) -> Iterator[None]:
        if not self._enforces:
            yield
            return
        before = self._fraction()
        device_bytes = self._api.mem_get_info(self.device)[1]
        self._api.set_per_process_memory_fraction(min(before, num_bytes / device_bytes), self.device)
        try:
            yield
        finally:
            self._api.set_per_process_memory_fraction(before, self.device)

    def _fraction(self) -> float:
        """Return the share of the device that the user lets this process take."""
        if not hasattr(self._api, "get_per_process_memory_fraction"):
            return 1.0
        return float(self._api.get_per_process_memory_fraction(self.device))
