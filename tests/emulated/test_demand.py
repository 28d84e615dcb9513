"""What a step asks of the device, against a step of stock's."""

from __future__ import annotations

import pytest

from tests.conftest import RECIPES, TuneRun
from tests.support.device_steps import StepEnd, assert_asks_no_more, noted_steps

STEPS = ["device=cuda", "dtype=bf16", "dataset.split=train[:80]", "epochs=1", "log_peak_memory_stats=False"]
WAYS = {
    "off": [],
    "probed": ["use_maximum_batch_size=True", "adaptive_batching.max_batch_size=4"],
    "in one part": ["micro_batch_size=4"],
}


def ends_of(tune_run: TuneRun, kind: str, name: str, *overrides: str, stock: bool = False) -> list[StepEnd]:
    with noted_steps() as ends:
        tune_run(kind, *STEPS, *overrides, name=name, stock=stock)
    assert len(ends) == 20
    return ends


@pytest.mark.parametrize("kind", RECIPES)
def test_a_step_asks_no_more_of_the_device_than_stocks(kind: str, tune_run: TuneRun) -> None:
    stocks = ends_of(tune_run, kind, "stock", stock=True)
    for way, overrides in WAYS.items():
        ours = ends_of(tune_run, kind, way, *overrides)
        print(kind, way, ours[-1].asked - ours[7].asked, stocks[-1].asked - stocks[7].asked)
        assert_asks_no_more(ours, stocks)
