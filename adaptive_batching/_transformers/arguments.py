"""The settings of a run of ``Trainer``, as ``HfArgumentParser`` and TRL's parser read them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._values import ByLength, ConfigError, Explore, Fixed

_ONLY_IN_RECIPES = {
    "sequence_length": "samples are probed at the longest of the data",
    "grow_beyond_memory": "set micro_batch_size='auto', with which a batch grows beyond what fits in one forward",
    "increase_every": "batch_increase_function is asked at the start of each epoch",
    "grow_during_warmup": "give batch_increase_function the epoch to begin at",
    "noise_scale_every": "take an increase function that needs no gradient noise scale",
}
"""Settings of ``adaptive_batching`` that ``Trainer`` has no place for, each with what takes its place."""


@dataclass
class AdaptiveArguments:
    """Settings for a ``Trainer``, under the names that they have in a recipe's config.

    With none of the first three set, training is that of ``Trainer`` itself.
    """

    use_maximum_batch_size: bool = field(
        default=False,
        metadata={"help": "Probe the largest batch that fits in one forward before training, and train with it."},
    )
    # Of a union, parsers take the second type: a string.
    batch_increase_function: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Dotted path of a function (epoch, current_batch_size) -> samples to add, or of a factory with its "
            'arguments: {"_component_": "adaptive_batching.growth.step", "gamma": 2}.'
        },
    )
    micro_batch_size: int | str | None = field(
        default=None,
        metadata={
            "help": "Samples of one forward: a number, auto for samples of similar length, as many tokens as fit, or "
            "none for per_device_train_batch_size. It changes how a batch runs, not its gradient."
        },
    )
    adaptive_batching: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'All other settings, such as {"memory_limit": "40GiB", "lr_scaling": "sqrt"}.'},
    )

    def settings(self, batch_size: int) -> AdaptiveBatchingConfig:
        """Return the validated settings for batches of ``batch_size`` samples.

        Raises:
            ConfigError: On an unknown key, a wrong type, a value out of range, or a setting that ``Trainer`` cannot
                have.
        """
        size = self.micro_batch_size
        settings = AdaptiveBatchingConfig.from_mapping(
            _parsed("adaptive_batching", self.adaptive_batching),
            use_maximum_batch_size=self.use_maximum_batch_size,
            batch_increase_function=_parsed("batch_increase_function", self.batch_increase_function),
        )
        # A number that does not divide a batch leaves a smaller part, as the end of an epoch leaves a smaller batch.
        size = int(size) if isinstance(size, str) and size.isdigit() else size
        settings = dataclasses.replace(settings, micro_batch_size=size)  # type: ignore[arg-type]
        _check(settings, batch_size)
        return settings


def fields_set(arguments: AdaptiveArguments) -> dict[str, Any]:
    """Return the fields that are set, as a YAML has them."""
    names = [setting.name for setting in dataclasses.fields(arguments)]
    values = {name: _parsed(name, getattr(arguments, name)) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def _parsed(key: str, value: Any) -> Any:
    """Return a mapping that is written as JSON, on a command line, and anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f'{key}={value!r} is not JSON ({error}); write it as {{"key": "value"}}') from None


def _check(settings: AdaptiveBatchingConfig, batch_size: int) -> None:
    default = AdaptiveBatchingConfig()
    for name, instead in _ONLY_IN_RECIPES.items():
        if (value := getattr(settings, name)) != getattr(default, name):
            raise ConfigError(f"adaptive_batching.{name}={value!r} is for the torchtune recipes; in Trainer, {instead}")
    size = settings.micro_batch_size
    if isinstance(size, Explore):
        raise ConfigError("micro_batch_size='explore' is for the torchtune recipes; in Trainer, write auto or a number")
    if settings.use_maximum_batch_size and isinstance(size, (Fixed, ByLength)):
        raise ConfigError(
            f"use_maximum_batch_size=True finds what fits in one forward, and with micro_batch_size={size} any batch "
            f"runs; set one of them, and per_device_train_batch_size to what the optimizer should see"
        )
    if settings.keep_global_batch and settings.grows:
        raise ConfigError(
            "adaptive_batching.keep_global_batch=True keeps what the optimizer sees, which batch_increase_function is "
            "to raise; set one of them"
        )
    if settings.max_batch_size is not None and settings.max_batch_size < batch_size:
        raise ConfigError(
            f"adaptive_batching.max_batch_size={settings.max_batch_size} is below "
            f"per_device_train_batch_size={batch_size}; raise one or lower the other"
        )
