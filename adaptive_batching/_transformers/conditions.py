"""What the memory of a trainer's step depends on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory.meter import MemoryMeter
from adaptive_batching._probe.sizing import ProbeRequest
from adaptive_batching._probe.stored_probe import (
    Conditions,
    described,
    described_devices,
    plain,
    settings_of_memory,
    versions_of,
)
from adaptive_batching._values import masked

_VERSIONS = ("transformers", "accelerate", "peft", "trl", "bitsandbytes")
# Arguments that the memory of a training step cannot depend on. Any other that changes calls for another probe.
_NOT_OF_MEMORY = frozenset(
    {
        "output_dir", "num_train_epochs", "max_steps", "learning_rate", "warmup_steps", "disable_tqdm", "report_to",
        "run_name", "project", "prediction_loss_only", "batch_eval_metrics", "enable_jit_checkpoint", "push_to_hub",
        "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "ignore_data_skip",
        "restore_callback_states_from_checkpoint", "resume_from_checkpoint", "seed", "data_seed", "local_rank", "debug",
        "ddp_timeout", "dataset_num_proc", "skip_memory_metrics", "bf16_full_eval", "fp16_full_eval",
        "per_device_eval_batch_size",
        # What of these matters has entries of its own.
        "per_device_train_batch_size", "gradient_accumulation_steps",
    }
)  # fmt: skip
_PREFIXES_NOT_OF_MEMORY = (
    "logging_", "log_", "save_", "eval_", "hub_", "trackio_", "lr_scheduler_", "adam_", "dataloader_", "do_",
    "include_",
)  # fmt: skip


def conditions_of(
    trainer: Any, settings: AdaptiveBatchingConfig, request: ProbeRequest, facts: Mapping[str, Any], meter: MemoryMeter,
    ranks: int,
) -> Conditions:  # fmt: skip
    """Return what memory depends on in a trainer; ``facts`` are what the run adds."""
    arguments = {
        name: value
        for name, value in trainer.args.to_dict().items()
        if name not in _NOT_OF_MEMORY and not name.startswith(_PREFIXES_NOT_OF_MEMORY)
    }
    collator = trainer.data_collator
    slots = [name for class_ in type(collator).__mro__ for name in getattr(class_, "__slots__", ())]
    values = {name: getattr(collator, name, None) for name in [*getattr(collator, "__dict__", {}), *slots]}
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, str))}
    run = {
        **arguments,
        **facts,
        "trainer": type(trainer).__name__,
        "collator": [getattr(collator, "__qualname__", type(collator).__qualname__), numbers],
        "loss": getattr(trainer.compute_loss_func, "__qualname__", None),
        "precision": trainer.accelerator.mixed_precision,
    }
    others = {name: value for name, value in vars(trainer).items() if isinstance(value, nn.Module)}
    models = {name: described(value) for name, value in others.items() if name != "model_wrapped"}
    devices = described_devices(meter, ranks, is_sharded=trainer.is_fsdp_enabled)
    return Conditions(
        plain(settings_of_memory(settings, request)), plain(masked(run)), {"model": described(trainer.model), **models},
        versions_of(_VERSIONS), devices,
    )  # fmt: skip
