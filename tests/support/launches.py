"""Launches of the recipes on two ranks: which one a test looks at, and what its runs have left.

The runs are in ``tests/integration/two_ranks.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.conftest import Run
from tests.support.ranks import start_ranks

Finished = Callable[[str], Run]
Test = TypeVar("Test", bound=Callable[..., None])

NARROW = ("split", "growth", "devices")
"""Launches that ``make test`` makes; tests of others are wide."""


def run_launch(which: str, inputs: Path, directory: Path) -> bool:
    """Run a launch, whose cases that end a rank take processes of their own; True if it went well."""
    from tests.integration import two_ranks

    for case in two_ranks.fatal_cases(which):
        start_ranks(two_ranks.run_launch, which, inputs, directory, case, folder=directory)
    how: dict[str, Any] = {"nodes": 1 + (which == "as_stock"), "forks": not which.startswith("devices"), "patience": 1}
    return start_ranks(two_ranks.run_launch, which, inputs, directory, folder=directory, **how)


def of_launch(which: str) -> Callable[[Test], Test]:
    """Say which launch a test is about, a key of ``two_ranks.LAUNCHES``: it is made for the first test of them.

    Its name is part of the test's, so that ``-k`` finds all that share it; one worker runs these.
    """
    together = pytest.mark.serial if which == "memory" else pytest.mark.xdist_group(f"two_ranks_{which}")
    of_this = pytest.param(which, marks=[] if which in NARROW else [pytest.mark.wide])
    return lambda test: together(pytest.mark.parametrize("launched", [of_this], indirect=True)(test))


def finished_in(launched: tuple[Path, str], name: str) -> Run:
    """A run that ended well."""
    errors = [path.read_text() for path in sorted((launched[0] / name).glob("error_*.txt"))]
    assert not errors, errors
    return Run(launched[0] / name)


def output_of(launched: tuple[Path, str], name: str) -> str:
    """Output of a run, up to the beginning of the next."""
    return launched[1].split(f"RUN {name}\n", 1)[1].split("\nRUN ", 1)[0]
