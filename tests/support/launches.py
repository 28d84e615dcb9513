"""Launches of two ranks: which one a test looks at, and what its runs have left. See ``two_ranks.py`` for the runs."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.conftest import ROOT, Run
from tests.support.environment import TAME_MALLOC
from tests.support.processes import FORKED

Finished = Callable[[str], Run]
Test = TypeVar("Test", bound=Callable[..., None])
SECONDS = 900


def with_root() -> str:
    """Return the PYTHONPATH of a child that finds this project, and what this process was started with."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def run_launch(which: str, inputs: Path, directory: Path) -> bool:
    """Run a launch, whose cases that end a rank take processes of their own; True if it went well."""
    from tests.integration.two_ranks import fatal_cases

    for case in fatal_cases(which):
        start_ranks(which, inputs, directory, case)
    return start_ranks(which, inputs, directory)


def start_ranks(which: str, inputs: Path, directory: Path, case: Any = None) -> bool:
    """Run two ranks, and end one if the other has failed, as torchrun does; True if none has.

    Those that measure memory or use a device are no forks, and for the former each allocation is a call of the kernel.
    """
    measures = which == "memory" or which.startswith("limit_")
    starts_anew = measures or which.startswith("devices")
    context: Any = multiprocessing.get_context("spawn") if starts_anew else FORKED
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (which, inputs, directory, store.port, case)
    with mock.patch.dict(os.environ, TAME_MALLOC if measures else {}):
        ranks = [context.Process(target=_run_rank, args=(rank, *arguments)) for rank in range(2)]
        for rank in ranks:
            rank.start()
    end = time.monotonic() + SECONDS
    while running := [rank for rank in ranks if rank.exitcode is None]:
        connection.wait([rank.sentinel for rank in running], timeout=max(end - time.monotonic(), 0))
        if time.monotonic() > end or (case is None and any(rank.exitcode for rank in ranks)):
            for rank in running:
                rank.kill()
    return not any(rank.exitcode for rank in ranks)


def _run_rank(rank: int, which: str, inputs: Path, directory: Path, port: int, case: Any) -> None:
    of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in of_torchrun.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    with (directory / "output.txt").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    logging.disable(logging.NOTSET)  # which the process that others are forked from has set higher
    from tests.integration import two_ranks

    two_ranks.run_launch(which, TCPStore("127.0.0.1", port, is_master=False), inputs, directory, case)


def with_the_launch(which: str) -> pytest.MarkDecorator:
    """Have one worker run all tests of a launch."""
    return pytest.mark.serial if which == "memory" else pytest.mark.xdist_group(f"two_ranks_{which}")


def of_launch(which: str) -> Callable[[Test], Test]:
    """Say which launch a test is about, a key of ``two_ranks.LAUNCHES``: it is made for the first test of them.

    Its name is part of the test's, so that ``-k`` finds all that share it.
    """
    return lambda test: with_the_launch(which)(pytest.mark.parametrize("launched", [which], indirect=True)(test))


def finished_in(launched: tuple[Path, str], name: str) -> Run:
    """A run that ended well."""
    errors = [path.read_text() for path in sorted((launched[0] / name).glob("error_*.txt"))]
    assert not errors, errors
    return Run(launched[0] / name)


def output_of(launched: tuple[Path, str], name: str) -> str:
    """Output of a run, up to the beginning of the next."""
    return launched[1].split(f"RUN {name}\n", 1)[1].split("\nRUN ", 1)[0]
