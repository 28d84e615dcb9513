"""Mistakes end in one line that names key, value and remedy, before any training and with nothing written over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import conftest
from tests.conftest import TuneRun
from tests.support.html import read_page

FUNCTION = "batch_increase_function._component_"
PROBE = ["use_maximum_batch_size=True", "adaptive_batching.memory_limit=8GiB"]
BOUND = "adaptive_batching.max_batch_size=16"


def returns_nothing_at_epoch_one(epoch: int, current_batch_size: int) -> int | None:
    return 0 if epoch == 0 else None


def factory(every: int = 1, reads_state: bool = False) -> Any:
    if reads_state:
        return lambda epoch, current_batch_size, state: returns_nothing_at_epoch_one(epoch, current_batch_size)
    return returns_nothing_at_epoch_one


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # as every mistake that ``tests/torchtune/test_settings.py`` lists
        (["micro_batch_size=3"], r"micro_batch_size=3 does not divide batch_size=4; these do: \[1, 2, 4\]"),
        ([f"{FUNCTION}=math.sqrt"], "failed with the arguments"),
        ([f"{FUNCTION}=adaptive_batching.growth.norm_test", "~batch_increase_function.every",
          "adaptive_batching.keep_global_batch=True", "gradient_accumulation_steps=2"],
         "decides on the global batch, and adaptive_batching.keep_global_batch=True keeps it"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_config_ends_before_anything_is_written(
    overrides: list[str], message: str, tune_run: TuneRun, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=rf"^error: .*{message}") as end:
        tune_run("full", *overrides)
    assert "\n" not in str(end.value), "one line"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset.split=train[:7]", "gradient_accumulation_steps=2"], "at most 7"),
        ([*PROBE, "adaptive_batching.sequence_length=32", "dataset.packed=True"], "cannot be used with packed data"),
    ],
)
def test_a_mistake_that_only_the_data_show_ends_before_training(
    overrides: list[str], message: str, tune_run: TuneRun, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=rf"^error: .*{message}") as end:
        tune_run("full", *overrides)
    assert "\n" not in str(end.value), "one line"
    assert not list((tmp_path / "out").glob("epoch_*"))


def test_a_function_that_will_fail_ends_before_training(tune_run: TuneRun, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"factory\(epoch=1, current_batch_size=4\) returned None; it must return"):
        tune_run("full", f"{FUNCTION}={__name__}.factory", BOUND)
    assert not list((tmp_path / "out").glob("epoch_*"))


def test_a_function_that_fails_while_training_keeps_the_last_checkpoint_and_leaves_a_page(
    tune_run: TuneRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "makes_pages", True)
    with pytest.raises(SystemExit, match=r"factory\(epoch=1, current_batch_size=4\) returned None; it must return"):
        tune_run("full", f"{FUNCTION}={__name__}.factory", "batch_increase_function.reads_state=True", BOUND)
    assert (tmp_path / "out" / "epoch_0" / "model-00001-of-00001.safetensors").exists()
    assert (tmp_path / "out" / "recipe_state" / "recipe_state.pt").exists()
    words = read_page(tmp_path / "out" / "adaptive_batching" / "report.html").words["error"]
    assert "IncreaseFunctionError, 20" in words and "factory(epoch=1, current_batch_size=4) returned None" in words
