"""Processes that train together, as torchrun starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.conftest import ROOT


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_ranks(arguments: Sequence[str], size: int = 2, **environment: str) -> None:
    """Run ``python arguments`` as many times as ``size``, each as one rank, and fail if one of them does."""
    shared = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", **environment,
    }  # fmt: skip
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    run_together([([sys.executable, *arguments], own) for own in ranks])


def run_together(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
    """Run commands at once, each with what its environment has besides this one's, and fail if one of them does."""
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **own},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for command, own in commands
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=400)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(text[-3000:] for text in said)
