"""What cannot be trained this way, said before training, in one line that says what works."""

from __future__ import annotations

from typing import Any

import transformers
from torch.utils.data import BatchSampler
from transformers import Trainer

from adaptive_batching._transformers.handed_out import Samples
from adaptive_batching._values import ConfigError

_STEPS_IN_BACKWARD = ("lomo", "adalomo", "layerwise")
_WORKS = "train in one process on one device, or in several with DDP (torchrun)"


def check_trainer(trainer: Any) -> None:
    """Raise ConfigError if a trainer cannot run its steps in parts."""
    args, name = trainer.args, type(trainer).__name__
    optimizer = str(getattr(args.optim, "value", args.optim))
    parallel = {"tensor": "get_tp_size", "context": "get_cp_size", "sequence": "get_sp_size"}
    if not hasattr(Trainer, "loss_is_scaled_for_ga"):
        raise ConfigError(f"transformers {transformers.__version__} is too old: pip install 'transformers>=5.19'")
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size=True starts again with fewer samples; set it to False, and micro_batch_size='auto' "
            "or use_maximum_batch_size=True"
        )
    if trainer.is_deepspeed_enabled:
        raise ConfigError(f"DeepSpeed shards a model its own way; {_WORKS}")
    if trainer.is_fsdp_enabled or getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ConfigError(f"fsdp={args.fsdp!r} leaves ranks waiting for one that runs out of memory; {_WORKS}")
    for kind, size in parallel.items():
        if getattr(trainer, size, lambda: 1)() > 1:
            raise ConfigError(f"{kind} parallelism has collectives within each layer; {_WORKS}")
    if args.n_gpu > 1:
        raise ConfigError(f"one process has {args.n_gpu} devices, which DataParallel uses; {_WORKS}")
    if any(each in optimizer for each in _STEPS_IN_BACKWARD):
        raise ConfigError(f"optim={optimizer!r} updates weights in the backward pass of each part; take another")
    if type(trainer)._prepare_inputs is not Trainer._prepare_inputs:
        raise ConfigError(
            f"{name} makes its batches while training, as with generated answers; Trainer, SFTTrainer, DPOTrainer and "
            f"RewardTrainer work"
        )


def check_data(trainer: Any) -> None:
    """Raise ConfigError if the training data cannot be handed out as samples."""
    args, data = trainer.args, trainer.train_dataset
    if data is not None and not hasattr(data, "__len__"):
        raise ConfigError(f"train_dataset is a {type(data).__name__}, which has no length; give a map-style data set")
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        raise ConfigError("train_sampling_strategy='batch_rebalance' makes batches of its own; use random")
    for key in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, key):
            raise ConfigError(f"accelerator_config.{key}=True cuts batches after they are collated; set it to False")


def check_loader(trainer: Any, loader: Any) -> list[BatchSampler]:
    """Return the batch samplers of a training loader, whose batch size can be set, from the outermost in.

    Raises:
        ConfigError: If the loader is of another kind.
    """
    outermost = getattr(loader, "batch_sampler", None)
    samplers = [outermost, getattr(outermost, "batch_sampler", None)]
    found = [each for each in samplers if isinstance(each, BatchSampler)]
    if not found or not isinstance(loader.collate_fn([loader.dataset[0]]), Samples):
        raise ConfigError(
            f"get_train_dataloader of {type(trainer).__name__} does not use data_collator and a batch sampler of "
            f"torch; leave it to Trainer"
        )
    return found
