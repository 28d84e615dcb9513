"""Mistakes in a config are refused in one line that names key, value and remedy."""

from __future__ import annotations

import logging

import pytest
from omegaconf import DictConfig, OmegaConf

from adaptive_batching._torchtune.train.growing import what_keeps_global_batch
from adaptive_batching._torchtune.train.settings import read_evaluation, read_settings, read_validation
from adaptive_batching._values import ByLength, ConfigError
from tests.conftest import QUICKSTART

CONFIG = QUICKSTART / "full_single_device.yaml"
OFF = ["use_maximum_batch_size=False", "batch_increase_function=null", "batch_size=4", "adaptive_batching=null"]


def config(*overrides: str) -> DictConfig:
    """The quickstart's config with all fields unset, but for ``overrides``."""
    cfg = OmegaConf.merge(OmegaConf.load(CONFIG), OmegaConf.from_dotlist(OFF), OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(cfg, DictConfig)
    return cfg


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("save_every_step=5", "save_every_step is unknown; did you mean 'save_every_n_steps'"),
        ("adaptive_batching.max_batch_size=3", "max_batch_size=3 is below batch_size=4; raise"),
        ("batch_size=0", "batch_size=0 must be a whole number"),
        ("batch_increase_function=a.b", "batch_increase_function='a.b' is for training"),
        ("micro_batch_size=2", "micro_batch_size=2 is for training"),
        ("save_every_n_steps=5", "save_every_n_steps=5 is for training"),
        ("run_val_every_n_steps=5", "run_val_every_n_steps=5 is for training"),
    ],
)
def test_a_mistake_in_the_config_of_an_evaluation_is_refused_with_key_value_and_remedy(
    override: str, message: str
) -> None:
    """Those in a config for training are in tests/integration/test_mistakes.py."""
    with pytest.raises(ConfigError, match=message) as error:
        read_evaluation(config(override))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("accumulation", [1, 2, 8])
def test_what_is_said_to_keep_the_global_batch_is_accepted_and_makes_use_of_the_device(accumulation: int) -> None:
    remedy = what_keeps_global_batch(accumulation).split()
    cfg = config("use_maximum_batch_size=True", f"gradient_accumulation_steps={accumulation}", *remedy)
    settings = read_settings(cfg)
    assert settings.keep_global_batch == (accumulation > 1)
    assert settings.use_maximum_batch_size or isinstance(settings.micro_batch_size, ByLength)


def test_settings_that_do_nothing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    settings = ["adaptive_batching.increase_every=0.5", "adaptive_batching.lr_scaling=sqrt"]
    read_settings(config(*settings))
    assert "increase_every=0.5 does nothing without any of the fields" in caplog.text
    assert "lr_scaling=sqrt does nothing without any of the fields" in caplog.text
    caplog.clear()
    read_settings(config(*settings, "micro_batch_size=2"))
    assert "increase_every=0.5 does nothing without batch_increase_function" in caplog.text
    assert "lr_scaling=sqrt does nothing" not in caplog.text


def test_a_validation_that_does_not_run_is_named(caplog: pytest.LogCaptureFixture) -> None:
    component = "dataset_val._component_=torchtune.datasets.instruct_dataset"
    assert read_validation(config(component, "batch_size_val=4")) is None
    assert "does nothing without run_val_every_n_steps" in caplog.text
    assert "batch_size_val=4 does nothing" in caplog.text
    caplog.clear()
    settings = read_validation(config(component, "run_val_every_n_steps=5"))
    assert settings is not None and (settings.every, settings.batch_size) == (5, None)
    assert read_validation(config()) is None and not caplog.text
    assert read_validation(config("dataset_val._component_=null", "run_val_every_n_steps=null")) is None


def test_a_name_of_ours_that_the_config_uses_itself_is_left_alone() -> None:
    cfg = config("sequence_length=64", "tokenizer.max_seq_len=${sequence_length}", "search=here")
    with pytest.raises(ConfigError, match="search='here' does nothing at the top level"):
        read_settings(cfg)
    del cfg["search"]
    assert not read_settings(cfg).enabled


def test_what_does_nothing_in_an_evaluation_is_named(caplog: pytest.LogCaptureFixture) -> None:
    evaluation = ["use_maximum_batch_size=True", "batch_increase_function._component_=null"]
    used = ["adaptive_batching.memory_limit=2GiB", "adaptive_batching.recover_from_oom=False", "batch_size=auto"]
    assert read_evaluation(config(*evaluation, *used)).enabled
    assert not caplog.text
    read_evaluation(config(*evaluation, "adaptive_batching.sequence_length=64"))
    assert "adaptive_batching.sequence_length=64 does nothing in an evaluation" in caplog.text
