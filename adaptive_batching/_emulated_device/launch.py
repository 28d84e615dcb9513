"""Start a program on the emulated device: what its environment must be."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adaptive_batching._emulated_device.build import build
from adaptive_batching._values import ConfigError

GIB = 2**30
MOST_DEVICES = 16  # as in source/device.h


@dataclass(frozen=True)
class EmulatedDevice:
    """A card, as far as memory goes."""

    memory_bytes: int = 80 * GIB
    """Of the card in all, as CUDA reports it."""
    count: int = 1
    """Cards, 1 to 16. Each process has all of them to itself."""
    capability: tuple[int, int] = (8, 0)
    """Compute capability. With 9.0 torch would take cuDNN's attention, which plans its kernels on the card; flash
    attention is taken instead. It keeps as much for the backward pass; the workspace of cuDNN's backward is missing."""
    context_bytes: int = 500 * 2**20
    """Memory of the card that CUDA itself takes for a process."""
    lag: int | None = 0
    """Launches after which an event has happened: 0 at once, None only when the host waits for it. Memory that another
    stream still uses is held for as long: 0 gives the least that a card can reserve, None the most."""
    largest_copy_bytes: int = 2**20
    """Larger copies to the device are left out, so that a model larger than the host's memory loads; device memory that
    nothing was copied to reads as zeros."""
    processors: int = 108
    """Multiprocessors, which some kernels take workspaces for."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_DEVICES:
            raise ConfigError(f"count={self.count}: an emulated machine has 1 to {MOST_DEVICES} devices; set another")

    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment of a program on the device, what is inherited included; BuildError as from `build`."""
        library = build()
        major, minor = self.capability
        here = Path(__file__).parent / "site"
        return {
            **inherited,
            "EMULATED_DEVICE_MEMORY": str(self.memory_bytes),
            "EMULATED_DEVICE_COUNT": str(self.count),
            "EMULATED_DEVICE_CAPABILITY": str(10 * major + minor),
            "EMULATED_DEVICE_CONTEXT": str(self.context_bytes),
            "EMULATED_DEVICE_LAG": str(-1 if self.lag is None else self.lag),
            "EMULATED_DEVICE_LARGEST_COPY": str(self.largest_copy_bytes),
            "EMULATED_DEVICE_PROCESSORS": str(self.processors),
            "LD_PRELOAD": _joined(f"{library}:{library.parent / 'libnvidia-ml.so.1'}", inherited.get("LD_PRELOAD")),
            "PYTHONPATH": _joined(str(here), inherited.get("PYTHONPATH")),
            "TRITON_LIBCUDA_PATH": str(library.parent),
        }


def _joined(first: str, rest: str | None) -> str:
    return f"{first}:{rest}" if rest else first
