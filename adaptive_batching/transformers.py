"""Adaptive batching for Hugging Face's ``Trainer`` and TRL's trainers.

trainer = adaptive(SFTTrainer)(model, args, train_dataset=data, adaptive=AdaptiveArguments(micro_batch_size="auto"))
"""

import importlib.util as _importlib_util

from adaptive_batching._values import install_extra as _install_extra

if _importlib_util.find_spec("transformers") is None:
    raise ImportError(f"transformers is not installed; {_install_extra('transformers')}")

from adaptive_batching._transformers.arguments import AdaptiveArguments
from adaptive_batching._transformers.callback import AdaptiveCallback
from adaptive_batching._transformers.trainer import adaptive, adopt

__all__ = ["AdaptiveArguments", "AdaptiveCallback", "adaptive", "adopt"]
