"""The settings of adaptive batching: validated when they are made, immutable afterwards.

This module knows neither torch nor omegaconf. A YAML reader hands :meth:`AdaptiveBatchingConfig.from_mapping` plain
Python values and gets a dataclass or a :class:`ConfigError` that names key, value and remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adaptive_batching._values import (
    SEARCH_NAMES,
    ConfigError,
    Fixed,
    MemoryAmount,
    MicroBatchSize,
    Whole,
    divisors_of,
    parse_micro_batch_size,
    require_batch_size,
    require_bool,
    require_positive_int,
)

_MOST_HEADROOM = 0.5  # share of a device; more is a share to use, written in the wrong place

LR_SCALINGS = ("none", "sqrt", "linear", "auto")
"""``auto`` is ``linear`` for SGD and ``sqrt`` for all other optimizers."""

TOP_LEVEL = ("use_maximum_batch_size", "batch_increase_function", "micro_batch_size", "save_every_n_steps")
"""Fields at the top level of a config; the others belong to its section ``adaptive_batching``."""


IncreaseField = str | Mapping[str, Any] | Callable[..., int | None] | None
"""A dotted path, a factory with its arguments, or the function itself."""


@dataclass(frozen=True)
class AdaptiveBatchingConfig:
    """The settings that a user has made.

    Fields also take the values of a YAML, such as ``micro_batch_size="auto"`` or ``headroom="2%"``, and hold them
    parsed.

    Raises:
        ConfigError: On a value of the wrong type or out of range, and on two that contradict each other.
    """

    use_maximum_batch_size: bool = False
    """Find the largest batch that fits before training, and train with it, or grow up to it."""

    batch_increase_function: IncreaseField = None
    """Decides when the batch grows, and by how much; see :mod:`adaptive_batching.growth`."""

    micro_batch_size: MicroBatchSize = field(default_factory=Whole)
    """Samples per forward pass; ``auto``: the fastest token budget that fits; ``explore``: the fastest of several.
    None: the whole batch. The gradient stays the same."""

    padding: bool = False
    """True to have ``micro_batch_size=auto`` pad samples of similar length, rather than pack them without padding."""

    balance_ranks: bool = True
    """False to have each rank compute its own samples, with ``micro_batch_size=auto``."""

    save_every_n_steps: int | None = None
    """Optimizer steps between checkpoints. None saves one per epoch, as stock does."""

    search: str = "predict"
    """How the probe looks for the maximum."""

    round_to_power_of_two: bool = True
    """Round the maximum down to a power of two."""

    max_batch_size: int | None = None
    """Upper bound on the batch size. With it, growth alone needs no probe."""

    memory_limit: MemoryAmount | None = None
    """Device memory that training may use in total. None for what is free, less the headroom."""

    headroom: MemoryAmount = field(default_factory=lambda: MemoryAmount(fraction=0.02))
    """Device memory to keep free; ignored with a ``memory_limit``."""

    sequence_length: int | None = None
    """Tokens per sample in the probe. None for the packed length, else the tokenizer's ``max_seq_len``, else the
    longest sample."""

    keep_global_batch: bool = False
    """Divide ``gradient_accumulation_steps`` by the same factor as ``batch_size`` grows."""

    grow_beyond_memory: bool = False
    """Let the batch outgrow memory; it then runs in several forward passes."""

    increase_every: str | float = "epoch"
    """How often to ask ``batch_increase_function``."""

    grow_during_warmup: bool = True
    """False delays growth until the learning rate peaks."""

    lr_scaling: str = "none"
    """How the learning rate follows the global batch, on top of its schedule."""

    max_lr_scale: float = 4.0
    """Largest factor that ``lr_scaling`` applies."""

    recover_from_oom: bool | None = None
    """Rerun a step that ran out of memory in smaller micro-batches.

    None does so where one of the settings without a prefix is set.
    """

    audit_every: int | None = None
    """Optimizer steps between checks that parts add up to their union. None for the 1st, 10th, 100th split step."""

    report_dir: str | None = None
    """Where the record, the page and the probe's result go."""

    if TYPE_CHECKING:  # what fields take, where they hold something else

        def __init__(
            self, *, use_maximum_batch_size: bool = ..., batch_increase_function: IncreaseField = ...,
            micro_batch_size: MicroBatchSize | int | str | None = ..., padding: bool = ..., balance_ranks: bool = ...,
            save_every_n_steps: int | None = ..., search: str = ..., round_to_power_of_two: bool = ...,
            max_batch_size: int | None = ..., memory_limit: MemoryAmount | str | float | None = ...,
            headroom: MemoryAmount | str | float = ..., sequence_length: int | None = ...,
            keep_global_batch: bool = ..., grow_beyond_memory: bool = ..., increase_every: str | float = ...,
            grow_during_warmup: bool = ..., lr_scaling: str = ..., max_lr_scale: float = ...,
            recover_from_oom: bool | None = ..., audit_every: int | None = ..., report_dir: str | None = ...,
        ) -> None: ...  # fmt: skip

    def __post_init__(self) -> None:
        _check_increase_field(self.batch_increase_function)
        self._set("micro_batch_size", parse_micro_batch_size(self.micro_batch_size))
        for key in _FLAGS:
            require_bool(key if key in TOP_LEVEL else f"adaptive_batching.{key}", getattr(self, key))
        if self.recover_from_oom is not None:
            require_bool("adaptive_batching.recover_from_oom", self.recover_from_oom)
        for key in ("save_every_n_steps", "max_batch_size", "sequence_length", "audit_every"):
            if getattr(self, key) is not None:
                require_positive_int(key if key in TOP_LEVEL else f"adaptive_batching.{key}", getattr(self, key))
        self._set("headroom", MemoryAmount.parse("adaptive_batching.headroom", headroom := self.headroom))
        if (kept := self.headroom.fraction or 0) > _MOST_HEADROOM:
            remedy = f"adaptive_batching.memory_limit={100 - 100 * kept:g}%" if kept < 1 else "less, such as 2% or 1GiB"
            raise ConfigError(
                f"adaptive_batching.headroom={headroom!r} keeps {100 * kept:g} % of the device free; write {remedy}"
            )
        if (limit := self.memory_limit) is not None:
            amount = MemoryAmount.parse("adaptive_batching.memory_limit", limit)
            self._set("memory_limit", amount)
            if amount.bytes_of(2**50) < 2**20:
                in_bytes = f" is {amount.num_bytes} bytes, which" if amount.num_bytes else ""
                raise ConfigError(
                    f"adaptive_batching.memory_limit={limit!r}{in_bytes} leaves no memory for training; write how much "
                    "it may use, such as 40GiB or 90%"
                )
        if self.report_dir is not None and not isinstance(self.report_dir, str):
            raise ConfigError(f"adaptive_batching.report_dir={self.report_dir!r} must be a path")
        if self.keep_global_batch and self.grow_beyond_memory:
            raise ConfigError(
                "adaptive_batching.keep_global_batch=True keeps the global batch, but grow_beyond_memory=True grows "
                "it by accumulation; set one of them to False"
            )
        _check_increase_every(self.increase_every)
        _check_choice("lr_scaling", self.lr_scaling, LR_SCALINGS)
        _check_choice("search", self.search, SEARCH_NAMES)
        scale = self.max_lr_scale
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not scale >= 1:
            raise ConfigError(f"adaptive_batching.max_lr_scale={scale!r} must be a number of at least 1")

    def _set(self, field: str, parsed: Any) -> None:
        object.__setattr__(self, field, parsed)

    @property
    def decisions_per_epoch(self) -> int:
        """Number of decisions on the batch size in an epoch."""
        return 1 if isinstance(self.increase_every, str) else round(1 / self.increase_every)

    @property
    def grows(self) -> bool:
        """True if an increase function is asked for larger batches."""
        return self.batch_increase_function is not None

    @property
    def resizes(self) -> bool:
        """True if a batch may have another size than configured."""
        return self.use_maximum_batch_size or self.grows

    @property
    def enabled(self) -> bool:
        """False for a run that is left to the host, its checkpoints included."""
        is_split = not isinstance(self.micro_batch_size, Whole)
        return self.resizes or is_split or self.save_every_n_steps is not None or self.recover_from_oom is True

    @classmethod
    def from_mapping(
        cls, section: Mapping[str, Any] | None, *, batch_size: Any = 1, **fields: Any
    ) -> AdaptiveBatchingConfig:
        """Validate the top-level fields and the ``adaptive_batching`` section of a config.

        Args:
            section: The ``adaptive_batching`` section, or None. A null in it means the default.
            batch_size: The configured batch size, which bounds are checked against.
            fields: The top-level fields: ``use_maximum_batch_size``, ``batch_increase_function``, ``micro_batch_size``
                and ``save_every_n_steps``.

        Raises:
            ConfigError: On an unknown key, a wrong type or a value out of range.
        """
        require_batch_size(batch_size)
        if section is not None and not isinstance(section, Mapping):
            raise ConfigError(
                f"adaptive_batching={section!r} must be a mapping of settings, such as {{search: predict}}"
            )
        for key, value in (section or {}).items():
            if key in TOP_LEVEL:
                shown = "null" if value is None else value
                raise ConfigError(f"adaptive_batching.{key} belongs at the top level: write {key}={shown}")
            if key not in SECTION:
                raise ConfigError(f"adaptive_batching.{key} is unknown{nearest(str(key), SECTION)}")
        settings = cls(**fields, **{key: value for key, value in (section or {}).items() if value is not None})
        size, maximum = settings.micro_batch_size, settings.max_batch_size
        if isinstance(size, Fixed) and not settings.resizes and batch_size % size.samples:
            raise ConfigError(
                f"micro_batch_size={size} does not divide batch_size={batch_size}; these do: {divisors_of(batch_size)}"
            )
        if maximum is not None and maximum < batch_size:
            raise ConfigError(
                f"adaptive_batching.max_batch_size={maximum} is below batch_size={batch_size}; "
                f"raise max_batch_size or set batch_size to at most {maximum}"
            )
        return settings


_FLAGS = [setting.name for setting in dataclasses.fields(AdaptiveBatchingConfig) if isinstance(setting.default, bool)]
SECTION = [setting.name for setting in dataclasses.fields(AdaptiveBatchingConfig) if setting.name not in TOP_LEVEL]


def as_overrides(arguments: Sequence[str]) -> list[str]:
    """Return settings that are written as flags, such as ``--micro-batch-size auto``, as a config's overrides are."""
    overrides = []
    for index, argument in enumerate(arguments):
        name, equals, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if argument.startswith("--") and name in (*TOP_LEVEL, *SECTION, "batch_size", "gradient_accumulation_steps"):
            value = value if equals else " ".join(arguments[index + 1 : index + 2])
            overrides.append(f"{'adaptive_batching.' if name in SECTION else ''}{name}={value}")
    return overrides


def _check_choice(key: str, value: Any, known: Collection[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"adaptive_batching.{key}={value!r} is unknown{nearest(str(value), known)}")


def _check_increase_field(value: Any) -> None:
    remedy = (
        "write a dotted path to a function (epoch, current_batch_size) -> int, such as "
        "'my_package.my_module.my_function', or {_component_: my_package.my_module.my_factory, ...arguments}"
    )
    if isinstance(value, Mapping):
        if not isinstance(value.get("_component_"), str):
            raise ConfigError(f"batch_increase_function={dict(value)!r} has no _component_; {remedy}")
    elif value is not None and not isinstance(value, str) and not callable(value):
        raise ConfigError(f"batch_increase_function={value!r} is of type {type(value).__name__}; {remedy}")


def _check_increase_every(value: Any) -> None:
    remedy = "write epoch, or a fraction of an epoch that divides it, such as 0.5, 0.25 or 0.1"
    if value == "epoch":
        return
    if isinstance(value, (bool, str)) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ConfigError(f"adaptive_batching.increase_every={value!r} cannot be used; {remedy}")
    if abs(round(1 / value) * value - 1) > 1e-3:
        raise ConfigError(f"adaptive_batching.increase_every={value!r} does not divide an epoch; {remedy}")


def nearest(key: str, known: Collection[str]) -> str:
    match = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {match[0]!r}? Known" if match else "known"
    return f"; {hint}: {', '.join(sorted(known))}"
