"""Host memory available to this process, within the limits of the process, its cgroup and the machine."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch


def keep_little_on_the_host() -> None:
    """Make host libraries return freed memory if this process's memory is limited, at the price of speed.

    glibc keeps freed memory and fragments it: after the first failed allocation, little fits any more. Returning the
    memory made steps of small models take 1.4 to 2 times as long. oneDNN, which computes in bfloat16, caches code and
    memory for up to 1,024 shapes, so a probe that tries many sizes, or samples of many lengths, would fill any limit.
    oneDNN reads its setting on first use.
    """
    if not _process_limits():
        return
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, "1")
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((-3, 2**16), (-1, 2**16), (-8, 1)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX
            mallopt(parameter, value)


class CpuMeter:
    """Memory of this process on Linux, under its tightest limit: rlimit, cgroup or the machine's memory.

    Resident memory counts. If the process has a limit on its data (``ulimit -d``), private writable mappings count
    instead, touched or not.
    """

    device = torch.device("cpu")
    device_name = "cpu"
    fails_safely = False
    keeps_freed_memory = False

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
        # Excludes the pages of files, such as libraries, which the kernel can drop.
        return _status("VmData") if self._counts_data else _status("RssAnon")

    def free_bytes(self) -> int:
        cgroup = [limit - used for limit, used in zip(_cgroup_limits("max"), _cgroup_limits("current"), strict=True)]
        # All processes of a launch share the host; torchrun sets their number.
        shared = min(_meminfo("MemAvailable"), *cgroup, 2**62) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return max(min([shared, *(limit - used for limit, used in _process_limits())]), 0)

    def reset_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS (Linux, proc_pid_clear_refs(5))
        self._file_pages = _status("VmRSS") - _status("RssAnon")
        self._virtual_peak = _status("VmPeak")
        self._at_reset = _status("VmData") - _status("RssAnon")

    def peak_bytes(self) -> int:
        resident = _status("VmHWM") - self._file_pages
        if not self._counts_data:
            return resident
        # The kernel tracks no peak of data, and its peak of the address space cannot be reset. If that peak has risen,
        # its excess over the current size applies to the data as well. Otherwise, resident memory has to do.
        virtual_peak = _status("VmPeak")
        above = virtual_peak - _status("VmSize") if virtual_peak > self._virtual_peak else 0
        return max(self._at_reset + resident, _status("VmData") + above)

    def peak_allocated_bytes(self) -> int:
        return self.peak_bytes()

    def num_retries(self) -> int:
        return 0

    def num_freed_bytes(self) -> int:
        return 0

    def allocator_settings(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("MALLOC_") or name == "LD_PRELOAD"}

    def outside_bytes(self) -> int:
        return 0

    def segments(self) -> None:
        return None

    def release(self) -> None:
        release_host_memory()

    def synchronize(self) -> None:
        pass

    @contextlib.contextmanager
    def limit(self, num_bytes: int) -> Iterator[None]:
        # RLIMIT_DATA counts private writable mappings, which grow at least as much as resident memory. At the limit,
        # torch's allocator raises an error. Without the limit, the kernel would kill this process or others.
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        allowed = _status("VmData") + max(num_bytes - self.used_bytes(), 0)
        resource.setrlimit(resource.RLIMIT_DATA, (min([allowed, *(v for v in (soft, hard) if v >= 0)]), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def release_host_memory() -> None:
    """Return freed memory to the system; glibc keeps it otherwise."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def free_host_bytes() -> int:
    """Return the host memory in bytes that this process could take now; 2**62 if the system does not report it."""
    return CpuMeter().free_bytes() if Path("/proc/meminfo").exists() else 2**62


def _status(key: str, path: str = "/proc/self/status") -> int:
    """Return the bytes that Linux reports of this process under ``key``."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"{path} has no {key}")


def _meminfo(key: str) -> int:
    return _status(key, "/proc/meminfo")


def _data_limit() -> int:
    """Return how many bytes of data this process may have, or -1 for no limit."""
    import resource

    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def _process_limits() -> list[tuple[int, int]]:
    """Return (limit, used) in bytes for each resource limit set on this process's memory; empty outside Linux."""
    if sys.platform != "linux":
        return []
    import resource

    limits = [(_data_limit(), _status("VmData")), (resource.getrlimit(resource.RLIMIT_AS)[0], _status("VmSize"))]
    return [(limit, used) for limit, used in limits if limit >= 0]  # -1: unlimited


def _cgroup_limits(which: str) -> list[int]:
    """Return the limit ("max") or usage ("current") in bytes of each cgroup (version 2) that limits this process.

    Usage excludes file pages that the kernel can drop.
    """
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
