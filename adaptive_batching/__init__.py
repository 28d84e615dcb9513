"""Find the largest batch that fits, grow it while training, and go on when a step runs out of memory.

What is listed in ``__all__`` is the public interface, with :mod:`adaptive_batching.growth`. It needs torch alone;
:mod:`adaptive_batching.torchtune` is what the recipes use.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from adaptive_batching import growth
    from adaptive_batching._public import *  # noqa: F403

__version__ = "0.1.0"

__all__ = [
    "AdaptiveBatchingConfig",
    "AdaptiveBatchingError",
    "AdaptiveStep",
    "BatchController",
    "BatchSizeSchedule",
    "ConfigError",
    "DoesNotFitError",
    "FixedAccumulation",
    "GrowthState",
    "IncreaseFunction",
    "IncreaseFunctionError",
    "KeepGlobal",
    "ProbeResult",
    "RunShape",
    "find_maximum_batch_size",
    "growth",
    "is_out_of_memory",
    "memory_meter",
    "plan_batch_sizes",
]  # fmt: skip


def __getattr__(name: str) -> _typing.Any:
    """Import what is asked for; so the command line answers without torch, which takes seconds to import."""
    if name == "growth":
        return _importlib.import_module("adaptive_batching.growth")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(_importlib.import_module("adaptive_batching._public"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
