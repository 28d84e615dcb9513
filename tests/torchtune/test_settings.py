"""Mistakes in a config are refused in one line that names key, value and remedy."""

from __future__ import annotations

import logging

import pytest
from omegaconf import DictConfig, OmegaConf

from adaptive_batching._torchtune.train.growing import what_keeps_global_batch
from adaptive_batching._torchtune.train.settings import read_settings, read_validation
from adaptive_batching._values import ByLength, ConfigError
from tests.conftest import QUICKSTART

CONFIG = QUICKSTART / "full_single_device.yaml"
OFF = ["use_maximum_batch_size=False", "batch_increase_function=null", "batch_size=4", "adaptive_batching=null"]


def config(*overrides: str) -> DictConfig:
    """The quickstart's config with all fields unset, but for ``overrides``."""
    cfg = OmegaConf.merge(OmegaConf.load(CONFIG), OmegaConf.from_dotlist(OFF), OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(cfg, DictConfig)
    return cfg


@pytest.mark.parametrize("accumulation", [1, 2, 8])
def test_what_is_said_to_keep_the_global_batch_is_accepted_and_makes_use_of_the_device(accumulation: int) -> None:
    remedy = what_keeps_global_batch(accumulation).split()
    cfg = config("use_maximum_batch_size=True", f"gradient_accumulation_steps={accumulation}", *remedy)
    settings = read_settings(cfg)
    assert settings.keep_global_batch == (accumulation > 1)
    assert settings.use_maximum_batch_size or isinstance(settings.micro_batch_size, ByLength)


def test_settings_that_do_nothing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    of_growth = ["adaptive_batching.increase_every=0.5", "adaptive_batching.lr_scaling=sqrt"]
    read_settings(config(*of_growth, "adaptive_batching.memory_limit=2GiB", "adaptive_batching.recover_from_oom=False"))
    said = [text.partition("adaptive_batching.")[2] for text in caplog.messages]
    without = "does nothing without any other field set"
    assert [text.partition("=")[0] for text in said if without in text] == [
        "memory_limit",
        "increase_every",
        "lr_scaling",
    ]
    for on in ("micro_batch_size=2", "adaptive_batching.recover_from_oom=True"):
        caplog.clear()
        read_settings(config(*of_growth, "adaptive_batching.memory_limit=2GiB", on))
        assert "increase_every=0.5 does nothing without a field that changes the batch" in caplog.text
        assert "lr_scaling=sqrt does nothing without a field that changes the batch" in caplog.text
        assert "memory_limit" not in caplog.text
    caplog.clear()
    read_settings(config(*of_growth, "use_maximum_batch_size=True"))
    assert "increase_every=0.5 does nothing without batch_increase_function" in caplog.text
    assert "lr_scaling=sqrt does nothing" not in caplog.text


@pytest.mark.parametrize("on", ["adaptive_batching.recover_from_oom=True", "run_val_every_n_steps=1"])
def test_recovery_and_validation_are_fields_with_which_checkpoints_are_ours(on: str) -> None:
    asynchronous = "enable_async_checkpointing=True"
    read_settings(config(asynchronous, "adaptive_batching.recover_from_oom=False"))
    with pytest.raises(ConfigError, match=r"enable_async_checkpointing=True: .*or leave its fields unset"):
        read_settings(config(asynchronous, on))


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
