"""Every distributed recipe on two devices, over NCCL. The runs are in ``tests/integration/two_ranks.py``."""

from __future__ import annotations

import json

import pytest

from adaptive_batching._dry_run.device.control import Counters
from tests.conftest import Run, assert_same_weights
from tests.integration.two_ranks import FAULTS, KINDS, OTHERS
from tests.support.device_steps import StepEnd, assert_asks_no_more, level
from tests.support.launches import Finished, of_launch
from tests.support.records import events

ALL = (*KINDS, *OTHERS)


@of_launch("devices")
def test_a_recipe_probes_grows_validates_and_goes_on_where_it_was_cut_off(finished: Finished) -> None:
    assert_goes_on("full", finished)


@of_launch("devices_others")
@pytest.mark.parametrize("kind", ALL[1:])
def test_so_does_every_other_recipe(kind: str, finished: Finished) -> None:
    assert_goes_on(kind, finished)


def assert_goes_on(kind: str, finished: Finished) -> None:
    whole, resumed = finished(f"{kind}_steps_whole"), finished(f"{kind}_steps")
    [probe] = events(whole, "probe")
    assert (probe["search"], probe["batch_size"], probe["reason"]) == ("predict", 8, "max_batch_size=8")
    sizes = [step["batch_size"] for step in whole.metrics if "val_loss" not in step]
    assert sizes == [4] * 3 + [8] * 4
    assert [event["step"] for event in events(whole, "validation")] == ([] if kind.endswith("dpo") else [4])
    assert [event["step"] for event in events(resumed, "resume")] == [5]
    assert resumed.by_step == whole.by_step
    assert_same_weights(resumed.weights_in("step_7"), whole.weights_in("step_7"))


@of_launch("devices")
def test_a_rank_whose_device_is_full_takes_the_other_along(finished: Finished) -> None:
    """Each step has its samples, as on the host; numbers are not computed here."""
    run = finished("recovered")
    assert len(run.metrics) == len(FAULTS)
    assert [step["oom_retries"] for step in run.metrics] == [1, 2, 3, 4, 5, 6, 8]


def ends_of(run: Run) -> list[StepEnd]:
    noted = json.loads((run.output_dir / "ends.json").read_text())
    return [StepEnd(Counters(**end["asked"]), end["allocated_bytes"], end["reserved_bytes"]) for end in noted]


@of_launch("devices_others")
@pytest.mark.parametrize("fields", ["recovers", "probed"])
def test_a_step_with_fake_quantizers_asks_no_more_of_the_device_than_stocks(fields: str, finished: Finished) -> None:
    stocks, ours = (ends_of(finished(f"qat_{name}")) for name in ("stock", fields))
    assert len(stocks) == len(ours) == 20
    assert_asks_no_more(ours, stocks)


@pytest.mark.slow
@of_launch("devices_level")
@pytest.mark.parametrize("kind", ALL)
def test_memory_stays_level_over_a_hundred_steps_on_two_devices(kind: str, finished: Finished) -> None:
    ends = ends_of(finished(kind))
    assert len(ends) == 100
    assert level(ends) == (0, 0)
