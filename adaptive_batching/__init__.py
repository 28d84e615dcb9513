"""Find the largest batch that fits, grow it while training, and go on when a step runs out of memory.

The public interface, which needs torch alone:

- stepping and probing: ``AdaptiveStep``, ``find_maximum_batch_size``, ``ProbeResult``, ``memory_meter``,
  ``is_out_of_memory``;
- growth: ``plan_batch_sizes``, ``growth``, ``GrowthState``, ``IncreaseFunction``, ``BatchController``,
  ``BatchSizeSchedule``, ``RunShape``, ``FixedAccumulation``, ``KeepGlobal``;
- settings: ``AdaptiveBatchingConfig``;
- errors: ``ConfigError``, ``DoesNotFitError``, ``IncreaseFunctionError``, each an ``AdaptiveBatchingError``.

Public modules are :mod:`~adaptive_batching.growth`, :mod:`~adaptive_batching.attention`,
:mod:`~adaptive_batching.transformers` (Trainer and TRL) and :mod:`~adaptive_batching.torchtune` (recipes).
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from adaptive_batching import growth
    from adaptive_batching._config import AdaptiveBatchingConfig
    from adaptive_batching._growth.batch_size_schedule import BatchSizeSchedule, RunShape, plan_batch_sizes
    from adaptive_batching._growth.controller import BatchController, FixedAccumulation, KeepGlobal
    from adaptive_batching._growth.increase import GrowthState, IncreaseFunction, IncreaseFunctionError
    from adaptive_batching._loop.step import AdaptiveStep
    from adaptive_batching._memory.meter import memory_meter
    from adaptive_batching._memory.out_of_memory import is_out_of_memory
    from adaptive_batching._probe.does_not_fit import DoesNotFitError
    from adaptive_batching._probe.find import find_maximum_batch_size
    from adaptive_batching._probe.sizes import ProbeResult
    from adaptive_batching._values import AdaptiveBatchingError, ConfigError

__version__ = "0.1.0"

_DEFINED_IN = {
    "_config": ["AdaptiveBatchingConfig"],
    "_growth.batch_size_schedule": ["BatchSizeSchedule", "RunShape", "plan_batch_sizes"],
    "_growth.controller": ["BatchController", "FixedAccumulation", "KeepGlobal"],
    "_growth.increase": ["GrowthState", "IncreaseFunction", "IncreaseFunctionError"],
    "_loop.step": ["AdaptiveStep"],
    "_memory.meter": ["memory_meter"],
    "_memory.out_of_memory": ["is_out_of_memory"],
    "_probe.does_not_fit": ["DoesNotFitError"],
    "_probe.find": ["find_maximum_batch_size"],
    "_probe.sizes": ["ProbeResult"],
    "_values": ["AdaptiveBatchingError", "ConfigError"],
}  # fmt: skip

__all__ = [
    "AdaptiveBatchingConfig", "AdaptiveBatchingError", "AdaptiveStep", "BatchController", "BatchSizeSchedule",
    "ConfigError", "DoesNotFitError", "FixedAccumulation", "GrowthState", "IncreaseFunction", "IncreaseFunctionError",
    "KeepGlobal", "ProbeResult", "RunShape", "find_maximum_batch_size", "growth", "is_out_of_memory", "memory_meter",
    "plan_batch_sizes",
]  # fmt: skip


def __getattr__(name: str) -> _typing.Any:
    """Import what is asked for; so the command line answers without torch, which takes seconds to import."""
    if name == "growth":
        return _importlib.import_module("adaptive_batching.growth")
    for module, names in _DEFINED_IN.items():
        if name in names:
            found = globals()[name] = getattr(_importlib.import_module(f"adaptive_batching.{module}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
