"""The settings of adaptive batching: validated once, immutable afterwards.

This module knows neither torch nor omegaconf. A YAML reader hands :meth:`AdaptiveBatchingConfig.from_mapping` plain
Python values and gets a dataclass or a :class:`ConfigError` that names key, value and remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaptive_batching.probe.search import SEARCHES

_BYTES_PER_UNIT = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


LR_SCALINGS = ("none", "sqrt", "linear", "auto")
"""``auto`` is ``linear`` for SGD and ``sqrt`` for all other optimizers."""


class ConfigError(ValueError):
    """A setting that cannot be used. The message names key, value and remedy."""


@dataclass(frozen=True)
class MemoryAmount:
    """An amount of memory: a number of bytes, or a fraction of what a device has."""

    num_bytes: int | None = None
    fraction: float | None = None

    @classmethod
    def parse(cls, key: str, value: Any) -> MemoryAmount:
        """Read ``1073741824``, ``"40GiB"``, ``"512 MB"``, ``0.9``, ``"0.9"`` or ``"90%"``.

        A whole number is bytes; a number with a decimal point is a fraction of the device.

        Raises:
            ConfigError: If ``value`` is none of these, or a fraction outside [0, 1].
        """
        remedy = f"{key}={value!r} is no amount of memory; write bytes (8589934592), '8GiB', '90%' or a fraction (0.9)"
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ConfigError(remedy)
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*|%)\s*", str(value))
        if match is None:
            raise ConfigError(remedy)
        number, unit = match.group(1), match.group(2).upper()
        if unit == "%" or (not unit and not number.isdigit()):
            fraction = float(number) / (100 if unit == "%" else 1)
            if fraction > 1:
                raise ConfigError(f"{key}={value!r} is more than the whole device; {remedy.split('; ', 1)[1]}")
            return cls(fraction=fraction)
        if unit not in _BYTES_PER_UNIT:
            raise ConfigError(remedy)
        return cls(num_bytes=int(float(number) * _BYTES_PER_UNIT[unit]))

    def of(self, total_bytes: int) -> int:
        """The amount in bytes on a device that has ``total_bytes``."""
        return self.num_bytes if self.num_bytes is not None else int(total_bytes * (self.fraction or 0.0))


@dataclass(frozen=True)
class AdaptiveBatchingConfig:
    """What the user asked for."""

    use_maximum_batch_size: bool = False
    """Probe the largest batch that fits before training, and train with it."""

    batch_increase_function: str | Mapping[str, Any] | None = None
    """``"pkg.module.function"``, or ``{"_component_": "pkg.module.factory", ...arguments}``; see
    :mod:`adaptive_batching.growth`."""

    micro_batch_size: int | str | None = None
    """Samples of one forward and backward; None: the whole batch; ``"auto"``: by length, as many tokens as is fastest
    within what fits; ``"explore"``: the fastest of these, measured before training. It changes how a batch runs, not
    its gradient."""

    search: str = "predict"
    """How the probe looks for the maximum; a key of :data:`adaptive_batching.probe.search.SEARCHES`."""

    round_to_power_of_two: bool = True
    """Round the maximum down to a power of two. False keeps the exact one."""

    max_batch_size: int | None = None
    """Upper bound on the batch size. With it, growth without ``use_maximum_batch_size`` needs no probe."""

    memory_limit: MemoryAmount | None = None
    """Memory that training may take. None: what is free, less the headroom."""

    headroom: MemoryAmount = MemoryAmount(fraction=0.02)
    """Memory of the device to keep free. An explicit ``memory_limit`` is taken as it is."""

    sequence_length: int | None = None
    """Sample length in tokens to probe at. None: the packed length, else the tokenizer's ``max_seq_len``, else the
    longest sample."""

    keep_global_batch: bool = False
    """Divide ``gradient_accumulation_steps`` by what ``batch_size`` gains, so that the optimizer sees the same."""

    grow_beyond_memory: bool = False
    """Let growth go on past the maximum: what does not fit in one forward runs in several."""

    increase_every: str | float = "epoch"
    """How often ``batch_increase_function`` is asked: every ``"epoch"``, or after each fraction of one."""

    grow_during_warmup: bool = True
    """False: the size stays as it is until the learning rate has risen to its peak."""

    lr_scaling: str = "none"
    """How the learning rate follows the global batch, beside its schedule; a value of :data:`LR_SCALINGS`."""

    max_lr_scale: float = 4.0
    """The most that ``lr_scaling`` multiplies the learning rate by."""

    noise_scale_every: int | None = None
    """Optimizer steps from one measurement of the gradient noise scale to the next. None: 5 where the increase function
    is one of those here that read it, else never."""

    recover_from_oom: bool = True
    """Run the samples of a step that ran out of memory again, in smaller micro-batches."""

    report_dir: str | None = None
    """Where the record, the probe's result and the pictures go."""

    @property
    def decisions_per_epoch(self) -> int:
        """How often the batch size is decided in an epoch."""
        return 1 if isinstance(self.increase_every, str) else round(1 / self.increase_every)

    @property
    def cuts_by_length(self) -> bool:
        """Whether the samples of an optimizer step are sorted by length and cut by tokens."""
        return self.micro_batch_size == "auto"

    @property
    def explores(self) -> bool:
        """Whether the fastest ``micro_batch_size`` is to be measured before training."""
        return self.micro_batch_size == "explore"

    @property
    def fills_memory(self) -> bool:
        """Whether micro-batches take whatever fits, beside the gradients of those before."""
        grows_by_accumulation = self.batch_increase_function is not None and not self.growth_is_bound_by_memory
        return self.cuts_by_length or self.explores or (self.micro_batch_size is None and grows_by_accumulation)

    @property
    def growth_is_bound_by_memory(self) -> bool:
        """Whether a batch has to fit in one forward."""
        return self.micro_batch_size is None and not self.grow_beyond_memory

    @property
    def enabled(self) -> bool:
        """False: batches are those of the stock run."""
        grows = self.batch_increase_function is not None
        return self.use_maximum_batch_size or grows or self.micro_batch_size is not None

    @property
    def probes(self) -> bool:
        """Whether the largest batch has to be measured."""
        grows = self.batch_increase_function is not None
        needs_bound = grows and self.growth_is_bound_by_memory and self.max_batch_size is None
        return self.enabled and (self.use_maximum_batch_size or self.fills_memory or needs_bound)

    @classmethod
    def from_mapping(
        cls,
        section: Mapping[str, Any] | None,
        *,
        use_maximum_batch_size: Any = False,
        batch_increase_function: Any = None,
        micro_batch_size: Any = None,
        batch_size: Any = 1,
    ) -> AdaptiveBatchingConfig:
        """Validate the two top-level fields and the ``adaptive_batching`` section of a config.

        Args:
            section: The ``adaptive_batching`` section, or None.
            use_maximum_batch_size: The top-level field.
            batch_increase_function: The top-level field.
            micro_batch_size: The top-level field.
            batch_size: The configured batch size, which bounds are checked against.

        Raises:
            ConfigError: On an unknown key, a wrong type or a value out of range.
        """
        _require_bool("use_maximum_batch_size", use_maximum_batch_size)
        _require_positive_int("batch_size", batch_size)
        _check_increase_field(batch_increase_function)
        _check_micro_batch_size(micro_batch_size)
        if not use_maximum_batch_size and batch_increase_function is None:
            _check_that_it_divides(micro_batch_size, batch_size)
        if section is not None and not isinstance(section, Mapping):
            raise ConfigError(
                f"adaptive_batching={section!r} must be a mapping of settings, such as {{search: predict}}"
            )
        values = {key: value for key, value in (section or {}).items() if value is not None}  # null: the default
        known = [f.name for f in dataclasses.fields(cls) if f.name not in _TOP_LEVEL]
        for key in section or {}:
            if key not in known:
                raise ConfigError(f"adaptive_batching.{key} is unknown{_closest(str(key), known)}")

        for key in _FLAGS:
            if key in values:
                _require_bool(f"adaptive_batching.{key}", values[key])
        for key in ("max_batch_size", "sequence_length", "noise_scale_every"):
            if values.get(key) is not None:
                _require_positive_int(f"adaptive_batching.{key}", values[key])
        for key in ("memory_limit", "headroom"):
            if values.get(key) is not None:
                values[key] = MemoryAmount.parse(f"adaptive_batching.{key}", values[key])
        if values.get("report_dir") is not None and not isinstance(values["report_dir"], str):
            raise ConfigError(f"adaptive_batching.report_dir={values['report_dir']!r} must be a path")
        if values.get("keep_global_batch") and values.get("grow_beyond_memory"):
            raise ConfigError(
                "adaptive_batching.keep_global_batch=True keeps what the optimizer sees, and grow_beyond_memory=True "
                "lets it grow by accumulation; set one of them to False"
            )
        _check_increase_every(values.get("increase_every", "epoch"))
        scaling = values.get("lr_scaling", "none")
        if not isinstance(scaling, str) or scaling not in LR_SCALINGS:
            raise ConfigError(
                f"adaptive_batching.lr_scaling={scaling!r} is unknown{_closest(str(scaling), list(LR_SCALINGS))}"
            )
        most = values.get("max_lr_scale", 1.0)
        if isinstance(most, bool) or not isinstance(most, (int, float)) or not most >= 1:
            raise ConfigError(f"adaptive_batching.max_lr_scale={most!r} must be a number of at least 1")
        search = values.get("search", "predict")
        if not isinstance(search, str) or search not in SEARCHES:
            raise ConfigError(f"adaptive_batching.search={search!r} is unknown{_closest(str(search), list(SEARCHES))}")
        limit = values.get("memory_limit")
        if limit is not None and limit.of(2**50) == 0:
            raise ConfigError(f"adaptive_batching.memory_limit={section['memory_limit']!r} leaves no memory")  # type: ignore[index]
        maximum = values.get("max_batch_size")
        if maximum is not None and maximum < batch_size:
            raise ConfigError(
                f"adaptive_batching.max_batch_size={maximum} is below batch_size={batch_size}; "
                f"raise max_batch_size or set batch_size to at most {maximum}"
            )
        return cls(
            use_maximum_batch_size=use_maximum_batch_size,
            batch_increase_function=batch_increase_function,
            micro_batch_size=micro_batch_size,
            **values,
        )


_FLAGS = ("round_to_power_of_two", "keep_global_batch", "grow_beyond_memory", "grow_during_warmup", "recover_from_oom")
_TOP_LEVEL = ("use_maximum_batch_size", "batch_increase_function", "micro_batch_size")


def _require_bool(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} must be True or False (without quotes)")


def _require_positive_int(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}={value!r} must be a whole number of at least 1")


def _check_increase_field(value: Any) -> None:
    remedy = (
        "write a dotted path to a function (epoch, current_batch_size) -> int, such as "
        "'my_package.my_module.my_function', or {_component_: my_package.my_module.my_factory, ...arguments}"
    )
    if isinstance(value, Mapping):
        if not isinstance(value.get("_component_"), str):
            raise ConfigError(f"batch_increase_function={dict(value)!r} has no _component_; {remedy}")
    elif value is not None and not isinstance(value, str):
        raise ConfigError(f"batch_increase_function={value!r} is of type {type(value).__name__}; {remedy}")


def _check_increase_every(value: Any) -> None:
    remedy = "write epoch, or a fraction of an epoch that divides it, such as 0.5, 0.25 or 0.1"
    if value == "epoch":
        return
    if isinstance(value, (bool, str)) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ConfigError(f"adaptive_batching.increase_every={value!r} cannot be used; {remedy}")
    if abs(round(1 / value) * value - 1) > 1e-3:
        raise ConfigError(f"adaptive_batching.increase_every={value!r} does not divide an epoch; {remedy}")


def _check_micro_batch_size(value: Any) -> None:
    if value is None or value in ("auto", "explore"):
        return
    if isinstance(value, str):
        raise ConfigError(f"micro_batch_size={value!r} must be a whole number, auto, explore or null")
    _require_positive_int("micro_batch_size", value)


def _check_that_it_divides(value: Any, batch_size: int) -> None:
    if isinstance(value, int) and batch_size % value:
        divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise ConfigError(f"micro_batch_size={value} does not divide batch_size={batch_size}; these do: {divisors}")


def _closest(key: str, known: list[str]) -> str:
    match = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {match[0]!r}?" if match else ";"
    return f"{hint} Known: {', '.join(sorted(known))}"
