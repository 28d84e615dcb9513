"""Garbage collections that take no time, in the processes of tests."""

from __future__ import annotations

import gc


def quicken_collections() -> None:
    """Keep what torch and its libraries have made so far out of each collection: it takes half a second with, none
    without.

    Every trial step and every recovery collects garbage. That of the tests themselves is still found. Each run asks
    whether anything is frozen, which is answered by counting it all: a tenth of a small run.
    """
    gc.collect()
    gc.freeze()
    setattr(gc, "get_freeze_count", lambda: 1)  # noqa: B010
