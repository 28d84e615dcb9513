"""Parameters of tests of which ``make test`` runs a few, and continuous integration all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(names: Iterable[str], *kept: str) -> list[Any]:
    """Return ``names`` as parameters; those that are not ``kept`` are wide."""
    names = [*names]
    assert {*kept} <= {*names}, {*kept} - {*names}
    return [name if name in kept else pytest.param(name, marks=pytest.mark.wide) for name in names]
