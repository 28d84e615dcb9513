"""``env``: what an issue report has to say about a machine. It needs torch, and works without torchtune."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import adaptive_batching
from adaptive_batching._values import memory_size

_PACKAGES = ("torch", "torchtune", "torchao", "bitsandbytes", "transformers", "datasets")
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_VISIBLE_DEVICES")


def add_env(subparsers: Any, prog: str) -> None:
    """Add ``env``."""
    text = "Print versions, devices, the allocator's settings, and what works here: what an issue report needs."
    parser = subparsers.add_parser("env", prog=f"{prog} env", help=text, description=text)

    def env(args: argparse.Namespace) -> None:
        for name, value in (*_versions(), *_devices(), *_available()):
            print(f"{name + ':':<32}{value}")

    parser.set_defaults(func=env)


def _versions() -> Iterator[tuple[str, str]]:
    yield "adaptive-batching", adaptive_batching.__version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    yield "CUDA of torch", torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else "none")
    if not torch.cuda.is_available():
        yield "GPU", "none"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield (
            f"GPU {index}",
            f"{device.name}, {memory_size(device.total_memory)}, capability {device.major}.{device.minor}",
        )
    yield "CPU", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads for torch"
    if torch.cuda.is_available():
        yield "allocator", torch.cuda.get_allocator_backend()
    for name in _VARIABLES:
        yield name, os.environ.get(name, "not set")


def _available() -> Iterator[tuple[str, str]]:

    from adaptive_batching._ranks.fsdp import why_not_drained

    why = why_not_drained()
    several = f"no: {why}" if why else "yes"
    yield "recovery", f"one device: yes; sharded: {several}"
