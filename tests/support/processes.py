"""Calls in processes of their own, whose memory is given back."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import adaptive_batching._torchtune.planning  # noqa: F401 (has the process that others are forked from import torchtune)

T = TypeVar("T")


def in_a_process(function: Callable[..., T], *arguments: object) -> T:
    """Call ``function`` in a new process. It is no fork of this one, in which autograd may have run: not all builds of
    torch let it run in a fork then."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(function, *arguments).result()
