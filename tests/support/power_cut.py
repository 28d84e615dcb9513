"""An increase function that ends a run where a test says."""

from __future__ import annotations

import os

from adaptive_batching._growth.increase import GrowthState, IncreaseFunction

FUNCTION = ["batch_increase_function._component_=tests.support.power_cut.factory"]
fail_at_epoch = int(os.environ["FAIL_AT_EPOCH"]) if "FAIL_AT_EPOCH" in os.environ else None


def factory(every: int = 1, shrinks: bool = False) -> IncreaseFunction:
    return shrinks_at_the_end if shrinks else doubles_until_told_to_fail


def doubles_until_told_to_fail(epoch: float, current_batch_size: int, state: GrowthState) -> int:
    if epoch == fail_at_epoch:
        raise RuntimeError("the power went out")
    return current_batch_size if epoch else 0


def shrinks_at_the_end(epoch: float, current_batch_size: int, state: GrowthState) -> int | None:
    added = doubles_until_told_to_fail(epoch, current_batch_size, state)
    return -12 if epoch == 1.5 else added or None
