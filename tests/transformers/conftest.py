"""No page of a run is made, which takes a process of its own, but in the tests that look at one; none goes by speed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from tests.conftest import all_that_fits, without_pages

pytest.importorskip("transformers", reason="transformers is not installed (the extra transformers)")


@pytest.fixture(autouse=True)
def no_pages_and_no_speed(request: pytest.FixtureRequest) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if "makes_pages" not in request.fixturenames:
            stack.enter_context(without_pages())
        if "probes_by_speed" not in request.fixturenames:
            stack.enter_context(all_that_fits())
        yield
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # which Trainer before transformers 5 leaves set


@pytest.fixture
def makes_pages() -> None:
    """Have pages made, as users do."""


@pytest.fixture
def probes_by_speed() -> None:
    """Have probes look for forwards that are large enough, as users do, by the speed of the machine."""
