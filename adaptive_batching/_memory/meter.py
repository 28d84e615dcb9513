"""Memory of a device or of the host: how much there is, how much a process takes, and how that is limited."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adaptive_batching._memory.caching_allocator import RETRIES, counted, settings_in_environment
from adaptive_batching._memory.host_limits import cgroup_limits, process_limits, status
from adaptive_batching._memory.unused_memory import release_cached_memory

# As docs/how-accurate.md has them, with their sources.
_MOST_OF_A_CONTEXT, _MOST_OF_COLLECTIVES = 700 * 2**20, 1600 * 2**20
_WITHOUT_A_METER = "set use_maximum_batch_size: False, or set adaptive_batching.max_batch_size to grow without a probe"


def memory_meter(device: torch.device | str) -> MemoryMeter:
    """Return the meter for ``device``.

    Raises:
        NotImplementedError: If the peak of a step cannot be measured on this device.
    """
    device = torch.device(device)
    if device.type == "cpu":
        if not Path("/proc/self/clear_refs").exists():
            raise NotImplementedError(
                f"device='cpu': peak memory can be measured on Linux only, not on {sys.platform}; {_WITHOUT_A_METER}"
            )
        return CpuMeter()
    module = torch.get_device_module(device)
    if not all(hasattr(module, name) for name in ("max_memory_reserved", "reset_peak_memory_stats", "empty_cache")):
        raise NotImplementedError(f"device='{device}' reports no peak memory; {_WITHOUT_A_METER}")
    return MemoryMeter(device)


class MemoryMeter:
    """Read and limit the memory of one device from this process, by its allocator's statistics, in bytes."""

    fails_safely = True  # False if a failed allocation can end the process, as in libraries on the host
    is_predictable = False  # False if freed memory may be kept, so that a step takes more than it has in use
    keeps_freed_memory = True  # in blocks, so that it matters what has been where

    def __init__(self, device: torch.device) -> None:
        self._api: Any = torch.get_device_module(device)
        index = device.index if device.index is not None else self._api.current_device()
        self.device = torch.device(device.type, index)

    @property
    def device_name(self) -> str:
        return str(self._api.get_device_name(self.device))

    @property
    def total_bytes(self) -> int:
        """Memory of the device, or this process's share of it if that is smaller."""
        return int(self._api.mem_get_info(self.device)[1] * self._fraction())

    def used_bytes(self) -> int:
        """Return the memory that this process has in use now."""
        return int(self._api.memory_allocated(self.device))

    def free_bytes(self) -> int:
        """Return how much more this process could take now; memory held by other processes is not free."""
        reserved = self._api.memory_reserved(self.device)
        unused = reserved - self._api.memory_allocated(self.device)
        return int(min(self._api.mem_get_info(self.device)[0], self.total_bytes - reserved) + unused)

    def outside_bytes(self) -> int:
        """Return what this process takes of the device outside of what :meth:`limit` counts, at most."""
        # The context, its kernels and buffers of collectives, which the allocator does not know of. Where others are on
        # the device, theirs cannot be told apart: then it is what these take at most.
        free, total = self._api.mem_get_info(self.device)
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        most = _MOST_OF_A_CONTEXT + (_MOST_OF_COLLECTIVES if several else 0)
        return int(min(total - free - self._api.memory_reserved(self.device), most))

    def reset_peak(self) -> None:
        self._api.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """Return the most that counted against the limit since :meth:`reset_peak`; an allocator: what it reserved."""
        return int(self._api.max_memory_reserved(self.device))

    def peak_allocated_bytes(self) -> int:
        """Return the most that was in use at once since :meth:`reset_peak`; at most :meth:`peak_bytes`."""
        return int(self._api.max_memory_allocated(self.device))

    def num_retries(self) -> int:
        """Return how often the allocator has emptied its cache to find room since the process started."""
        return counted(self.device, RETRIES)

    def allocator_settings(self) -> dict[str, str]:
        """Return the settings in the environment that change how much the allocator reserves."""
        return settings_in_environment()

    def release(self) -> None:
        release_cached_memory(self.device)

    def synchronize(self) -> None:
        """Wait for the device, so that a delayed error is raised here."""
        self._api.synchronize(self.device)

    @contextlib.contextmanager
    def limit(self, num_bytes: int) -> Iterator[None]:
        """Make this process run out of memory inside the context if it would use more than ``num_bytes``."""
        if not hasattr(self._api, "set_per_process_memory_fraction"):
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
        fraction = getattr(self._api, "get_per_process_memory_fraction", lambda device: 1.0)
        return float(fraction(self.device))


class CpuMeter(MemoryMeter):
    """Memory of this process on Linux, under its tightest limit: rlimit, cgroup or the machine's memory.

    Resident memory counts. If the process has a limit on its data (``ulimit -d``), private writable mappings count
    instead, touched or not.
    """

    device_name = "cpu"
    fails_safely = keeps_freed_memory = False

    def __init__(self) -> None:
        self.device, self._api = torch.device("cpu"), torch.cpu
        limits = process_limits()
        self.is_predictable = bool(limits)  # see keep_little_on_the_host
        self._counts_data = "VmData" in limits
        self._file_pages = self._virtual_peak = self._at_reset = 0

    @property
    def total_bytes(self) -> int:
        total = min([status("MemTotal", "/proc/meminfo"), *process_limits().values()])
        for limit, _ in cgroup_limits():
            total = min(total, limit)
        return total

    def used_bytes(self) -> int:
        # Excludes the pages of files, such as libraries, which the kernel can drop.
        return status("VmData") if self._counts_data else status("RssAnon")

    def free_bytes(self) -> int:
        shared = status("MemAvailable", "/proc/meminfo")
        for limit, used in cgroup_limits():
            shared = min(shared, limit - used)
        # All processes of a launch share the host; torchrun sets their number.
        free = shared // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        for counts, limit in process_limits().items():
            free = min(free, limit - status(counts))
        return max(free, 0)

    def reset_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS (Linux, proc_pid_clear_refs(5))
        self._file_pages = status("VmRSS") - status("RssAnon")
        self._virtual_peak = status("VmPeak")
        self._at_reset = status("VmData") - status("RssAnon")

    def peak_bytes(self) -> int:
        resident = status("VmHWM") - self._file_pages
        if not self._counts_data:
            return resident
        # The kernel tracks no peak of data, and its peak of the address space cannot be reset. If that peak has risen,
        # its excess over the current size applies to the data as well. Otherwise, resident memory has to do.
        virtual_peak = status("VmPeak")
        above = virtual_peak - status("VmSize") if virtual_peak > self._virtual_peak else 0
        return max(self._at_reset + resident, status("VmData") + above)

    def peak_allocated_bytes(self) -> int:
        return self.peak_bytes()

    def num_retries(self) -> int:
        return 0

    def outside_bytes(self) -> int:
        return 0

    def allocator_settings(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("MALLOC_") or name == "LD_PRELOAD"}

    @contextlib.contextmanager
    def limit(self, num_bytes: int) -> Iterator[None]:
        # RLIMIT_DATA counts private writable mappings, which grow at least as much as resident memory. At the limit,
        # torch's allocator raises an error. Without the limit, the kernel would kill this process or others.
        import resource  # not on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        allowed = status("VmData") + max(num_bytes - self.used_bytes(), 0)
        for limit in (soft, hard):
            if limit >= 0:  # -1: unlimited
                allowed = min(allowed, limit)
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class PeakSoFar:
    """The most memory that a process has taken since this was made; counters that others may read are left alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_host: CpuMeter | None = None
        if device.type == "cpu":
            meter = CpuMeter()
            with contextlib.suppress(OSError, KeyError):
                meter.reset_peak()
                self._of_host = meter

    def read(self) -> int | None:
        """Return it in bytes, without waiting for the device; None on a device that does not tell."""
        if self._device.type != "cpu":
            # Memory that is reserved stays so until the cache is emptied: it is the peak, and nothing has to be reset.
            module = torch.get_device_module(self._device)
            return int(module.memory_reserved(self._device)) if hasattr(module, "memory_reserved") else None
        with contextlib.suppress(OSError, KeyError, MemoryError):
            return None if self._of_host is None else self._of_host.peak_bytes()
        return None


def free_host_bytes() -> int:
    """Return the host memory in bytes that this process could take now; 2**62 if the system does not report it."""
    return CpuMeter().free_bytes() if Path("/proc/meminfo").exists() else 2**62
