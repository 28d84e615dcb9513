"""What a step asks of the device, against a step of stock's."""

from __future__ import annotations

from dataclasses import fields

import pytest

from adaptive_batching._emulated_device.control import Counters
from tests.conftest import RECIPES, TuneRun
from tests.support.device_steps import noted_steps

STEPS = [
    "device=cuda", "dtype=bf16", "dataset.split=train[:80]", "epochs=1", "log_peak_memory_stats=False",
    "clip_grad_norm=1.0",
]
WAYS = {
    "off": [],
    "probed": ["use_maximum_batch_size=True", "adaptive_batching.max_batch_size=4"],
    "in one part": ["micro_batch_size=4"],
}


def asked(tune_run: TuneRun, kind: str, name: str, *overrides: str, stock: bool = False) -> Counters:
    """What the steps of a run asked for, the first ones aside."""
    with noted_steps() as ends:
        tune_run(kind, *STEPS, *overrides, name=name, stock=stock)
    assert len(ends) == 20
    return ends[-1].asked - ends[7].asked


@pytest.mark.parametrize("kind", RECIPES)
def test_a_step_asks_no_more_of_the_device_than_stocks(kind: str, tune_run: TuneRun) -> None:
    stocks = asked(tune_run, kind, "stock", stock=True)
    print(kind, "stock", stocks)
    for way, overrides in WAYS.items():
        ours = asked(tune_run, kind, way, *overrides)
        print(kind, way, ours)
