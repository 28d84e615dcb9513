"""The facts about a run that its record opens with."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import adaptive_batching
from adaptive_batching._values import masked


def about(
    recipe: str, model: str, config: Mapping[str, Any], *, device: str, ranks: int, packages: Iterable[str]
) -> dict[str, Any]:
    """Return what there is to know of a run of ``recipe``, or of a trainer class of that name.

    ``model`` is the name of what it trains, and ``packages`` those whose versions tell, if they are installed.
    """
    versions = {"Python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "adaptive_batching": adaptive_batching.__version__,
        "recipe": recipe,
        "model": model,
        "device": device,
        "processor": _processor(),
        "versions": versions,
        "ranks": ranks,
        "config": masked(config),
    }


def _processor() -> str:
    """Return the name of the host's processor and the number of its cores, as far as the system tells."""
    name = platform.machine()
    with contextlib.suppress(OSError):
        model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
        name = name if model is None else model[1]
    return f"{name}, {os.cpu_count()} cores"
