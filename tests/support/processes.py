"""Calls in processes of their own, whose memory is given back."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import adaptive_batching._torchtune.plan.planning  # noqa: F401 (has the process that others are forked from import torchtune)

T = TypeVar("T")
FORKED = multiprocessing.get_context("forkserver")
"""Starts processes that are forked from one that has imported torchtune and computed nothing. They are no forks of this
one, in which autograd may have run: not all builds of torch let it run in a fork then."""


def in_a_process(function: Callable[..., T], *arguments: object) -> T:
    with ProcessPoolExecutor(1, mp_context=FORKED) as pool:
        return pool.submit(function, *arguments).result()
