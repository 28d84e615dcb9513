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
from torch import distributed as dist

from tests.conftest import ROOT, Run, assert_same_weights
from tests.support.environment import TAME_MALLOC
from tests.support.records import events

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

    They are forked from a process that has imported torchtune but computed nothing; those that measure memory or use a
    device are not, and for the former each allocation is a call of the kernel.
    """
    measures = which == "memory" or which.startswith("limit_")
    starts_anew = measures or which.startswith("devices")
    context: Any = multiprocessing.get_context("spawn" if starts_anew else "forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
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
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    with (directory / "output.txt").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    logging.disable(logging.NOTSET)  # which the process that others are forked from has set higher
    from tests.integration import two_ranks

    two_ranks.run_launch(which, dist.TCPStore("127.0.0.1", port, is_master=False), inputs, directory, case)


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


def assert_as_stock(finished: Finished, name: str) -> None:
    ours, stock = finished(f"{name}_off"), finished(f"{name}_stock")
    assert len(stock.metrics) >= 2
    assert ours.metrics == stock.metrics
    assert_same_weights(ours.weights(0), stock.weights(0))


def assert_validated_as_one_by_one(
    kind: str, finished: Finished, launched: tuple[Path, str], rel: float = 1e-6
) -> list[float]:
    """Runs in small forwards, and in large ones of which one runs out of memory; return the losses of the former."""
    losses = []
    off = finished(f"{kind}_off")
    for name in (f"{kind}_validated", f"{kind}_validated_again"):
        logged = finished(name).metrics
        assert [step for step in logged if "val_loss" not in step] == off.metrics
        assert_same_weights(finished(name).weights(0), off.weights(0))
        losses.append([step["val_loss"] for step in logged if "val_loss" in step])
        assert "not always the same" not in output_of(launched, name), "training could still recover"
    assert len(losses[0]) == len(off.metrics)
    assert losses[1] == pytest.approx(losses[0], rel=rel)
    assert output_of(launched, name).count("running samples of dataset_val again") == 1, "one rank says so"
    return losses[0]


def assert_resumed(directory: Path, name: str) -> None:
    """A run that was cut off between epochs equals the one that was not, and so does its growth."""
    whole, resumed = Run(directory / f"{name}_whole"), Run(directory / name)
    assert "the power went out" in (directory / name / "error_0.txt").read_text()
    assert [epoch["batch_size"] for epoch in events(resumed, "epoch")] == [4, 8, 16]
    assert resumed.metrics == whole.metrics
    assert_same_weights(resumed.weights(2), whole.weights(2))


def assert_went_on(directory: Path, name: str) -> None:
    """A run that was cut off within its second epoch went on from its sixth step."""
    whole, resumed = Run(directory / f"{name}_whole"), Run(directory / name)
    assert "the power went out" in (directory / name / "error_0.txt").read_text()
    assert [step["batch_size_samples"] for step in whole.metrics] == [4] * 3 + [8] * 4
    assert [event["step"] for event in events(resumed, "resume")] == [5]
    assert len(resumed.metrics) == 6 + 2
    assert resumed.by_step == whole.by_step
    assert_same_weights(resumed.weights_in("step_7"), whole.weights_in("step_7"))
