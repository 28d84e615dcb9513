"""Read a config and its overrides as a recipe does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from torchtune.config._utils import _merge_yaml_and_cli_args

from adaptive_batching._torchtune.names import why_not_read
from adaptive_batching._values import ConfigError, first_line


def read_config(path: Path, overrides: Sequence[str]) -> DictConfig:
    """Return the config in a file, with overrides of a command line.

    Raises:
        ConfigError: If one of them cannot be read.
    """
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:  # whatever is wrong with it
        raise ConfigError(f"{path} cannot be read: {why_not_read(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a config: it must map keys to values")
    try:
        cfg: DictConfig = _merge_yaml_and_cli_args(argparse.Namespace(**values), [*overrides])  # type: ignore[arg-type]
        return cfg
    except Exception as error:  # whatever torchtune and omegaconf raise
        raise ConfigError(f"{' '.join(overrides)} cannot be read ({first_line(error)}); write key=value") from error
