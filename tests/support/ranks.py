"""Processes that train together, as torchrun starts them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from torch._C._distributed_c10d import TCPStore

from tests.conftest import ROOT

LONGEST = 400  # seconds for all of what the ranks do
TO_FAIL_AS_WELL = 20  # seconds, after one of them has failed


def free_port() -> int:
    """Return a port that nothing listens on, and that no system gives out by itself until somebody does."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def run_ranks(arguments: Sequence[str], size: int = 2, **environment: str) -> None:
    """Run ``python arguments`` as many times as ``size``, each as one rank, and fail if one of them does.

    They meet at a store of this process, as those of torchrun do: if the first rank were to open it, another process
    could have taken the port meanwhile, and the others would ask that one for half an hour.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", **environment,
    }  # fmt: skip
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    run_together([([sys.executable, *arguments], own) for own in ranks])


def run_together(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
    """Run commands at once, each with what its environment has besides this one's, and fail if one of them does.

    The others of one that fails are not waited for longer than they need to fail as well; what hangs tells where.
    """
    with contextlib.ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        processes = [
            subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1", **own},
                stdout=subprocess.DEVNULL, stderr=file,
            )
            for (command, own), file in zip(commands, said, strict=True)
        ]  # fmt: skip
        try:
            deadline = time.monotonic() + LONGEST
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if any(process.poll() for process in processes):
                    deadline = min(deadline, time.monotonic() + TO_FAIL_AS_WELL)
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGABRT)
                    process.wait()
        texts = []
        for process, file in zip(processes, said, strict=True):
            file.seek(0)
            texts.append(f"exit code {process.returncode}: {file.read()[-6000:]}")
    assert not any(process.returncode for process in processes), "\n".join(texts)
