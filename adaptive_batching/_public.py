"""The public names from where they are defined. ``adaptive_batching`` imports this when one is first asked for."""

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
    "is_out_of_memory",
    "memory_meter",
    "plan_batch_sizes",
]  # fmt: skip
