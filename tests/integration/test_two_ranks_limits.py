"""Two processes near the limits of memory: real ones, of collectives, and of samples too short for all chunks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.conftest import assert_close, assert_same_weights
from tests.integration.two_ranks import FATAL, KNOWN, FailingCollective, name_of
from tests.support.launches import Finished, of_launch, output_of
from tests.support.records import events


@of_launch("memory")
def test_the_rank_that_has_least_memory_decides_the_maximum(finished: Finished, launched: tuple[Path, str]) -> None:
    run = finished("unequal_memory")
    [probe] = events(run, "probe")
    assert 10 < probe["batch_size"] < 150, "in 4 GiB all 200 samples of a rank would fit"
    assert len(probe["measurements"]) <= 10
    assert {step["batch_size"] for step in run.metrics} == {probe["batch_size"]}


@of_launch("memory")
def test_a_real_limit_on_one_rank_loses_and_repeats_nothing(finished: Finished) -> None:
    limited, free = finished("real_limit"), finished("real_no_limit")
    assert limited.metrics[-1]["oom_retries"] >= 1
    assert len(free.metrics) == 1
    assert limited.metrics[0]["loss"] == pytest.approx(free.metrics[0]["loss"], rel=1e-4)
    for name, weights in free.weights(0).items():
        torch.testing.assert_close(limited.weights(0)[name], weights, rtol=1e-3, atol=1e-5)


@of_launch("short_samples")
@pytest.mark.parametrize("way", ["2", "auto"])
def test_where_each_chunk_gathers_the_output_layer_short_samples_train_and_recover(
    way: str, finished: Finished, launched: tuple[Path, str]
) -> None:
    whole, recovered = finished("whole"), finished(f"cut_{way}_recovered")
    assert len(whole.metrics) == 2
    assert_close(finished(f"cut_{way}"), whole, epoch=0)
    assert [step["oom_retries"] for step in recovered.metrics] == [1, 2]
    assert_close(recovered, whole, epoch=0)
    assert "not always the same" not in launched[1]
    said = output_of(launched, f"cut_{way}").count("samples are not balanced over ranks")
    assert said == (way == "auto"), "a sample of one token has no target, and counts"


@of_launch("short_samples")
def test_with_no_field_set_no_group_is_made(finished: Finished) -> None:
    ours, stock = finished("ours"), finished("stock")
    assert ours.metrics == stock.metrics
    assert_same_weights(ours.weights(0), stock.weights(0))


@of_launch("short_samples")
def test_what_needs_ranks_to_agree_ends_with_a_remedy_where_they_cannot(launched: tuple[Path, str]) -> None:
    for rank in range(2):
        error = (launched[0] / "no_gloo_but_asked_for" / f"error_{rank}.txt").read_text()
        assert re.match(r"error: the ranks cannot communicate .*no host of that name.* GLOO_SOCKET_IFNAME", error)


@of_launch("failing_collectives")
def test_memory_may_run_out_at_any_moment_of_a_collective(finished: Finished) -> None:
    """Each step of the run fails at another moment."""
    recovered = finished("recovered")
    assert [step["oom_retries"] for step in recovered.metrics] == [*range(1, len(KNOWN) + 1)]
    assert_close(recovered, finished("whole"), epoch=0)


@of_launch("failing_collectives")
@pytest.mark.parametrize("case", FATAL, ids=lambda case: name_of(*case))
def test_what_a_rank_cannot_recover_from_ends_the_run_on_all_in_one_line(
    case: FailingCollective, launched: tuple[Path, str]
) -> None:
    """It does not know if a collective has reached the others, or runs out again while it tells them."""
    lost, said = (
        "lost the connection to another rank",
        "memory ran out inside a collective: whether the other ranks got",
    )
    if case[1] == "draining":
        said = "memory ran out, and again while notifying the other ranks"
    for rank in range(2):
        error = (launched[0] / name_of(*case) / f"error_{rank}.txt").read_text()
        assert error.startswith(f"error: {said if rank in case[3] else lost}")
        assert "Timed out" not in error
