"""What memory a device has, what a step took of it, and what counts as running out of it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

_OUT_OF_MEMORY_MESSAGES = (
    "out of memory",  # CUDA, HIP, XPU and MPS backends; a CUDA error raised asynchronously
    "can't allocate memory",  # torch's CPU allocator
    "std::bad_alloc",
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT and their HIP namesakes
    "_DEVICE_ALLOCATION_FAILED",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "_HOST_ALLOCATION_FAILED",
)
# oneDNN, where memory is short. Where there is no such primitive it speaks of a primitive descriptor.
_ONEDNN_MESSAGE = re.compile(r"could not create a primitive(?! descriptor)|could not create a memory object")
# Creating a cuBLAS handle fails so for want of memory, but also for other reasons, such as a broken driver.
_NOT_INITIALIZED_MESSAGES = ("CUBLAS_STATUS_NOT_INITIALIZED", "HIPBLAS_STATUS_NOT_INITIALIZED")
# With less than this left on the device, a library that cannot be initialized is taken to lack memory: a cuBLAS handle
# and its workspace take tens of MiB.
_LITTLE_MEMORY = 256 * 2**20


def is_out_of_memory(error: BaseException) -> bool:
    """True if ``error`` says that a device, or the host, ran out of memory. The only place that decides it.

    An error of a collective never is one, whatever its cause: the communicator is broken, and nothing can run again.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    message = str(error)
    if not isinstance(error, RuntimeError) or _is_of_a_collective(error, message):
        return False
    if any(name in message for name in _NOT_INITIALIZED_MESSAGES):
        return _accelerator_is_nearly_full()
    return any(name in message for name in _OUT_OF_MEMORY_MESSAGES) or _ONEDNN_MESSAGE.search(message) is not None


def _is_of_a_collective(error: BaseException, message: str) -> bool:
    is_distributed = dist.is_available() and isinstance(error, dist.DistError)
    return is_distributed or "NCCL" in message or "RCCL" in message


def _accelerator_is_nearly_full() -> bool:
    try:
        free, _ = torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError):  # no device, or one that is in no state to be asked
        return False
    return bool(free < _LITTLE_MEMORY)


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of ``error`` and of those that led to it: their frames hold the tensors of a step."""
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
    """A setting of CUDA's caching allocator that would let more fit, or None where it is set or does not apply.

    By default the allocator splits segments of fixed size, and what is left between blocks counts as taken.
    """
    chosen = " ".join(os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES)
    if device.type != "cuda" or "expandable_segments" in chosen or "backend:cudaMallocAsync" in chosen:
        return None
    return "PYTORCH_ALLOC_CONF=expandable_segments:True"


def num_allocation_retries(device: torch.device) -> int:
    """How often the device's allocator has had to free its cache and try again; 0 where it does not count."""
    if device.type == "cpu":
        return 0
    module = torch.get_device_module(device)
    return int(module.memory_stats(device).get("num_alloc_retries", 0)) if hasattr(module, "memory_stats") else 0


def release_cached_memory(device: torch.device) -> None:
    """Give back what allocators keep but nothing uses: on ``device``, and pinned memory of the host."""
    gc.collect()
    if device.type == "cpu":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory otherwise
        return
    torch.get_device_module(device).empty_cache()
    # Pinned memory stays with its allocator for good, however large the step that asked for it.
    empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None) or getattr(
        torch._C, "_host_emptyCache", None
    )
    if empty_host_cache is not None:
        empty_host_cache()


class MemoryMeter(Protocol):
    """Reads and bounds the memory of one device, as this process sees it. All amounts are bytes."""

    device: torch.device

    fails_safely: bool
    """False where an allocation that fails can end the process, as in libraries on the host."""

    is_predictable: bool
    """False where what is freed may be kept, so that a step takes more than it has in use."""

    @property
    def device_name(self) -> str: ...

    @property
    def total_bytes(self) -> int:
        """What the device has, or what this process may have of it, whichever is less."""

    def used_bytes(self) -> int:
        """What this process has in use now."""

    def free_bytes(self) -> int:
        """What this process could take in addition now; memory of other processes counts as taken."""

    def reset_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        """The most that counted against the limit at once since :meth:`reset_peak`, what did so before it included.

        With a caching allocator that is what it had reserved: what was in use, and what lay unused between it.
        """

    def peak_allocated_bytes(self) -> int:
        """The most that was in use at once since :meth:`reset_peak`; at most :meth:`peak_bytes`."""

    def num_retries(self) -> int:
        """Times that the allocator has emptied its cache to find room, since the process started."""

    def allocator_settings(self) -> dict[str, str]:
        """Settings from outside this process that change how much its allocator reserves."""

    def release(self) -> None:
        """Give back what is cached but not in use."""

    def synchronize(self) -> None:
        """Wait for the device, so that a delayed error is raised here."""

    def limit(self, num_bytes: int) -> contextlib.AbstractContextManager[None]:
        """Inside, this process runs out of memory where it would use more than ``num_bytes``."""


def memory_meter(device: torch.device | str) -> MemoryMeter:
    """The meter for ``device``.

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


def keep_little_on_the_host() -> None:
    """In a process whose memory is limited, have libraries of the host give back what is freed, at the price of speed.

    glibc keeps freed memory and scatters what comes next: after the first allocation that fails, little fits any more.
    Giving it back made steps of small models take 1.4 to 2 times as long. oneDNN, which computes in bfloat16, keeps
    code and memory for each shape that it has met, up to 1,024 times: a probe that tries sizes, and samples of many
    lengths, fill any limit. It reads its setting when it is first used.
    """
    if not _process_limits():
        return
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, "1")
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((-3, 2**16), (-1, 2**16), (-8, 1)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX
            mallopt(parameter, value)


class AcceleratorMeter:
    """CUDA, ROCm, XPU and other accelerators with a caching allocator that keeps statistics."""

    fails_safely = True
    is_predictable = False

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

    def reset_peak(self) -> None:
        self._api.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        return int(self._api.max_memory_reserved(self.device))

    def peak_allocated_bytes(self) -> int:
        return int(self._api.max_memory_allocated(self.device))

    def num_retries(self) -> int:
        return num_allocation_retries(self.device)

    def allocator_settings(self) -> dict[str, str]:
        return {name: os.environ[name] for name in _ALLOCATOR_VARIABLES if name in os.environ}

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
        """The share of the device that this process may take, as set by the user."""
        if not hasattr(self._api, "get_per_process_memory_fraction"):
            return 1.0
        return float(self._api.get_per_process_memory_fraction(self.device))


class CpuMeter:
    """This process's memory on Linux, under whichever limit is tightest: rlimit, cgroup or the machine's.

    What counts is resident memory; in a process with a limit on its data (``ulimit -d``), what that counts: private
    writable mappings, touched or not.
    """

    device = torch.device("cpu")
    device_name = "cpu"
    fails_safely = False

    def __init__(self) -> None:
        self.is_predictable = bool(_process_limits())  # see keep_little_on_the_host
        self._counts_data = _data_limit() >= 0
        self._file_pages = 0
        self._virtual_peak = 0
        self._at_reset = 0

    @property
    def total_bytes(self) -> int:
        return min([_meminfo("MemTotal"), *(limit for limit, _ in _process_limits()), *_cgroup_limits("max")])

    def used_bytes(self) -> int:
        # Without the pages of files, such as libraries, which the kernel can drop.
        return _status("VmData") if self._counts_data else _status("RssAnon")

    def free_bytes(self) -> int:
        cgroup = [limit - used for limit, used in zip(_cgroup_limits("max"), _cgroup_limits("current"), strict=True)]
        # The processes of one launch share the host: torchrun says how many there are.
        shared = min(_meminfo("MemAvailable"), *cgroup, 2**62) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return max(min([shared, *(limit - used for limit, used in _process_limits())]), 0)

    def reset_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS (Linux, proc_pid_clear_refs(5))
        self._file_pages = _status("VmRSS") - _status("RssAnon")
        self._virtual_peak = _status("VmPeak")
        self._at_reset = _status("VmData") - _status("RssAnon")

    def peak_bytes(self) -> int:
        resident = _status("VmHWM") - self._file_pages
        if not self._counts_data:
            return resident
        # The kernel keeps no peak of data, and none of the address space that could be set back. A new one of that
        # tells how much more there was of both; where there is none, what was touched has to do.
        virtual_peak = _status("VmPeak")
        above = virtual_peak - _status("VmSize") if virtual_peak > self._virtual_peak else 0
        return max(self._at_reset + resident, _status("VmData") + above)

    def peak_allocated_bytes(self) -> int:
        return self.peak_bytes()

    def num_retries(self) -> int:
        return 0

    def allocator_settings(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("MALLOC_") or name == "LD_PRELOAD"}

    def release(self) -> None:
        release_cached_memory(self.device)

    def synchronize(self) -> None:
        pass

    @contextlib.contextmanager
    def limit(self, num_bytes: int) -> Iterator[None]:
        # RLIMIT_DATA counts private writable mappings, which grow by at least what becomes resident. Torch's allocator
        # then raises an error; without this the kernel would kill the process, or others.
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        allowed = _status("VmData") + max(num_bytes - self.used_bytes(), 0)
        resource.setrlimit(resource.RLIMIT_DATA, (min([allowed, *(v for v in (soft, hard) if v >= 0)]), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def free_host_bytes() -> int:
    """Memory of the host that this process could take now; no bound where the system does not tell."""
    return CpuMeter().free_bytes() if Path("/proc/meminfo").exists() else 2**62


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"/proc/self/status has no {key}")


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"/proc/meminfo has no {key}")


def _data_limit() -> int:
    """Bytes of data that this process may have; -1 for no limit."""
    import resource

    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def _process_limits() -> list[tuple[int, int]]:
    """(limit, used) in bytes of each resource limit set on this process's memory; none where there is no such thing."""
    if sys.platform != "linux":
        return []
    import resource

    limits = [
        (_data_limit(), _status("VmData")),
        (resource.getrlimit(resource.RLIMIT_AS)[0], _status("VmSize")),
    ]
    return [(limit, used) for limit, used in limits if limit >= 0]  # -1: unlimited


def _cgroup_limits(which: str) -> list[int]:
    """Bytes that this process's cgroups (version 2) with a limit may take, or take now; pages to drop do not count."""
    root = Path("/sys/fs/cgroup")
    try:
        line = next(li for li in Path("/proc/self/cgroup").read_text().splitlines() if li.startswith("0::"))
    except (OSError, StopIteration):
        return []
    group = root / line.removeprefix("0::").lstrip("/")
    values = []
    for folder in (group, *group.parents):
        limit = folder / "memory.max"
        if not folder.is_relative_to(root) or not limit.exists() or limit.read_text().strip() == "max":
            continue
        value = int((folder / f"memory.{which}").read_text())
        if which == "current":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            value -= int(stat.get("inactive_file", 0))
        values.append(value)
    return values
