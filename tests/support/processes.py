"""A process that others are forked from."""

from __future__ import annotations

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
"""Starts processes that are forked from one that has imported torch and what is trained with, and computed nothing.
They are no forks of this one, in which autograd may have run: not all builds of torch let it run in a fork then."""

FORKED.set_forkserver_preload(["torchtune.datasets", "tests.conftest", "tests.transformers.trainers"])
