"""``micro_batch_size: explore`` within real recipes, run through ``tune run``."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from adaptive_batching._torchtune.train.exploring import sizes_to_time
from tests.conftest import TuneRun, assert_same_weights
from tests.support.power_cut import FUNCTION
from tests.support.records import events

EXPLORE = ["micro_batch_size=explore", "adaptive_batching.memory_limit=8GiB"]


def test_candidates_divide_the_batch_and_are_not_close_to_each_other() -> None:
    assert sizes_to_time(64, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert sizes_to_time(64, 20) == [1, 2, 4, 8, 16]
    assert sizes_to_time(60, 60) == [1, 2, 4, 6, 12, 20, 30, 60]
    assert sizes_to_time(7, 6) == [1]


def test_exploring_leaves_no_trace_and_what_it_finds_gives_the_same_run_from_the_config(
    tune_run: TuneRun, caplog: pytest.LogCaptureFixture
) -> None:
    """Bit for bit, with dropout, and data that do not come out even: no gradients are carried into the next epoch, and
    no adapters merged. Packed, so that no split depends on timings.
    """
    common = [
        "dataset.packed=True",
        "model.lora_dropout=0.1",
        "gradient_accumulation_steps=3",
        "dataset.split=train[:160]",
    ]
    caplog.set_level(logging.INFO, "adaptive_batching")
    explored = tune_run("lora", *common, *EXPLORE, name="explored")
    [exploration] = events(explored, "exploration")
    assert [estimate["candidate"] for estimate in exploration["estimates"]] == [1, 2, 4]
    found = exploration["recommended"]["candidate"]
    answers = re.findall(r"recommended micro_batch_size (\w+), ([\d.]+)x base, confidence (\d+) of 100", caplog.text)
    assert len(answers) == sum(estimate["runs"] for estimate in exploration["estimates"])
    assert answers[-1][0] == str(found)

    assert f"using micro_batch_size={found};" in caplog.text
    pasted = tune_run("lora", *common, f"micro_batch_size={found}", name="pasted")
    assert explored.metrics == pasted.metrics
    assert_same_weights(explored.weights(epoch=1), pasted.weights(epoch=1))
    assert all(epoch["dropped_samples"] >= 4 for epoch in events(pasted, "epoch"))


KEEP = ["use_maximum_batch_size=True", "adaptive_batching.keep_global_batch=True", "gradient_accumulation_steps=4"]
LONG = ["epochs=1", "dataset.split=train[:120]", "batch_size=24", "tokenizer.max_seq_len=256"]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("overrides", "candidates", "epochs"),
    [
        pytest.param(LONG, [1, 2, 4, 8, 12, 24, "auto"], [(24, 24, 5)], id="splitting by length where lengths differ"),
        pytest.param(
            [*FUNCTION, "batch_size=1", "adaptive_batching.max_batch_size=8"], [1, 2, 4, 8, "auto"],
            [(1, 1, 50), (2, 2, 25)], id="a batch that grows, at what fits",
        ),
        pytest.param(
            [*KEEP, "epochs=1"], [1, 2, 4, 8, 16, "auto"], [(16, 16, 3)], id="the maximum, with the global batch kept"
        ),
    ],
)  # fmt: skip
def test_what_is_explored_divides_the_batch_and_fits(
    overrides: list[str], candidates: list[int | str], epochs: list[tuple[int, int, int]], tune_run: TuneRun
) -> None:
    run = tune_run("full", *EXPLORE, *overrides)
    assert [e["candidate"] for e in events(run, "exploration")[0]["estimates"]] == candidates
    assert [(e["batch_size"], e["global_batch_size"], e["steps"]) for e in events(run, "epoch")] == epochs


@pytest.mark.wide
def test_a_resumed_run_takes_what_the_first_one_has_explored(
    tune_run: TuneRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    common = ["epochs=3", "dataset.packed=True", *FUNCTION, *EXPLORE, "dataset.split=train[:80]"]
    tune_run("full", *common, name="whole", cut_off_at=1).copy_when_cut_off(tmp_path / "run")
    caplog.set_level(logging.INFO, "adaptive_batching")
    caplog.clear()
    files = "checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.safetensors]"
    resumed = tune_run("full", *common, "resume_from_checkpoint=True", files, name="run")
    assert "found by the run being resumed" in caplog.text
    assert not any("exploring" in record.getMessage() for record in caplog.records)
    assert [e["batch_size"] for e in events(resumed, "epoch")] == [4, 8, 16]
