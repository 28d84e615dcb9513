"""Functions that say how the batch grows; a config names them, as ``adaptive_batching.growth.step``."""

from adaptive_batching._growth.schedules import *  # noqa: F403
from adaptive_batching._growth.schedules import __all__ as __all__
