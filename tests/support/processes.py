"""Calls in processes of their own, whose memory is given back."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")
FORKED = multiprocessing.get_context("forkserver")
"""Starts processes that are forked from one that has imported torch and what is trained with, and computed nothing.
They are no forks of this one, in which autograd may have run: not all builds of torch let it run in a fork then."""

FORKED.set_forkserver_preload(["torchtune.datasets", "tests.conftest", "tests.transformers.trainers"])


def in_a_process(function: Callable[..., T], *arguments: object) -> T:
    with ProcessPoolExecutor(1, mp_context=FORKED) as pool:
        return pool.submit(function, *arguments).result()
