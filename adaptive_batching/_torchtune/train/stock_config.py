"""Keys of a config that stock alone reads: of the wrong kind, or refused by stock together."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config
from torchtune.config._errors import ConfigError as NotWellFormed
from torchtune.config._errors import InstantiationError
from torchtune.training.precision import PRECISION_STR_TO_DTYPE

from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._ranks.agree import is_lost_rank
from adaptive_batching._torchtune.train.settings import FIELDS
from adaptive_batching._values import AdaptiveBatchingError, ConfigError, first_line, nearest_path

_DTYPES = tuple(PRECISION_STR_TO_DTYPE)


def _is_device(value: Any) -> bool:
    try:
        return bool(torch.device(value))
    except (RuntimeError, TypeError):
        return False


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and float(value) == float(value)
    except (TypeError, ValueError):
        return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_whole(value) and value > 0


_IS_SWITCH: tuple[Callable[[Any], bool], str] = (lambda value: not isinstance(value, str), "True or False")
_SWITCHES = (
    "resume_from_checkpoint", "shuffle", "compile", "optimizer_in_bwd", "enable_activation_checkpointing",
    "enable_activation_offloading", "log_peak_memory_stats", "save_adapter_weights_only", "fsdp_cpu_offload",
    "enable_async_checkpointing", "low_cpu_ram",
)  # fmt: skip
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "epochs": (_is_whole, "a whole number"),
    "gradient_accumulation_steps": (_is_positive, "a whole number of at least 1"),
    "log_every_n_steps": (_is_positive, "a whole number of at least 1"),
    "max_steps_per_epoch": (_is_whole, "a whole number or null"),
    "seed": (_is_whole, "a whole number or null"),
    "clip_grad_norm": (_is_number, "a number or null"),
    "optimizer.lr": (_is_number, "a number"),
    "output_dir": (lambda value: isinstance(value, str), "a path"),
    "device": (_is_device, "a device, such as cuda or cpu"),
    "dtype": (lambda value: value in _DTYPES, f"one of {', '.join(_DTYPES)}"),
    **dict.fromkeys(_SWITCHES, _IS_SWITCH),
}
_MAY_BE_NULL = ("profiler", "batch_increase_function", "dataset_val")  # after key=null over a component
_NEVER_NULL = ("optimizer.lr", "epochs", "gradient_accumulation_steps", "log_every_n_steps", "output_dir")


def check_kinds(cfg: DictConfig) -> None:
    """Refuse values that stock would stumble over, some of them after minutes, or take for True.

    Raises:
        ConfigError: On the first such value.
    """
    for key in map(str, cfg):
        value = None if OmegaConf.is_interpolation(cfg, key) else cfg[key]
        if key not in _MAY_BE_NULL and isinstance(value, DictConfig) and value.get("_component_", ...) is None:
            raise ConfigError(f"{key}=null names no component; name one, or take {key} out of the config")
    for key, (is_one, kind) in _EXPECTED.items():
        value = OmegaConf.select(cfg, key, default=...)
        is_fine = value is ... or (key not in _NEVER_NULL if value is None else is_one(value))
        if not is_fine:
            shown = "null" if value is None else repr(value)
            raise ConfigError(f"{key}={shown} must be {kind}")


def check_components(cfg: DictConfig) -> None:
    """Refuse components that cannot be imported, or do not take the arguments that they are given.

    Raises:
        ConfigError: On the first component.
    """
    if (here := str(Path.cwd())) not in sys.path:  # as torchtune does before it makes a component
        sys.path.append(here)
    for key in (key for key in map(str, cfg) if key not in FIELDS and not OmegaConf.is_interpolation(cfg, key)):
        value = cfg[key]
        if not isinstance(value, DictConfig) or value.get("_component_") is None:
            continue
        alone = OmegaConf.create({key: OmegaConf.to_container(value, resolve=True)})
        try:
            config.validate(alone)
        except NotWellFormed as error:
            raise ConfigError(f"{key}: {'; '.join(map(str, error.errors))}") from error
        except InstantiationError as error:
            raise ConfigError(f"{key}={not_loaded(error)}") from error
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"{key}={value._component_}: {' '.join(str(error).split())}") from error
        except ValueError:  # it does not tell its arguments
            continue


def not_loaded(error: InstantiationError) -> str:
    """Return which component torchtune cannot load, and a name that is near, or else why not."""
    first, *rest = str(error).splitlines()
    named = re.search(r"Error loading '(.*?)'", first)
    if named is None:
        return first
    near = nearest_path(named[1])
    if near not in ("", named[1]):
        return f"{named[1]} does not exist; did you mean {near}?"
    return f"{named[1]} cannot be loaded ({' '.join(rest[:1]) or first}); {' '.join(rest[1:]) or 'check its path'}"


@contextlib.contextmanager
def set_up_in_one_line(cfg: DictConfig) -> Iterator[None]:
    """Raise a checkpoint of another model, and weights or a tokenizer that are not there, as a :class:`ConfigError`."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, AdaptiveBatchingError):
            raise
        if str(error).startswith("Error(s) in loading state_dict"):
            why = str(error).splitlines()[1].strip()[:200]
            raise ConfigError(f"the checkpoint is not of this model ({why}); check model and checkpointer") from error
        folder = OmegaConf.select(cfg, "checkpointer.checkpoint_dir")
        if isinstance(folder, str) and folder in str(error) and not OmegaConf.select(cfg, "resume_from_checkpoint"):
            raise ConfigError(cannot_be_loaded(error)) from error
        path = OmegaConf.select(cfg, "tokenizer.path")
        if isinstance(path, str) and path in str(error) and not Path(path).exists():
            raise ConfigError(f"tokenizer.path={path!r} is not there; it comes with the weights of a model") from error
        raise


def cannot_be_loaded(error: Exception) -> str:
    """Return what to say where the weights of a model are not there."""
    return (
        f"the model cannot be loaded: {in_short(error)}. Check checkpointer.checkpoint_dir and its files; the comments "
        "at the top of a config say how to get them"
    )


def in_short(error: Exception) -> str:
    """Return the kind of an error and its first line, without a full stop."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0].rstrip('.')}"


@contextlib.contextmanager
def refused_in_one_line() -> Iterator[None]:
    """Raise what stock says of a config while its recipe is made as a :class:`ConfigError`."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if isinstance(error, AdaptiveBatchingError) or is_out_of_memory(error) or is_lost_rank(error):
            raise
        raise ConfigError(f"torchtune refuses this config: {first_line(error)}") from error
