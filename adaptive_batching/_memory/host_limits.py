"""Limits on the memory of this process, as Linux tells of them. Standard library only."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def process_limits() -> dict[str, int]:
    """Return the bytes of each resource limit set on this process's memory, by what it counts; none outside Linux."""
    limits: dict[str, int] = {}
    if sys.platform == "linux":
        import resource

        for counted, kind in (("VmData", resource.RLIMIT_DATA), ("VmSize", resource.RLIMIT_AS)):
            limit = resource.getrlimit(kind)[0]
            if limit >= 0:  # -1: unlimited
                limits[counted] = limit
    return limits


def status(key: str, path: str = "/proc/self/status") -> int:
    """Return the bytes that Linux reports of this process under ``key``."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"{path} has no {key}")


def cgroup_limits() -> list[tuple[int, int]]:
    """Return (limit, bytes in use) of each cgroup (version 2) that limits this process.

    Those in use exclude file pages that the kernel can drop.
    """
    root = Path("/sys/fs/cgroup")
    try:
        own = re.search(r"^0::/*(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    except OSError:
        return []
    if own is None:
        return []
    group = root / own[1]
    limited = []
    for folder in (group, *group.parents):
        limit = folder / "memory.max"
        if folder.is_relative_to(root) and limit.exists() and limit.read_text().strip() != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            limited.append((int(limit.read_text()), used))
    return limited
