"""Checks before training: what cannot be trained this way is refused in one line that says what works."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import BatchSampler
from transformers import Trainer

from adaptive_batching._ranks.fsdp import can_drain
from adaptive_batching._transformers.handed_out import Samples
from adaptive_batching._values import ConfigError

_STEPS_IN_BACKWARD = ("lomo", "adalomo", "layerwise")
_WORKS = "train on one device, or on several with DDP (torchrun) or FSDP2 (fsdp=True)"


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
    if args.device.type == "xla" or trainer.is_fsdp_xla_enabled:
        raise ConfigError(f"a TPU compiles a step as a whole, which cannot run again in parts; {_WORKS}, on GPUs")
    if trainer.is_fsdp_enabled:
        _check_fsdp(trainer)
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ConfigError(
            "a model that from_pretrained has sharded is not Accelerate's; load it whole, and set fsdp=True"
        )
    for kind, size in parallel.items():
        if getattr(trainer, size, lambda: 1)() > 1:
            raise ConfigError(f"{kind} parallelism has collectives within each layer; {_WORKS}")
    if args.n_gpu > 1:
        raise ConfigError(f"one process has {args.n_gpu} devices, which DataParallel uses; {_WORKS}")
    config = getattr(trainer.model, "config", None)
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        raise ConfigError(
            "output_router_logits=True adds a loss that balances experts over a batch, to which its parts do not add "
            "up; set it to False in the model's config, or train without adaptive"
        )
    if any(each in optimizer for each in _STEPS_IN_BACKWARD):
        raise ConfigError(f"optim={optimizer!r} updates weights in the backward pass of each part; take another")
    if type(trainer)._prepare_inputs is not Trainer._prepare_inputs:
        raise ConfigError(
            f"{name} makes its batches while training, as with generated answers; Trainer, SFTTrainer, DPOTrainer and "
            f"RewardTrainer work"
        )


def _check_fsdp(trainer: Any) -> None:
    plugin, mesh = trainer.accelerator.state.fsdp_plugin, trainer.accelerator.parallelism_config
    if plugin.fsdp_version != 2:
        raise ConfigError("FSDP1 leaves ranks waiting for one that runs out of memory; set fsdp_config={'version': 2}")
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ConfigError("fsdp_config cpu_offload=True steps the optimizer on the host; set it to False")
    if mesh is not None and mesh.dp_replicate_size > 1:
        raise ConfigError(
            f"parallelism_config dp_replicate_size={mesh.dp_replicate_size} sums gradients in a second collective, for "
            f"which ranks would wait if one ran out of memory; set it to 1"
        )
    if not can_drain():
        raise ConfigError(f"torch {torch.__version__} cannot reset FSDP2 after an error (2.13 can); train with DDP")


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
    if args.world_size > 1 and not args.accelerator_config.even_batches:
        raise ConfigError("accelerator_config.even_batches=False gives ranks unequal numbers of steps; set it to True")


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
