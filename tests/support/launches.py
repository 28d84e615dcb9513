"""Launches of two ranks: which one a test looks at, and what its runs have left. See ``two_ranks.py`` for the runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.conftest import ROOT, Run, assert_same_weights
from tests.support.environment import TAME_MALLOC
from tests.support.records import events

Finished = Callable[[str], Run]
Test = TypeVar("Test", bound=Callable[..., None])
LAUNCH = [sys.executable, "-m", "torch.distributed.run"]


def with_root() -> str:
    """Return the PYTHONPATH of a child that finds this project, and what this process was started with."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def run_launch(which: str, inputs: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [*LAUNCH, "--standalone", "--nproc_per_node", "2", "tests/integration/two_ranks.py"]
    measures = which == "memory" or which.startswith("limit_")
    environment = {**os.environ, "PYTHONPATH": with_root(), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    environment |= TAME_MALLOC if measures else {}  # which makes each allocation a call of the kernel
    return subprocess.run(
        [*command, str(inputs), str(directory), which],
        cwd=ROOT, env=environment, text=True, timeout=900, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def with_the_launch(which: str) -> pytest.MarkDecorator:
    """Have one worker run all tests of a launch."""
    return pytest.mark.serial if which == "memory" else pytest.mark.xdist_group(f"two_ranks_{which}")


def of_launch(which: str) -> Callable[[Test], Test]:
    """Say which launch a test is about, a key of ``two_ranks.LAUNCHES``: it is made for the first test of them.

    Its name is part of the test's, so that ``-k`` finds all that share it.
    """
    marks = (pytest.mark.parametrize("launched", [which], indirect=True), with_the_launch(which))

    def mark(test: Test) -> Test:
        for each in marks:
            test = each(test)
        return test

    return mark


def finished_in(launched: tuple[Path, str], name: str) -> Run:
    """A run that ended well."""
    errors = [path.read_text() for path in sorted((launched[0] / name).glob("error_*.txt"))]
    assert not errors, errors
    return Run(launched[0] / name)


def output_of(launched: tuple[Path, str], name: str) -> str:
    """Output of a run, up to the beginning of the next."""
    return launched[1].split(f"RUN {name}\n", 1)[1].split("\nRUN ", 1)[0]


def assert_validated_as_one_by_one(
    off: str, one: str, again: str, finished: Finished, launched: tuple[Path, str], rel: float = 1e-6
) -> list[float]:
    """Runs in small forwards, and in large ones of which one runs out of memory; return the losses of the former."""
    losses = []
    for name in (one, again):
        logged = finished(name).metrics
        assert [step for step in logged if "val_loss" not in step] == finished(off).metrics
        assert_same_weights(finished(name).weights(0), finished(off).weights(0))
        losses.append([step["val_loss"] for step in logged if "val_loss" in step])
        assert "not always the same" not in output_of(launched, name), "training could still recover"
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=rel)
    assert output_of(launched, again).count("running samples of dataset_val again") == 1, "one rank says so"
    return losses[0]


def assert_went_on(directory: Path, name: str, folder: str) -> None:
    """A run that was cut off within its second epoch went on from its sixth step."""
    whole, resumed = Run(directory / f"{name}_whole"), Run(directory / name)
    assert "the power went out" in (directory / name / "error_0.txt").read_text()
    assert [step["batch_size_samples"] for step in whole.metrics] == [4] * 3 + [8] * 4
    assert [event["step"] for event in events(resumed, "resume")] == [5]
    assert len(resumed.metrics) == 6 + 2
    assert resumed.by_step == whole.by_step
    assert_same_weights(resumed.weights_in(folder), whole.weights_in(folder))
