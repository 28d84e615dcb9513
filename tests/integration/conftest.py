"""Launches of two ranks, each made for the first test that asks for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.conftest import made_once
from tests.support.launches import Finished, finished_in, run_launch


@pytest.fixture
def launched(request: pytest.FixtureRequest, inputs: Path, shared: Path) -> tuple[Path, str]:
    """The directory with all runs of a launch, and what they printed. A launch that hangs fails."""
    directory = shared / f"two_ranks_{request.param}"
    failed, output = directory / "failed", directory / "output.txt"
    with made_once(directory) as missing:
        if missing:
            directory.mkdir()
            if not run_launch(request.param, inputs, directory):
                failed.touch()
    assert not failed.exists(), output.read_text()[-9000:]
    return directory, output.read_text()


@pytest.fixture
def finished(launched: tuple[Path, str]) -> Finished:
    """``finished(name)``: a run that ended well."""
    return partial(finished_in, launched)
