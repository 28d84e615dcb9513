"""Mistakes end in one line that names key, value and remedy, before any training and with nothing written over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TuneRun

FUNCTION = "batch_increase_function._component_"
PROBE = ["use_maximum_batch_size=True", "adaptive_batching.memory_limit=8GiB"]
BOUND = "adaptive_batching.max_batch_size=16"


def returns_nothing_at_epoch_one(epoch: int, current_batch_size: int) -> int | None:
    return 0 if epoch == 0 else None


def factory(every: int = 1, reads_state: bool = False):
    if reads_state:
        return lambda epoch, current_batch_size, state: returns_nothing_at_epoch_one(epoch, current_batch_size)
    return returns_nothing_at_epoch_one


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["use_maximum_batch_size='yes'"], "use_maximum_batch_size='yes' must be True or False"),
        (["use_maximum_batchsize=True"], "use_maximum_batchsize is unknown; did you mean 'use_maximum_batch_size'"),
        (["adaptive_batching.memory_limt=1GiB"], "memory_limt is unknown; did you mean 'memory_limit'"),
        (["adaptive_batching.memory_limit=lots"], "memory_limit='lots' is no amount of memory; write bytes"),
        (["adaptive_batching.search=fastest"], r"search='fastest' is unknown; Known: .*predict"),
        (["adaptive_batching.max_batch_size=3"], "max_batch_size=3 is below batch_size=4; raise"),
        (["micro_batch_size=3"], r"micro_batch_size=3 does not divide batch_size=4; these do: \[1, 2, 4\]"),
        (["micro_batch_size=most"], "micro_batch_size='most' must be a whole number, auto, explore or null"),
        (["use_maximum_batch_size=True", "adaptive_batching.keep_global_batch=True"],
         "keep_global_batch=True with gradient_accumulation_steps=1 leaves batch_size nothing to gain"),
        (["adaptive_batching.keep_global_batch=True", "adaptive_batching.grow_beyond_memory=True"],
         "keep_global_batch=True keeps what the optimizer sees, and grow_beyond_memory=True lets it grow"),
        (["adaptive_batching.keep_global_batch=1"], "keep_global_batch=1 must be True or False"),
        (["adaptive_batching.increase_every=0.3"], r"increase_every=0\.3 does not divide an epoch; write epoch, or a"),
        (["adaptive_batching.lr_scaling=cube"], "lr_scaling='cube' is unknown; Known: auto, linear, none, sqrt"),
        (["adaptive_batching.max_lr_scale=0"], "max_lr_scale=0 must be a number of at least 1"),
        ([f"{FUNCTION}=adaptive_batching.growth.norm_test", "~batch_increase_function.every",
          "adaptive_batching.keep_global_batch=True", "gradient_accumulation_steps=2"],
         "decides on the global batch, and adaptive_batching.keep_global_batch=True keeps it"),
        (["batch_size=0"], "batch_size=0 must be a whole number"),
        ([f"{FUNCTION}=no.such.function"], r"batch_increase_function='no\.such\.function' cannot be imported"),
        ([f"{FUNCTION}=math.pi"], "is not callable but of type float"),
        ([f"{FUNCTION}=math.sqrt"], "failed with the arguments"),
        (["collate_fn=torchtune.data.left_pad_sequence"], "left_pad_sequence' pads on the left"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_config_ends_before_anything_is_written(
    overrides: list[str], message: str, tune_run: TuneRun, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=rf"^error: .*{message}"):
        tune_run("full", *overrides)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset.split=train[:3]"], "has 3 samples, fewer than .*batch_size=4"),
        (["dataset.split=train[:7]", "gradient_accumulation_steps=2"], "at most 7"),
        ([*PROBE, "adaptive_batching.sequence_length=9999"], "asks for 9999 tokens, and the model takes 512"),
        ([*PROBE, "adaptive_batching.sequence_length=32", "dataset.packed=True"], "cannot be used with packed data"),
    ],
)  # fmt: skip
def test_a_mistake_that_only_the_data_show_ends_before_training(
    overrides: list[str], message: str, tune_run: TuneRun, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=rf"^error: .*{message}"):
        tune_run("full", *overrides)
    assert not list((tmp_path / "out").glob("epoch_*"))


def test_a_function_that_will_fail_ends_before_training(tune_run: TuneRun, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"factory\(epoch=1, current_batch_size=4\) returned None; it must return"):
        tune_run("full", f"{FUNCTION}={__name__}.factory", BOUND)
    assert not list((tmp_path / "out").glob("epoch_*"))


def test_a_function_that_fails_while_training_keeps_the_last_checkpoint(tune_run: TuneRun, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"factory\(epoch=1, current_batch_size=4\) returned None; it must return"):
        tune_run("full", f"{FUNCTION}={__name__}.factory", "batch_increase_function.reads_state=True", BOUND)
    assert (tmp_path / "out" / "epoch_0" / "model-00001-of-00001.safetensors").exists()
    assert (tmp_path / "out" / "recipe_state" / "recipe_state.pt").exists()


def test_settings_that_do_nothing_are_named(tune_run: TuneRun, caplog: pytest.LogCaptureFixture) -> None:
    settings = ["adaptive_batching.increase_every=0.5", "adaptive_batching.lr_scaling=sqrt"]
    tune_run("full", *settings, "epochs=1", "max_steps_per_epoch=1")
    assert "increase_every=0.5 does nothing without any of the fields" in caplog.text
    assert "lr_scaling=sqrt does nothing without any of the fields" in caplog.text
    caplog.clear()
    tune_run("full", *settings, "micro_batch_size=2", "epochs=1", "max_steps_per_epoch=1")
    assert "increase_every=0.5 does nothing without batch_increase_function" in caplog.text
    assert "lr_scaling=sqrt does nothing" not in caplog.text
