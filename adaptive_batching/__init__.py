"""Find the largest batch that fits, grow it while training, and go on when a step runs out of memory.

What is listed in ``__all__`` is the public interface, with :mod:`adaptive_batching.growth`. It needs torch alone;
:mod:`adaptive_batching.torchtune` is what the recipes use.
"""

from adaptive_batching import growth
from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._growth.batch_size_schedule import BatchSizeSchedule, RunShape, plan_batch_sizes
from adaptive_batching._growth.increase import (
    BatchController,
    FixedAccumulation,
    GrowthState,
    IncreaseFunction,
    IncreaseFunctionError,
    KeepGlobal,
)
from adaptive_batching._loop.step import AdaptiveStep
from adaptive_batching._memory import memory_meter
from adaptive_batching._out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._probe.find import find_maximum_batch_size
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._values import AdaptiveBatchingError, ConfigError

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
