"""The settings of a run of ``Trainer``, as ``HfArgumentParser`` and TRL's parser read them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from adaptive_batching._config import SECTION, AdaptiveBatchingConfig, nearest
from adaptive_batching._growth.increase import path_of
from adaptive_batching._values import AdaptiveBatchingError, ByLength, ConfigError, Explore, Fixed

ONLY_IN_RECIPES = {
    "save_every_n_steps": "set save_strategy='steps' and save_steps in the trainer's arguments",
    "sequence_length": "samples are probed at the longest of the data",
    "grow_beyond_memory": "set micro_batch_size='auto', with which a batch grows beyond what fits in one forward pass",
    "increase_every": "batch_increase_function is asked at the start of each epoch",
    "grow_during_warmup": "give batch_increase_function the epoch to begin at",
}
"""Settings of recipes that ``Trainer`` has no place for, each with what takes its place."""

_OF_GROWTH = ("lr_scaling", "max_lr_scale")
_SECTION = re.compile(rf"adaptive_batching\.(?=(?:{'|'.join(SECTION)})\b)")


def _setting(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass
class AdaptiveArguments:
    """Settings for a ``Trainer``, under the names that they have in a recipe's config, without its sections.

    With neither ``recover_from_oom`` nor one of the first three set, training is that of ``Trainer`` itself.
    """

    use_maximum_batch_size: bool = _setting(
        False,
        "Find the largest batch that fits in one forward pass before training, and train with it. With "
        "batch_increase_function, the batch starts at per_device_train_batch_size and grows up to it.",
    )
    # Of a union, parsers take the second type: a string.
    batch_increase_function: dict[str, Any] | str | Callable[..., int | None] | None = _setting(  # noqa: RUF009
        None,
        "Dotted path of a function (epoch, current_batch_size) -> samples to add, or of a factory with its arguments: "
        '{"_component_": "adaptive_batching.growth.step", "gamma": 2}.',
    )
    micro_batch_size: int | str | None = _setting(
        None,
        "Samples per forward pass: a number, auto for the fastest token budget that fits, or none for "
        "per_device_train_batch_size. The gradient stays the same.",
    )
    padding: bool = _setting(
        False, "Pad samples of similar length with micro_batch_size=auto, rather than pack them without padding."
    )
    balance_ranks: bool = _setting(True, "Balance the samples of a step over devices with micro_batch_size=auto.")
    memory_limit: float | str | None = _setting(None, "Device memory that training may use in total: 40GiB or 90%.")
    headroom: float | str | None = _setting("2%", "Device memory to keep free; ignored with a memory_limit.")
    max_batch_size: int | None = _setting(None, "Upper bound on the batch size.")
    round_to_power_of_two: bool = _setting(True, "Round the maximum down to a power of two.")
    keep_global_batch: bool = _setting(False, "Keep the optimizer's batch where use_maximum_batch_size enlarges it.")
    search: str = _setting("predict", "How to look for the maximum: predict, binary_search or power_of_two.")
    lr_scaling: str = _setting("none", "How the learning rate follows the global batch: none, sqrt, linear or auto.")
    max_lr_scale: float = _setting(4.0, "Largest factor that lr_scaling applies.")
    recover_from_oom: bool | None = _setting(
        None, "Rerun a step that ran out of memory in smaller parts; None: if another setting is made."
    )
    audit_every: int | None = _setting(None, "Optimizer steps between checks that parts add up to their union.")
    report_dir: str | None = _setting(None, "Where record and page go; default: adaptive_batching in output_dir.")

    @classmethod
    def of(cls, given: AdaptiveArguments | Mapping[str, Any] | str) -> AdaptiveArguments:
        """Return the arguments that ``"auto"``, or a mapping with their names, stands for.

        Raises:
            ConfigError: On anything else, or an unknown name.
        """
        if isinstance(given, cls):
            return given
        if given == "auto":
            return cls(micro_batch_size="auto")
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"adaptive={given!r} must be 'auto', AdaptiveArguments(...) or a mapping of its settings, such as "
                "{'micro_batch_size': 'auto', 'memory_limit': '40GiB'}"
            )
        known = [setting.name for setting in dataclasses.fields(cls)]
        for key in given:
            if key in ONLY_IN_RECIPES:
                raise ConfigError(_only_in_recipes(key, given[key]))
            if key not in known:
                raise ConfigError(f"adaptive has no setting {key!r}{nearest(str(key), known)}")
        return cls(**given)

    def settings(self, batch_size: int) -> AdaptiveBatchingConfig:
        """Return the validated settings for batches of ``batch_size`` samples.

        Raises:
            ConfigError: On a wrong type, a value out of range, or a setting that ``Trainer`` cannot have or that has
                no effect.
        """
        given = {setting.name: getattr(self, setting.name) for setting in dataclasses.fields(self)}
        if isinstance(size := self.micro_batch_size, str) and size.isdigit():  # as a parser has it
            given["micro_batch_size"] = int(size)
        given["batch_increase_function"] = _parsed("batch_increase_function", self.batch_increase_function)
        with in_trainers_words():
            # A number that does not divide a batch leaves a smaller part, as the end of an epoch does.
            settings = AdaptiveBatchingConfig(**given)
            _check(settings, batch_size)
        return settings


def fields_set(arguments: AdaptiveArguments) -> dict[str, Any]:
    """Return the fields that are set, as a YAML has them."""
    values = {}
    for setting in dataclasses.fields(arguments):
        value = _parsed(setting.name, getattr(arguments, setting.name))
        if value != setting.default:
            values[setting.name] = path_of(value) if callable(value) else value
    return values


@contextlib.contextmanager
def in_trainers_words() -> Iterator[None]:
    """Have errors name settings as they are here, and not with a recipe's section."""
    try:
        yield
    except AdaptiveBatchingError as error:
        error.args = tuple(_SECTION.sub("", arg) if isinstance(arg, str) else arg for arg in error.args)
        raise


def _parsed(key: str, value: Any) -> Any:
    """Return a mapping that is written as JSON, on a command line, and anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f'{key}={value!r} is not JSON ({error}); write it as {{"key": "value"}}') from None


def _only_in_recipes(name: str, value: Any) -> str:
    return f"{name}={value!r} is for the torchtune recipes; in Trainer, {ONLY_IN_RECIPES[name]}"


def _check(settings: AdaptiveBatchingConfig, batch_size: int) -> None:
    default, size = AdaptiveBatchingConfig(), settings.micro_batch_size
    changed = [name for name in SECTION if getattr(settings, name) != getattr(default, name)]
    if changed and not settings.enabled:
        raise ConfigError(
            f"{changed[0]}={getattr(settings, changed[0])} has no effect by itself; set micro_batch_size='auto' too, "
            "or use_maximum_batch_size, batch_increase_function or recover_from_oom=True"
        )
    if not settings.resizes and (of_growth := [name for name in changed if name in _OF_GROWTH]):
        raise ConfigError(
            f"{of_growth[0]}={getattr(settings, of_growth[0])} has no effect while the batch stays as it is; set "
            "batch_increase_function or use_maximum_batch_size, or leave it out"
        )
    if isinstance(size, Explore):
        raise ConfigError("micro_batch_size='explore' is for the torchtune recipes; in Trainer, write auto or a number")
    if settings.use_maximum_batch_size and isinstance(size, (Fixed, ByLength)):
        raise ConfigError(
            f"use_maximum_batch_size=True finds what fits in one forward pass, and with micro_batch_size={size} any "
            f"batch runs; set one of them, and per_device_train_batch_size to what the optimizer should see"
        )
    if settings.keep_global_batch and settings.grows:
        raise ConfigError(
            "keep_global_batch=True keeps what the optimizer sees, which batch_increase_function is to raise; set one "
            "of them"
        )
    if settings.max_batch_size is not None and settings.max_batch_size < batch_size:
        raise ConfigError(
            f"max_batch_size={settings.max_batch_size} is below per_device_train_batch_size={batch_size}; raise one or "
            "lower the other"
        )
