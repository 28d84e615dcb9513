"""The test of an error for running out of memory, and the frames that such an error keeps."""

from __future__ import annotations

import errno
import os
import re

import torch
import torch.distributed as dist

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
# What fails like this when memory is short, but also for other reasons, such as a broken driver: creating a cuBLAS
# handle, and a convolution, for which cuDNN finds no engine whose workspace there is room for.
_PERHAPS_MESSAGES = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "HIPBLAS_STATUS_NOT_INITIALIZED",
    "unable to find an engine to execute this computation",
)
_LITTLE_MEMORY = 256 * 2**20  # where less is free, it is taken to lack memory: with its workspace it takes tens of MiB


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` means that the device or the host ran out of memory. No other code decides this.

    An error from a collective never counts, whatever its cause: the communicator is broken, so nothing can run again.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    message = str(error)
    of_a_collective = (dist.is_available() and isinstance(error, dist.DistError)) or "CCL" in message  # NCCL, RCCL, ...
    if not isinstance(error, RuntimeError) or of_a_collective:
        return False
    if any(name in message for name in _PERHAPS_MESSAGES):
        try:
            return _free_bytes() < _LITTLE_MEMORY
        except (RuntimeError, AssertionError):  # no device, or one that cannot be queried in its current state
            return False
    is_known = message == _NO_THREAD_MESSAGE or _ONEDNN_MESSAGE.search(message) is not None
    return is_known or any(name in message for name in _OUT_OF_MEMORY_MESSAGES)


def _free_bytes() -> int:
    """Return the bytes of the current device that this process can still have, within a limit that it may have set."""
    free, total = torch.cuda.mem_get_info()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        limit = torch.cuda.get_per_process_memory_fraction() * total
        free = min(free, int(limit) - torch.cuda.memory_allocated())
    return free


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
