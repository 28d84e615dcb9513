"""Parameters of tests of which ``make test`` runs a few, and continuous integration all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(names: Iterable[Any], *kept: Any) -> list[Any]:
    """Return ``names`` as parameters; those that are not ``kept`` are wide."""
    names = [*names]
    assert {*kept} <= {*names}, {*kept} - {*names}
    return [name if name in kept else wide(name) for name in names]


def wide(*values: Any) -> Any:
    """Return the ``values`` of a case that is wide."""
    return pytest.param(*values, marks=pytest.mark.wide)
