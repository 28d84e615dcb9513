"""Ranks: processes that train together, as torchrun starts them. Hosts say what runs on each; all else is here."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore

from tests.support.garbage import quicken_collections
from tests.support.processes import FORKED

T = TypeVar("T")
LONGEST = 900  # seconds for all that ranks do
TO_FAIL_AS_WELL = 20  # seconds, after one of them has failed


def run_ranks(function: Callable[..., T], *arguments: object, folder: Path, size: int = 2, **how: Any) -> list[T]:
    """Run ``function(*arguments)`` on each rank; return what each returns, in their order. See :func:`start_ranks`."""
    if not start_ranks(function, *arguments, folder=folder, size=size, **how):
        raise AssertionError((folder / "output.txt").read_text()[-9000:])
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(size)]


def start_ranks(
    function: Callable[..., Any], *arguments: object, folder: Path, size: int = 2, nodes: int = 1, forks: bool = True,
    patience: float = TO_FAIL_AS_WELL,
) -> bool:  # fmt: skip
    """Run a function on each rank, whose output is in ``output.txt``; return True if it has ended well on all.

    They meet at a store of this process, as those of torchrun do: if the first rank were to open it, another process
    could have taken the port meanwhile, and the others would ask that one for half an hour.

    Args:
        folder: Of what they print and return.
        nodes: Machines that they seem to be on, as many on each.
        forks: They are forks, which have imported what they need; those that use a device start anew.
        patience: Seconds that others of one that fails have to fail as well. What hangs tells where.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context: Any = FORKED if forks else multiprocessing.get_context("spawn")
    each = size // nodes
    shared = {
        "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": each, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0,
    }  # fmt: skip
    own = [{**shared, "RANK": rank, "LOCAL_RANK": rank % each, "GROUP_RANK": rank // each} for rank in range(size)]
    given = (folder, function.__module__, function.__name__, arguments)
    ranks = [context.Process(target=_run_rank, args=(variables, *given)) for variables in own]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + LONGEST
    while running := [rank for rank in ranks if rank.exitcode is None]:
        if any(rank.exitcode for rank in ranks):
            end = min(end, time.monotonic() + patience)
        connection.wait([rank.sentinel for rank in running], timeout=max(end - time.monotonic(), 0))
        if time.monotonic() >= end:
            for rank in running:
                os.kill(rank.pid, signal.SIGABRT)
                rank.join()
    return not any(rank.exitcode for rank in ranks)


def _run_rank(
    variables: dict[str, object], folder: Path, module: str, function: str, arguments: tuple[object, ...]
) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    with (folder / "output.txt").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable()
    logging.disable(logging.NOTSET)  # which the process that others are forked from has set higher
    quicken_collections()
    run = getattr(importlib.import_module(module), function)  # only now, as modules read the number of their rank
    torch.save(run(*arguments), folder / f"rank_{variables['RANK']}.pt")
