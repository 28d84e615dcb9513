"""Two processes of one program, as torchrun starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from tests.conftest import ROOT


def run_ranks(arguments: Sequence[str], size: int = 2, **environment: str) -> None:
    """Run ``python arguments`` as many times as ``size``, each as one rank, and fail if one of them does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", **environment,
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(text[-3000:] for text in said)
