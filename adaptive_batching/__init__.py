"""Find the largest batch that fits, and grow it while training.

Nothing here needs torchtune; :mod:`adaptive_batching.torchtune` is what its recipes use.
"""

from adaptive_batching.config import AdaptiveBatchingConfig
from adaptive_batching.growth.accumulation import FixedAccumulation, KeepGlobal
from adaptive_batching.growth.controller import BatchController
from adaptive_batching.growth.course import Course, RunShape
from adaptive_batching.growth.increase import GrowthState, IncreaseFunction, IncreaseFunctionError
from adaptive_batching.memory import is_out_of_memory, memory_meter
from adaptive_batching.probe.does_not_fit import DoesNotFitError
from adaptive_batching.probe.find import find_maximum_batch_size
from adaptive_batching.probe.result import ProbeResult
from adaptive_batching.probe.trial import TrainingStep
from adaptive_batching.values import ConfigError

__version__ = "0.1.0"

__all__ = [
    "AdaptiveBatchingConfig",
    "BatchController",
    "ConfigError",
    "Course",
    "DoesNotFitError",
    "FixedAccumulation",
    "GrowthState",
    "IncreaseFunction",
    "IncreaseFunctionError",
    "KeepGlobal",
    "ProbeResult",
    "RunShape",
    "TrainingStep",
    "find_maximum_batch_size",
    "is_out_of_memory",
    "memory_meter",
]
