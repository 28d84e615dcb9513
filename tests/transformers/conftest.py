"""No page of a run is made, which takes a process of its own, but in the tests that look at one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import without_pages


@pytest.fixture(autouse=True)
def no_pages(request: pytest.FixtureRequest) -> Iterator[None]:
    if "makes_pages" in request.fixturenames:
        yield
        return
    with without_pages():
        yield


@pytest.fixture
def makes_pages() -> None:
    """Have pages made, as users do."""
